/* "Why BatchNorm fails": the same clouds of points, normalized in four ways side by side. */
(() => {
  "use strict";
  const { controls, ringModel: model } = globalThis.fbnPlay;
  const { make, slider, choice, player, plane, dots, bar } = controls;

  const PLANE = 10.5; // how far the plane of the data reaches
  const REACH = 8.5; // how far a cloud can be dragged
  const PRESETS = [
    { name: "Clients alike", value: 0 },
    { name: "Some differences", value: 0.7 },
    { name: "One class each", value: 1 },
  ];
  const MODES = [
    { name: "Training", value: "training" },
    { name: "Evaluation", value: "evaluation" },
  ];
  const CARDS = [
    { name: "centralized", title: "Centralized", subtitle: "all data in one place" },
    { name: "naive", title: "Naive", subtitle: "ordinary BatchNorm, statistics averaged" },
    { name: "fixbn", title: "FixBN", subtitle: `naive, then frozen from round ${model.SWITCH + 1} on` },
    { name: "fbn", title: "FBN", subtitle: "shared statistics, merged exactly" },
  ];
  const starting = () => ({ own: 1, beta: 0.1, round: model.ROUNDS, mode: "training", centers: model.centers() });
  const percent = (share) => `${Math.round(100 * share)}%`;
  const times = (factor) => `${factor.toFixed(1)} times`;

  /** What is to be said about a scheme as it is now. */
  const verdicts = {
    centralized: ({ mode, off }) => {
      if (mode === "training") return "What the others should look like: one mean and one variance for all data.";
      return off
        ? "Its running statistics have not yet reached those of the data. They start at mean 0 and variance 1." 
        : "Evaluation does what training did.";
    },
    naive: ({ mode, now }) => {
      if (mode === "training") {
        if (now.apart < 0.6) return "Each client is centered on itself, so the classes land on top of each other.";
        if (now.apart < 0.97) return "The classes blur: each client is centered on itself.";
        return "Clients are alike, so each one's own batch is nearly as good as all of them.";
      }
      if (now.spread < 1.2) return "Close to training, because clients are alike.";
      return `Unlike training: the averaged variance lacks the part between clients, so everything comes out ${times(now.spread)} too wide.`;
    },
    fixbn: ({ mode, now, round }) => {
      if (round <= model.SWITCH) return verdicts.naive({ mode, now, round });
      if (now.spread < 1.2) return "Clients are alike, so what is frozen is nearly right.";
      return `The classes stay apart, but ${times(now.spread)} too wide: the frozen variance lacks the part between clients.`;
    },
    fbn: ({ off }) => {
      if (off) return "The shared statistics have not yet reached those of the data. They start at mean 0 and variance 1.";
      return "Close to centralized, in training and in evaluation. Clients send only counts, means and variances.";
    },
  };

  /** The clouds, what each client normalizes with, and handles to drag the clouds by. */
  function dataPlane(card, first, dragged) {
    const view = plane(`${card.title}: the data, and what each client normalizes with`);
    const axes = view.layer.append("path").attr("class", "fbn-cross");
    const clouds = view.layer.append("g");
    const rulers = view.layer.append("g");
    const names = view.layer.append("g");
    const handles = view.root.append("g");
    const draw = (width, settings, state, rulersNow) => {
      view.size(width, PLANE);
      const { x, y } = view;
      axes.attr("d", `M${x(-PLANE)},${y(0)}H${x(PLANE)}M${x(0)},${y(-PLANE)}V${y(PLANE)}`);
      drawClasses(clouds, byClass(state.points.flat().map((p) => p.x), state.labels), x, y);
      const shared = rulersNow.every((r) => r === rulersNow[0]);
      rulers
        .selectAll("ellipse")
        .data(shared ? rulersNow.slice(0, 1) : rulersNow)
        .join("ellipse")
        .attr("class", (_, i) => `fbn-ruler ${shared ? "fbn-shared" : `fbn-class-${i}`}`)
        .attr("cx", (r) => x(r.mean[0]))
        .attr("cy", (r) => y(r.mean[1]))
        .attr("rx", (r) => x(2 * Math.sqrt(r.var[0])) - x(0))
        .attr("ry", (r) => y(0) - y(2 * Math.sqrt(r.var[1])));
      drawNames(names, settings.centers, x, y);
      handles
        .selectAll("circle")
        .data(settings.centers)
        .join((enter) => enter.append("circle").each(function (_, k) { grip(this, k, view, first, dragged); }))
        .attr("r", 22)
        .attr("cx", (c) => x(c[0]))
        .attr("cy", (c) => y(c[1]))
        .attr("aria-label", (c, k) => `Cloud ${k + 1} at ${c[0].toFixed(1)}, ${c[1].toFixed(1)}; arrow keys move it`);
    };
    return { node: view.node, draw };
  }

  /** A cloud's handle: dragged with a finger or a mouse, or moved with the arrow keys. */
  function grip(circle, k, view, first, dragged) {
    const handle = d3.select(circle).attr("class", "fbn-handle").attr("data-cloud", k);
    if (first) handle.attr("tabindex", 0).attr("role", "button");
    else handle.attr("aria-hidden", "true");
    const limited = (value) => Math.max(-REACH, Math.min(REACH, value));
    let from = null;
    handle.on("pointerdown", (event) => {
      circle.setPointerCapture(event.pointerId);
      const center = handle.datum();
      from = { x: event.clientX, y: event.clientY, center };
    });
    handle.on("pointermove", (event) => {
      if (!from) return;
      const scale = (2 * PLANE) / view.node.clientWidth;
      const to = [from.center[0] + scale * (event.clientX - from.x), from.center[1] - scale * (event.clientY - from.y)];
      dragged(k, to.map(limited));
    });
    handle.on("pointerup pointercancel", () => (from = null));
    // `touch-action: none` is not enough: for a shape inside an SVG, Chromium scrolls the page all the same.
    circle.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    const arrows = { ArrowLeft: [-0.5, 0], ArrowRight: [0.5, 0], ArrowUp: [0, 0.5], ArrowDown: [0, -0.5] };
    handle.on("keydown", (event) => {
      if (!arrows[event.key]) return;
      event.preventDefault();
      dragged(k, handle.datum().map((value, c) => limited(value + arrows[event.key][c])));
    });
  }

  const byClass = (points, labels) =>
    Array.from({ length: model.CLIENTS }, (_, k) => points.filter((_, i) => labels[i] === k));

  function drawClasses(group, classes, x, y) {
    group
      .selectAll("path")
      .data(classes)
      .join("path")
      .attr("class", (_, k) => `fbn-dots fbn-class-${k}`)
      .attr("d", (points) => dots(points, x, y));
  }

  function drawNames(group, centers, x, y) {
    const texts = group.selectAll("text").data(centers).join("text").attr("class", (_, k) => `fbn-name fbn-class-${k}`);
    texts.attr("x", (c) => x(c[0])).attr("y", (c) => y(c[1])).attr("dy", "0.35em").text((_, k) => k + 1);
  }

  /** The same points after normalization, and the circle that two standard deviations should fill. */
  function outputPlane(card) {
    const view = plane(`${card.title}: after normalization`);
    const axes = view.layer.append("path").attr("class", "fbn-cross");
    const goal = view.layer.append("circle").attr("class", "fbn-goal");
    const clouds = view.layer.append("g");
    const names = view.layer.append("g");
    const caption = make("p", { class: "fbn-step" });
    const draw = (width, state, now) => {
      const reach = Math.max(3, 2.2 * now.spread);
      view.size(width, reach);
      const { x, y } = view;
      axes.attr("d", `M${x(-reach)},${y(0)}H${x(reach)}M${x(0)},${y(-reach)}V${y(reach)}`);
      goal.attr("cx", x(0)).attr("cy", y(0)).attr("r", x(2) - x(0));
      const classes = byClass(now.out, state.labels);
      drawClasses(clouds, classes, x, y);
      drawNames(names, classes.map((points) => (points.length ? globalThis.fbnPlay.formulas.measure(points).mean : [0, 0])), x, y);
      caption.textContent = reach > 3 ? `after (zoomed out ${(reach / 3).toFixed(1)}×)` : "after";
    };
    return { node: view.node, caption, draw };
  }

  /** One scheme: before, after, three numbers, and the variance that it divides by. */
  function schemeCard(card, first, dragged) {
    const before = dataPlane(card, first, dragged);
    const after = outputPlane(card);
    const numbers = ["Classes told apart", "Spread (should be 1)", "Distance from centralized"].map((name) => {
      const value = make("dd");
      return { value, row: make("div", {}, make("dt", {}, name), value) };
    });
    const variance = bar();
    const sum = make("p", { class: "fbn-sum" });
    const verdict = make("p", { class: "fbn-verdict" });
    const element = make(
      "section",
      { class: "fbn-card", "aria-label": card.title, "data-scheme": card.name },
      make("p", { class: "fbn-title" }, card.title),
      make("p", { class: "fbn-subtitle" }, card.subtitle),
      make("p", { class: "fbn-step" }, "before"),
      before.node,
      after.caption,
      after.node,
      verdict,
      make("dl", {}, ...numbers.map((n) => n.row)),
      make("p", { class: "fbn-step" }, "divides by a variance of"),
      variance.element,
      sum,
    );
    const draw = (width, settings, state) => {
      const now = state.schemes[card.name][settings.mode];
      before.draw(width, settings, state, now.rulers);
      after.draw(width, state, now);
      [percent(now.apart), now.spread.toFixed(2), now.distance.toFixed(2)].forEach((text, i) => (numbers[i].value.textContent = text));
      const { start, within, between } = now.parts;
      const parts = [{ kind: "start", value: start }, { kind: "within", value: within }, { kind: "between", value: between }];
      const words = parts.filter((p) => p.kind !== "start" || p.value >= 0.05).map((p) => `${p.value.toFixed(1)} ${p.kind}`);
      sum.textContent = `${words.join(" + ")} = ${(start + within + between).toFixed(1)}`;
      variance.draw(parts, state.full, state.needed, `${sum.textContent}, of ${state.needed.toFixed(1)}`);
      verdict.textContent = verdicts[card.name]({ mode: settings.mode, now, round: settings.round, off: now.distance > 0.2 });
    };
    return { element, draw, before: before.node };
  }

  const notes = () => [
    make("strong", {}, "Classes told apart:"), " points that lie nearest to the center of their own class; guessing gives 17%. ",
    make("strong", {}, "Spread:"), " standard deviation of all clients' points after normalization. ",
    make("strong", {}, "Distance from centralized:"), " mean distance of a point from where centralized BatchNorm puts it in training.",
  ];

  const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

  function legend() {
    const entry = (kind, text) => make("span", { class: "fbn-key" }, make("i", { class: kind }), text);
    return make(
      "p",
      { class: "fbn-legend" },
      entry("fbn-key-ruler", "what clients normalize with (mean ± 2 standard deviations): one for all, or each its own, in color"),
      entry("fbn-key-goal", "where these ± 2 should end up"),
      entry("fbn-key-within", "variance within clients"),
      entry("fbn-key-between", "variance between clients' means"),
      entry("fbn-key-needed", "variance of all data together"),
    );
  }

  function explanation(place) {
    const settings = starting();
    let width = 0;
    const redraw = controls.oncePerFrame(() => draw());
    const change = (fields) => {
      Object.assign(settings, fields);
      redraw();
    };
    const dragged = (k, to) => change({ centers: settings.centers.map((c, i) => (i === k ? to : c)) });
    const cards = CARDS.map((card, i) => schemeCard(card, i === 0, dragged));
    const distance = controls.chart({ title: "Distance from centralized, round by round", unit: "(mean distance of the points, in training)" });

    const own = slider({
      label: "How different clients are:",
      hint: "of a client's points belong to its own class; the others belong to any class",
      min: 0, max: 1, step: 0.05, value: settings.own, words: percent, changed: (value) => change({ own: value }),
    });
    const beta = slider({
      label: "Momentum β:",
      hint: "the weight of the newest round in the running statistics",
      min: 0.02, max: 1, step: 0.02, value: settings.beta, words: (b) => b.toFixed(2), changed: (value) => change({ beta: value }),
    });
    const presets = choice({ label: "Presets", options: PRESETS, changed: (value) => { change({ own: value }); own.set(value); } });
    const mode = choice({ label: "Normalize as in", options: MODES, changed: (value) => change({ mode: value }) });
    const rounds = player({
      first: 1, last: model.ROUNDS, value: settings.round, milliseconds: 120,
      changed: (round) => change({ round }),
      reset: () => { change(starting()); own.set(settings.own); beta.set(settings.beta); },
    });

    place.append(
      make("p", { class: "fbn-lead" }, "Six clients hold six classes of points. ", make("strong", {}, "Drag a cloud"), " in the upper row, or choose how different the clients are."),
      make("div", { class: "fbn-controls" },
        make("div", { class: "fbn-side" }, presets.element, make("div", { class: "fbn-mode" }, make("span", {}, "Normalize as in"), mode.element)),
        own.element),
      legend(),
      make("div", { class: "fbn-cards" }, ...cards.map((card) => card.element)),
      make("p", { class: "fbn-note" }, ...notes()),
      distance.element,
      make("div", { class: "fbn-controls" }, rounds.element, beta.element),
    );

    function draw() {
      if (!width) return;
      const state = model.simulate(settings);
      state.needed = mean(state.union.var);
      const totals = Object.values(state.schemes).map(({ [settings.mode]: now }) => now.parts.start + now.parts.within + now.parts.between);
      state.full = 1.04 * Math.max(state.needed, ...totals);
      presets.set((value) => value === settings.own);
      mode.set((value) => value === settings.mode);
      cards.forEach((card) => card.draw(card.before.parentElement.clientWidth - 2 * padding(card.element), settings, state));
      const series = CARDS.slice(1).map(({ name, title }) => ({ name: title, kind: `fbn-line fbn-${name}`, values: state.distances[name] }));
      const top = 1.1 * Math.max(...series.flatMap((s) => s.values));
      distance.draw(distance.element.clientWidth, { series, at: settings.round, first: 1, top });
    }
    controls.watchWidth(place, (now) => {
      width = now;
      redraw();
    });
  }

  const padding = (element) => parseFloat(getComputedStyle(element).paddingLeft);

  controls.register("ring", explanation);
})();
