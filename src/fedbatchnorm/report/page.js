/* The figures of the report: values on hover, series on and off, one level at a time, smoothing, zoom. */
(() => {
  "use strict";
  const DASHES = ["7 3", "", "6 2 1.5 2", "1.5 3", "", "8 3 2 3", "5 3", "9 2 2 2", "2 2", "3 3"];
  const number = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(Math.abs(value) < 10 ? 2 : 1));
  const add = (parent, tag, attributes = {}, text = null) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  };
  let clips = 0;

  document.querySelector(".theme").addEventListener("click", (event) => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    event.currentTarget.textContent = dark ? "Dark" : "Light";
  });
  if (matchMedia("(prefers-color-scheme: dark)").matches) document.querySelector(".theme").textContent = "Light";
  const contents = document.querySelector("nav details");
  if (matchMedia("(max-width: 70rem)").matches) contents.open = false;

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const state = { off: new Set(), choice: chart.choices.at(-1), smooth: 0, fit: false, zoom: new Map() };
    const tools = add(figure, "div", { class: "tools" });
    const legend = add(figure, "div", { class: "legend", role: "group", "aria-label": "series" });
    const small = ["points", "discs"].includes(chart.panels[0].kind);
    const home = add(figure, "div", { class: small ? "panels small" : "panels" });
    const shown = () => chart.panels.filter((panel) => !panel.choice || panel.choice === state.choice);
    const draw = () => {
      drawLegend(legend, shown(), state, home, draw);
      home.replaceChildren(...shown().map((panel) => box(panel, state, draw)));
      for (const [i, panel] of shown().entries()) drawPanel(home.children[i], panel, state, draw);
    };
    drawTools(tools, chart, state, draw);
    let width = home.clientWidth;
    draw();
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (width === home.clientWidth) return;
      width = home.clientWidth;
      draw();
    })).observe(home);
  }

  function drawTools(tools, chart, state, draw) {
    if (chart.choices.length > 1) {
      const group = add(tools, "div", { class: "choices", role: "group", "aria-label": "heterogeneity" });
      for (const choice of chart.choices) {
        const button = add(group, "button", { type: "button", "aria-pressed": choice === state.choice }, choice);
        button.addEventListener("click", () => {
          state.choice = choice;
          for (const other of group.children) other.setAttribute("aria-pressed", other === button);
          draw();
        });
      }
    }
    const curves = chart.panels.some((panel) => panel.kind === "curves" && panel.marks.some((mark) => mark.x.length > 5));
    if (curves) {
      const label = add(tools, "label", {}, "Smoothing");
      const slider = add(label, "input", { type: "range", min: 0, max: 5, value: 0, "aria-label": "smoothing" });
      const said = add(label, "output", {}, "off");
      slider.addEventListener("input", () => {
        state.smooth = Number(slider.value);
        said.textContent = state.smooth ? `mean of ${2 * state.smooth + 1}` : "off";
        draw();
      });
    }
    if (chart.panels[0].kind === "discs") return;
    if (!["points"].includes(chart.panels[0].kind)) {
      const fit = add(tools, "button", { type: "button", "aria-pressed": false, class: "fit" }, "Fit the axes");
      fit.addEventListener("click", () => {
        state.fit = !state.fit;
        fit.setAttribute("aria-pressed", state.fit);
        fit.textContent = state.fit ? "Full axes" : "Fit the axes";
        draw();
      });
    }
    const reset = add(tools, "button", { type: "button", class: "reset", hidden: "" }, "Reset zoom");
    reset.addEventListener("click", () => { state.zoom.clear(); draw(); });
    state.reset = reset;
    add(tools, "span", { class: "soft" }, "Point at a figure for values; drag to zoom, double-click to reset.");
  }

  function drawLegend(legend, panels, state, home, draw) {
    const marks = new Map(panels.flatMap((panel) => (panel.kind === "discs" ? [] : panel.marks)).map((mark) => [mark.key, mark]));
    const focused = legend.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    legend.replaceChildren();
    legend.hidden = marks.size < 2;
    for (const [key, mark] of marks) {
      const button = add(legend, "button", { type: "button", "aria-pressed": !state.off.has(key), "data-key": key });
      const svg = d3.select(button).append("svg").attr("width", 26).attr("height", 12).attr("class", `c${mark.color}`).attr("aria-hidden", "true");
      if (mark.groups) svg.append("path").attr("class", mark.color ? "plus" : "ring").attr("d", mark.color ? "M8 6H18M13 1V11" : "M9 6a4 4 0 1 0 8 0a4 4 0 1 0 -8 0");
      else svg.append("line").attr("class", "series").attr("x2", 26).attr("y1", 6).attr("y2", 6).attr("stroke-dasharray", DASHES[mark.color]);
      add(button, "span", {}, key);
      button.addEventListener("click", () => { state.off.has(key) ? state.off.delete(key) : state.off.add(key); draw(); });
      const light = (on) => home.querySelectorAll("[data-key]").forEach((one) => one.classList.toggle("dim", on && one.dataset.key !== key));
      for (const kind of ["pointerenter", "focus"]) button.addEventListener(kind, () => light(!state.off.has(key)));
      for (const kind of ["pointerleave", "blur"]) button.addEventListener(kind, () => light(false));
      if (key === focused) button.focus();
    }
  }

  function box(panel) {
    const made = document.createElement("div");
    made.className = "panel";
    add(made, "h4", {}, panel.title);
    return made;
  }

  function mean(values, k) {
    return values.map((_, i) => {
      const near = values.slice(Math.max(0, i - k), i + k + 1).filter((value) => value !== null);
      return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
    });
  }

  function smoothed(mark, k) {
    return k ? { ...mark, y: mean(mark.y, k), sd: mark.sd && mean(mark.sd, k), seeds: mark.seeds && mark.seeds.map((seed) => mean(seed, k)) } : mark;
  }

  function domains(panel, marks, state) {
    const zoom = state.zoom.get(panel), xs = marks.flatMap((mark) => mark.x);
    if (zoom) return zoom;
    if (panel.kind === "points") return { x: [panel.low, panel.high], y: [panel.low, panel.high] };
    if (panel.kind === "discs") return { x: [-0.7, panel.ticks.length - 0.3], y: [panel.low, panel.high] };
    const x = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    if (panel.kind === "levels") { x[0] = -0.15; x[1] = panel.ticks.length - 0.85; }
    const ys = marks.flatMap((mark) => mark.y.flatMap((y, i) => [y - (mark.sd?.[i] ?? 0), y + (mark.sd?.[i] ?? 0)]));
    const y = state.fit && ys.length ? [Math.min(...ys), Math.max(...ys)] : [panel.low, panel.high];
    if (state.fit) { const room = Math.max(0.5, 0.05 * (y[1] - y[0])); y[0] -= room; y[1] += room; }
    return { x, y };
  }

  function drawPanel(home, panel, state, draw) {
    const marks = panel.marks.filter((mark) => !state.off.has(mark.key)).map((mark) => (panel.kind === "curves" ? smoothed(mark, state.smooth) : mark));
    const width = Math.max(150, home.clientWidth), square = panel.kind === "points" || panel.kind === "discs";
    const longest = Math.max(0, ...marks.filter((mark) => !mark.unfinished).map((mark) => mark.key.length));
    const room = !square && width >= 430 ? Math.min(190, 18 + 7 * longest) : 12;
    const left = panel.rows ? 18 + 7.2 * Math.max(...panel.rows.map((row) => row.length)) : panel.y_label ? 50 : 34;
    const edge = { top: 8, right: room, bottom: panel.x_label ? 40 : 24, left };
    const high = panel.kind === "discs" ? edge.top + edge.bottom + 20 * panel.rows.length : square ? Math.min(width, 420) : 280;
    const { x: dx, y: dy } = domains(panel, marks, state);
    const x = d3.scaleLinear(dx, [edge.left, width - edge.right]), y = d3.scaleLinear(dy, [high - edge.bottom, edge.top]);
    const svg = d3.select(home).append("svg").attr("width", width).attr("height", high).attr("role", "img").attr("tabindex", 0).attr("aria-label", described(panel, marks));
    axes(svg, panel, x, y, { ...edge, width, high });
    const clip = `clip-${(clips += 1)}`;
    svg.append("clipPath").attr("id", clip).append("rect").attr("x", edge.left - 5).attr("y", edge.top - 5).attr("width", width - edge.left - edge.right + 10).attr("height", high - edge.top - edge.bottom + 10);
    const plot = svg.append("g").attr("clip-path", `url(#${clip})`);
    for (const mark of marks) {
      const group = plot.append("g").attr("class", `c${mark.color}`).attr("data-key", mark.key);
      ({ curves: drawCurve, levels: drawLevels, points: drawPoints, discs: drawDiscs })[panel.kind](group, mark, x, y);
    }
    if (!square && room > 12) ends(svg, marks, x, y, edge, high, width);
    if (panel.note) add(home, "p", { class: "note" }, panel.note);
    react(home, svg, panel, marks, { x, y, edge, width, high }, state, draw);
  }

  function described(panel, marks) {
    if (panel.kind === "points" || panel.kind === "discs") return panel.title;
    const ends = marks.map((mark) => `${mark.key} ${number(mark.y.at(-1))}`);
    return `${panel.title}. ${panel.y_label}, at the end: ${ends.join("; ")}.`;
  }

  function axes(svg, panel, x, y, { left, right, top, bottom, width, high }) {
    const bare = panel.kind === "discs";
    const below = d3.axisBottom(x).tickSize(bare ? 4 : -(high - top - bottom)).tickPadding(7);
    if (panel.ticks) {
      const every = Math.ceil(panel.ticks.length / Math.max(2, Math.floor((width - left - right) / 34)));
      below.tickValues(panel.ticks.map((_, i) => i).filter((i) => i % every === 0)).tickFormat((i) => panel.ticks[i]);
    } else below.ticks(Math.max(3, Math.floor(width / 95))).tickFormat((value) => `${value}`);
    const beside = d3.axisLeft(y).tickSize(bare ? 0 : -(width - left - right)).tickPadding(7);
    if (panel.rows) beside.tickValues(panel.rows.map((_, i) => i)).tickFormat((i) => panel.rows[i]);
    else beside.ticks(5).tickFormat((value) => `${Number(value.toFixed(6))}`);
    svg.append("g").attr("transform", `translate(0,${high - bottom})`).call(below);
    svg.append("g").attr("transform", `translate(${left},0)`).call(beside);
    svg.append("text").attr("x", (left + width - right) / 2).attr("y", high - 5).attr("text-anchor", "middle").text(panel.x_label);
    svg.append("text").attr("transform", `translate(12,${(top + high - bottom) / 2}) rotate(-90)`).attr("text-anchor", "middle").text(panel.y_label);
    if (y.domain()[0] < 0 && panel.kind === "curves") svg.append("line").attr("class", "zero").attr("x1", left).attr("x2", width - right).attr("y1", y(0)).attr("y2", y(0));
  }

  function drawCurve(group, mark, x, y) {
    const path = d3.line((_, i) => x(mark.x[i]), (value) => y(value));
    if (mark.sd) {
      const pairs = mark.y.map((value, i) => [x(mark.x[i]), y(value + (mark.sd[i] ?? 0)), y(value - (mark.sd[i] ?? 0))]);
      const back = pairs.map(([px, , low]) => `L${px},${low}`).reverse().join("");
      group.append("path").attr("class", "band").attr("d", `M${pairs.map(([px, top]) => `${px},${top}`).join("L")}${back}Z`);
    }
    for (const seed of mark.seeds ?? []) group.append("path").attr("class", "thin").attr("d", path(seed));
    group.append("path").attr("class", mark.unfinished ? "series open" : "series").attr("d", path(mark.y)).attr("stroke-dasharray", DASHES[mark.color]);
    if (mark.unfinished || mark.x.length === 1) group.append("circle").attr("class", "dot").attr("r", 3.5).attr("cx", x(mark.x.at(-1))).attr("cy", y(mark.y.at(-1)));
  }

  function drawLevels(group, mark, x, y) {
    group.append("path").attr("class", "series").attr("stroke-dasharray", DASHES[mark.color]).attr("d", d3.line((_, i) => x(mark.x[i]), (value) => y(value))(mark.y));
    mark.y.forEach((value, i) => {
      const sd = mark.sd?.[i], at = x(mark.x[i]);
      if (sd) group.append("line").attr("class", "bar").attr("x1", at).attr("x2", at).attr("y1", y(value - sd)).attr("y2", y(value + sd));
      group.append("circle").attr("class", "dot").attr("r", 3.8).attr("cx", at).attr("cy", y(value));
      const singles = mark.dots?.[i] ?? [];
      if (singles.length > 1) for (const one of singles) group.append("circle").attr("class", "dot one").attr("r", 2.2).attr("cx", at).attr("cy", y(one));
    });
  }

  function drawPoints(group, mark, x, y) {
    const byClass = new Map();
    mark.x.forEach((value, i) => {
      const px = x(value).toFixed(1), py = y(mark.y[i]).toFixed(1), kind = mark.groups[i] % 10;
      const part = mark.color ? `M${px - 4} ${py}h8m-4 -4v8` : `M${px - 3.5} ${py}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0`;
      byClass.set(kind, (byClass.get(kind) ?? "") + part);
    });
    for (const [kind, d] of byClass) group.append("g").attr("class", `k${kind}`).append("path").attr("class", mark.color ? "plus" : "ring").attr("d", d);
  }

  function drawDiscs(group, mark, x, y) {
    const most = Math.max(...mark.sizes), reach = Math.min(9, 0.48 * (x(1) - x(0)));
    mark.x.forEach((value, i) => group.append("circle").attr("class", "dot").attr("cx", x(value)).attr("cy", y(mark.y[i])).attr("r", Math.max(0.8, reach * Math.sqrt(mark.sizes[i] / most))));
  }

  /* Names at the lines' ends, pushed apart where they would lie on each other. */
  function ends(svg, marks, x, y, edge, high, width) {
    const low = edge.top + 6, deep = high - edge.bottom;
    const names = marks.filter((mark) => mark.y.length && !mark.unfinished).map((mark) => ({ mark, at: Math.min(deep, Math.max(low, y(mark.y.at(-1)))) })).sort((a, b) => a.at - b.at);
    for (let turn = 0; turn < 60; turn += 1) {
      for (let i = 1; i < names.length; i += 1) {
        const over = 15 - (names[i].at - names[i - 1].at);
        if (over > 0.01) { names[i - 1].at -= over / 2; names[i].at += over / 2; }
      }
      for (const name of names) name.at = Math.min(deep, Math.max(low, name.at));
    }
    for (const { mark, at } of names) {
      const text = mark.key.length > 25 ? `${mark.key.slice(0, 24)}…` : mark.key;
      svg.append("g").attr("class", `c${mark.color}`).attr("data-key", mark.key).append("text").attr("class", "end").attr("x", width - edge.right + 7).attr("y", at + 4).text(text);
    }
  }

  function react(home, svg, panel, marks, { x, y, edge, width, high }, state, draw) {
    const tip = add(home, "div", { class: "tip", hidden: "", "aria-live": "polite" });
    const over = svg.append("g"), frame = svg.append("rect").attr("class", "frame");
    const area = svg.append("rect").attr("class", "catch").attr("x", edge.left).attr("y", edge.top).attr("width", width - edge.left - edge.right).attr("height", high - edge.top - edge.bottom);
    const lined = panel.kind === "curves" || panel.kind === "levels";
    const all = [...new Set(marks.flatMap((mark) => mark.x))].sort((a, b) => a - b).filter((value) => value >= x.domain()[0] && value <= x.domain()[1]);
    let from = null, at = all.length - 1;
    const hide = () => { tip.hidden = true; over.selectAll("*").remove(); };
    const place = (px, py) => {
      tip.hidden = false;
      const right = px + 14 + tip.offsetWidth > width;
      tip.style.left = `${Math.max(0, right ? px - 14 - tip.offsetWidth : px + 14)}px`;
      tip.style.top = `${Math.max(0, Math.min(py, high - tip.offsetHeight) + 24)}px`;
    };
    const showAt = (i, py) => {
      if (!all.length) return;
      at = Math.min(all.length - 1, Math.max(0, i));
      over.selectAll("*").remove();
      over.append("line").attr("class", "rule").attr("x1", x(all[at])).attr("x2", x(all[at])).attr("y1", edge.top).attr("y2", high - edge.bottom);
      const rows = marks.map((mark) => ({ mark, i: mark.x.indexOf(all[at]) })).filter((row) => row.i >= 0).sort((a, b) => b.mark.y[b.i] - a.mark.y[a.i]);
      tip.replaceChildren();
      add(tip, "strong", {}, panel.ticks ? `${panel.x_label.split(" ")[0]} ${panel.ticks[all[at]]}` : `round ${all[at]}`);
      const table = add(tip, "table");
      for (const { mark, i } of rows) {
        over.append("g").attr("class", `c${mark.color}`).append("circle").attr("class", "dot").attr("r", 4).attr("cx", x(all[at])).attr("cy", y(mark.y[i]));
        const row = add(table, "tr"), name = add(row, "td");
        add(name, "i", { class: `c${mark.color}` });
        name.append(mark.key);
        const sd = mark.sd?.[i], singles = mark.seeds?.map((seed) => seed[i]) ?? mark.dots?.[i];
        add(row, "td", {}, number(mark.y[i]) + (sd ? ` ± ${number(sd)}` : singles?.length > 1 ? ` (${singles.map(number).join(", ")})` : ""));
      }
      place(x(all[at]), py);
    };
    const nearest = (px, py) => {
      let best = null;
      for (const mark of marks) mark.x.forEach((value, i) => {
        const off = Math.hypot(x(value) - px, y(mark.y[i]) - py);
        if (off < (best?.off ?? 20)) best = { off, mark, i };
      });
      over.selectAll("*").remove();
      if (!best) return hide();
      const { mark, i } = best;
      const where = panel.kind === "discs" ? `client ${panel.ticks[mark.x[i]]}, class ${panel.rows[mark.y[i]]}: ${mark.sizes[i]} samples` : `${mark.key}, class ${mark.groups[i]}: (${number(mark.x[i])}, ${number(mark.y[i])})`;
      tip.textContent = where;
      over.append("g").attr("class", "c0").append("circle").attr("class", "ring").attr("r", 7).attr("cx", x(mark.x[i])).attr("cy", y(mark.y[i]));
      return place(px, py);
    };
    const look = (px, py) => {
      if (!lined) return nearest(px, py);
      const value = x.invert(px);
      return showAt(all.reduce((best, one, i) => (Math.abs(one - value) < Math.abs(all[best] - value) ? i : best), 0), py);
    };
    const local = (event) => { const b = svg.node().getBoundingClientRect(); return [event.clientX - b.left, event.clientY - b.top]; };
    area.on("pointermove", (event) => {
      const [px, py] = local(event);
      if (from && event.pointerType === "mouse" && panel.kind !== "discs") {
        frame.attr("x", Math.min(px, from[0])).attr("y", Math.min(py, from[1])).attr("width", Math.abs(px - from[0])).attr("height", Math.abs(py - from[1]));
        if (Math.hypot(px - from[0], py - from[1]) > 8) return hide();
      }
      return look(px, py);
    });
    area.on("pointerdown", (event) => {
      const [px, py] = local(event);
      if (event.pointerType === "mouse") { from = [px, py]; area.node().setPointerCapture(event.pointerId); event.preventDefault(); } else look(px, py);
    });
    area.on("pointerup", (event) => {
      if (!from) return;
      const [px, py] = local(event), [ax, ay] = from;
      from = null;
      frame.attr("width", 0);
      if (panel.kind === "discs" || Math.abs(px - ax) < 8 || Math.abs(py - ay) < 8) return;
      const clamp = (value, a, b) => Math.min(b, Math.max(a, value));
      const sx = [ax, px].map((v) => clamp(v, edge.left, width - edge.right)).sort((a, b) => a - b), sy = [ay, py].map((v) => clamp(v, edge.top, high - edge.bottom)).sort((a, b) => b - a);
      state.zoom.set(panel, { x: sx.map(x.invert), y: sy.map(y.invert) });
      draw();
    });
    area.on("pointerleave", (event) => event.pointerType === "mouse" && hide()).on("pointercancel", hide);
    area.on("dblclick", () => { state.zoom.delete(panel); draw(); });
    svg.on("keydown", (event) => {
      const hidden = tip.hidden, last = all.length - 1;
      const next = { ArrowLeft: hidden ? last : at - 1, ArrowRight: hidden ? 0 : at + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") hide();
      if (!lined || next === undefined) return;
      event.preventDefault();
      showAt(next, edge.top);
    }).on("blur", hide);
    if (state.reset) state.reset.hidden = state.zoom.size === 0;
  }
})();
