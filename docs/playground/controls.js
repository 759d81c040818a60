/* What both explanations are made of: labeled sliders, buttons, a player of rounds, panels and line charts. */
(() => {
  "use strict";
  const play = (globalThis.fbnPlay = globalThis.fbnPlay || {});
  const SVG = "http://www.w3.org/2000/svg";

  /** An element with attributes and children; `svg:` before a tag makes it one of SVG. */
  function make(tag, attributes = {}, ...children) {
    const svg = tag.startsWith("svg:");
    const element = svg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  /** Calls `draw` once before the next frame, however often it is asked for. */
  function oncePerFrame(draw) {
    let asked = false;
    return () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => {
        asked = false;
        draw();
      });
    };
  }

  /** A slider with its name, its value in words, and a line that says what it does. */
  function slider({ label, hint = "", min, max, step, value, words, changed }) {
    const shown = make("output", { class: "fbn-value" });
    const input = make("input", { type: "range", min, max, step });
    const text = make("span", { class: "fbn-label" }, label, " ", shown);
    const element = make("label", { class: "fbn-slider" }, text, input);
    if (hint) element.append(make("span", { class: "fbn-hint" }, hint));
    const set = (now) => {
      input.value = now;
      shown.textContent = words(Number(input.value));
      input.setAttribute("aria-valuetext", words(Number(input.value)));
    };
    input.addEventListener("input", () => {
      set(input.value);
      changed(Number(input.value));
    });
    set(value);
    return { element, set };
  }

  /** Buttons of which at most one is pressed. */
  function choice({ label, options, changed }) {
    const element = make("div", { class: "fbn-choice", role: "group", "aria-label": label });
    const buttons = options.map(({ name, value }) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, name);
      button.addEventListener("click", () => changed(value));
      element.append(button);
      return { button, value };
    });
    const set = (is) => buttons.forEach(({ button, value }) => button.setAttribute("aria-pressed", String(is(value))));
    return { element, set };
  }

  /** Play, step, back to the start, and a slider over rounds. `reset` puts everything back as it was. */
  function player({ first, last, value, milliseconds, changed, reset }) {
    let round = value;
    let timer = null;
    const toggle = make("button", { type: "button", class: "fbn-play-button" });
    const step = make("button", { type: "button" }, "Step");
    const again = make("button", { type: "button" }, "Reset");
    const words = (r) => `${r} of ${last}`;
    const over = slider({ label: "Round", min: first, max: last, step: 1, value, words, changed: (r) => stopAt(r) });
    const stop = () => {
      clearInterval(timer);
      timer = null;
      toggle.textContent = "Play";
    };
    const go = (to) => {
      round = to;
      over.set(round);
      changed(round);
      if (round >= last) stop();
    };
    const stopAt = (to) => {
      stop();
      go(to);
    };
    toggle.addEventListener("click", () => {
      if (timer !== null) return stop();
      if (round >= last) go(first);
      toggle.textContent = "Pause";
      timer = setInterval(() => (element.isConnected ? go(round + 1) : stop()), milliseconds);
    });
    step.addEventListener("click", () => stopAt(round >= last ? first : round + 1));
    again.addEventListener("click", () => {
      stopAt(value);
      reset();
    });
    const element = make("div", { class: "fbn-player" }, over.element, make("div", { class: "fbn-buttons" }, toggle, step, again));
    stop();
    return { element };
  }

  /** Tells the width of an element now and whenever it changes. */
  function watchWidth(element, changed) {
    let width = 0;
    new ResizeObserver(() => {
      const now = Math.floor(element.clientWidth);
      if (now === width || !now) return;
      width = now;
      changed(width);
    }).observe(element);
  }

  /** A square drawing of the plane from -reach to reach on both axes, as wide as its container. */
  function plane(label) {
    const root = d3.select(make("svg:svg", { class: "fbn-plane", role: "img", "aria-label": label }));
    const name = `fbn-clip-${(plane.count = (plane.count || 0) + 1)}`;
    const frame = root.append("clipPath").attr("id", name).append("rect");
    const back = root.append("rect").attr("class", "fbn-back");
    const layer = root.append("g").attr("clip-path", `url(#${name})`);
    const x = d3.scaleLinear();
    const y = d3.scaleLinear();
    const size = (width, reach) => {
      root.attr("width", width).attr("height", width).attr("viewBox", `0 0 ${width} ${width}`);
      for (const rect of [frame, back]) rect.attr("width", width).attr("height", width).attr("rx", 6);
      x.domain([-reach, reach]).range([0, width]);
      y.domain([-reach, reach]).range([width, 0]);
    };
    return { root, layer, x, y, size, node: root.node() };
  }

  /** Points as one path of round dots. */
  const dots = (points, x, y) => points.map((p) => `M${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}h0`).join("");

  /** Moves labels apart, in order of their height, so that none covers another. */
  function spreadOut(labels, gap, low, high) {
    const sorted = [...labels].sort((a, b) => a.y - b.y);
    sorted.forEach((label, i) => (label.y = Math.max(label.y, low, i ? sorted[i - 1].y + gap : low)));
    sorted.reverse().forEach((label, i) => (label.y = Math.min(label.y, i ? sorted[i - 1].y - gap : high)));
    return labels;
  }

  /** Lines over rounds with their names at the end, and a mark at the round that is shown.

  draw({series: [{name, kind, values}], at, first, top, format}): `first` is the round of the first value; `kind`
  is a class for the color. */
  function chart({ title, unit, height = 170, room = 92 }) {
    const root = d3.select(make("svg:svg", { class: "fbn-chart", role: "img", "aria-label": title }));
    const parts = ["fbn-axis fbn-bottom", "fbn-axis fbn-left", "fbn-lines", "fbn-mark", "fbn-names"];
    const [bottom, left, lines, mark, names] = parts.map((name) => root.append("g").attr("class", name));
    const caption = make("figcaption", {}, make("strong", {}, title), unit ? ` ${unit}` : "");
    const element = make("figure", { class: "fbn-figure" }, caption, root.node());
    const margin = { left: 44, top: 8, bottom: 34 };
    const draw = (width, { series, at, first = 0, top, format }) => {
      const x = d3.scaleLinear([first, first + series[0].values.length - 1], [margin.left, width - room]);
      const y = d3.scaleLinear([0, top], [height - margin.bottom, margin.top]).clamp(true);
      root.attr("width", width).attr("height", height).attr("viewBox", `0 0 ${width} ${height}`);
      bottom.attr("transform", `translate(0,${height - margin.bottom})`).call(d3.axisBottom(x).ticks(5).tickSizeOuter(0));
      bottom.selectAll(".fbn-unit").data(["round"]).join("text").attr("class", "fbn-unit").text((d) => d);
      bottom.select(".fbn-unit").attr("x", (margin.left + width - room) / 2).attr("y", 30);
      left.attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(4).tickFormat(format ?? null).tickSizeOuter(0));
      const path = d3.line((_, i) => x(first + i), (value) => y(value));
      lines.selectAll("path").data(series).join("path").attr("class", (s) => s.kind).attr("d", (s) => path(s.values));
      mark.selectAll("line").data([at]).join("line").attr("x1", x).attr("x2", x).attr("y1", margin.top).attr("y2", height - margin.bottom);
      mark.selectAll("circle").data(series).join("circle").attr("class", (s) => s.kind).attr("r", 3.5).attr("cx", x(at));
      mark.selectAll("circle").attr("cy", (s) => y(s.values[at - first]));
      const labels = series.map((s) => ({ ...s, y: y(s.values[s.values.length - 1]) }));
      names.selectAll("text").data(spreadOut(labels, 14, margin.top + 4, height - margin.bottom)).join("text").attr("class", (s) => s.kind);
      names.selectAll("text").attr("x", width - room + 6).attr("y", (s) => s.y).attr("dy", "0.32em").text((s) => s.name);
    };
    return { element, draw };
  }

  /** Parts of a variance as segments of one bar, on a scale up to `full`, with a mark at `needed`. */
  function bar() {
    const segments = d3.select(make("div", { class: "fbn-bar", role: "img" }));
    const draw = (parts, full, needed, words) => {
      const share = (value) => `${(100 * value) / full}%`;
      segments.attr("aria-label", words);
      segments.selectAll(".fbn-part").data(parts).join("span").attr("class", (p) => `fbn-part fbn-${p.kind}`);
      segments.selectAll(".fbn-part").style("width", (p) => share(p.value));
      segments.selectAll(".fbn-needed").data(needed === undefined ? [] : [needed]).join("span").attr("class", "fbn-needed");
      segments.selectAll(".fbn-needed").style("left", share);
    };
    return { element: segments.node(), draw };
  }

  const explanations = {};

  /** Starts every explanation of the page that has not been started. */
  function start() {
    for (const place of document.querySelectorAll("[data-fbn-play]:not([data-fbn-started])")) {
      const explanation = explanations[place.dataset.fbnPlay];
      if (!explanation) continue;
      place.dataset.fbnStarted = "";
      place.classList.add("fbn-play");
      place.replaceChildren();
      explanation(place);
    }
  }

  /** Makes an explanation known by the name that a page asks for it with. */
  function register(name, explanation) {
    explanations[name] = explanation;
    if (document.readyState !== "loading") start();
  }

  if (!play.listening) {
    play.listening = true; // the scripts may be run again by a site that changes pages without loading them
    document.addEventListener("DOMContentLoaded", start);
    if (globalThis.document$ && document$.subscribe) document$.subscribe(start);
  }
  play.controls = Object.freeze({ make, oncePerFrame, slider, choice, player, watchWidth, plane, dots, chart, bar, register });
})();
