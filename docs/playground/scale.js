/* "What holds the weights' scale": one small layer, trained live with three shares of BatchNorm's gradient. */
(() => {
  "use strict";
  const { controls, scaleModel: model } = globalThis.fbnPlay;
  const { make, slider, choice, player, plane, chart } = controls;

  const PRESETS = [
    { name: "Clients alike", value: 0 },
    { name: "Some differences", value: 0.7 },
    { name: "One class each", value: 1 },
  ];
  const starting = () => ({ own: 1, share: 0.7, rate: 0.1, steps: 5, round: model.ROUNDS });
  const percent = (share) => `${Math.round(100 * share)}%`;
  const LEARNED = 0.9; // of the points told apart

  /** The three runs: what they are called, and the share of each. */
  const runs = (share) => [
    { kind: "zero", share: 0, title: "ρ = 0", subtitle: "FBN as published" },
    { kind: "chosen", share, title: `ρ = ${share.toFixed(2)}`, subtitle: "your choice" },
    { kind: "one", share: 1, title: "ρ = 1", subtitle: "all of BatchNorm's gradient" },
  ];

  const kept = new Map();

  /** A run's rounds, trained once for the same settings. */
  function trained(settings) {
    const key = JSON.stringify([settings.own, settings.share, settings.rate, settings.steps]);
    if (!kept.has(key)) {
      if (kept.size > 60) kept.clear();
      kept.set(key, model.train(settings));
    }
    return kept.get(key);
  }

  /** What is to be said about a run as it is now. */
  function verdict(rounds, at) {
    const now = rounds[at];
    const first = rounds.findIndex((r) => r.accuracy >= LEARNED);
    const learned = first >= 0 && first <= at;
    const slower = now.length ** 2;
    const growth =
      now.length > 1.5
        ? `The weights are ${now.length.toFixed(1)} times as long as at the start, so the same push turns them ${slower.toFixed(0)} times less.`
        : now.length < 0.67 ? "The weights have become shorter." : "The weights keep about their length.";
    if (!at) return "Nothing learned yet: the weights point at the noise.";
    return `${learned ? `Learns the classes (by round ${first}).` : "Has not learned the classes."} ${growth}`;
  }

  /** The weights as arrows from the middle, with the way they came. */
  function weightsPlane() {
    const view = plane("The weights of the three runs: direction and length");
    const axes = view.layer.append("path").attr("class", "fbn-cross");
    const circle = view.layer.append("circle").attr("class", "fbn-goal");
    const ways = view.layer.append("g").attr("class", "fbn-ways");
    const arrows = view.layer.append("g").attr("class", "fbn-arrows");
    const names = view.layer.append("g").attr("class", "fbn-names");
    const words = view.root.append("g").attr("class", "fbn-zoom");
    const draw = (width, lines, at) => {
      const longest = Math.max(...lines.flatMap((l) => l.rounds.map((r) => r.length)));
      const reach = 1.18 * Math.max(longest, 1.6);
      view.size(width, reach);
      const { x, y } = view;
      axes.attr("d", `M${x(-reach)},${y(0)}H${x(reach)}M${x(0)},${y(-reach)}V${y(reach)}`);
      circle.attr("cx", x(0)).attr("cy", y(0)).attr("r", x(1) - x(0));
      const place = ({ w }) => [x(w[0]), y(w[1])];
      const path = d3.line();
      ways.selectAll("path").data(lines).join("path").attr("class", (l) => `fbn-${l.kind}`).attr("d", (l) => path(l.rounds.slice(0, at + 1).map(place)));
      arrows.selectAll("line").data(lines).join("line").attr("class", (l) => `fbn-${l.kind}`).attr("x1", x(0)).attr("y1", y(0));
      arrows.selectAll("line").attr("x2", (l) => place(l.rounds[at])[0]).attr("y2", (l) => place(l.rounds[at])[1]);
      arrows.selectAll("circle").data(lines).join("circle").attr("class", (l) => `fbn-${l.kind}`).attr("r", 5);
      arrows.selectAll("circle").attr("cx", (l) => place(l.rounds[at])[0]).attr("cy", (l) => place(l.rounds[at])[1]);
      names.selectAll("text").data(apart(lines, at, place)).join("text").attr("class", (l) => `fbn-${l.kind}`).text((l) => l.title);
      names.selectAll("text").attr("x", (l) => l.x).attr("y", (l) => l.y).attr("text-anchor", (l) => l.anchor);
      const notes = [
        { text: "tells the classes apart →", x: width - 8, y: width - 28, anchor: "end" },
        { text: "↑ noise", x: x(0) + 8, y: 16, anchor: "start" },
        { text: "dashed: length at the start", x: 8, y: width - 8, anchor: "start" },
      ];
      words.selectAll("text").data(notes).join("text").attr("x", (n) => n.x).attr("y", (n) => n.y).attr("text-anchor", (n) => n.anchor).text((n) => n.text);
    };
    return { node: view.node, draw };
  }

  /** Names beside the arrows' ends, above one another where the ends are close. */
  function apart(lines, at, place) {
    const labels = lines.map((l) => {
      const [x, y] = place(l.rounds[at]);
      return { ...l, x: Math.max(x, 30), y: y - 11, anchor: "middle" };
    });
    labels.sort((a, b) => b.y - a.y);
    labels.forEach((label, i) => {
      for (const other of labels.slice(0, i)) {
        if (Math.abs(label.x - other.x) < 58 && Math.abs(label.y - other.y) < 15) label.y = other.y - 15;
      }
    });
    return labels;
  }

  /** What clients hold, as one bar for each: how much of it is of which class. */
  function holdings() {
    const rows = Array.from({ length: model.CLIENTS }, (_, i) => {
      const [first, second] = [make("span", { class: "fbn-part fbn-first" }), make("span", { class: "fbn-part fbn-second" })];
      const strip = make("span", { class: "fbn-bar", role: "img" }, first, second);
      return { strip, first, second, element: make("div", { class: "fbn-hold" }, make("span", {}, `client ${i + 1}`), strip) };
    });
    const element = make("div", { class: "fbn-holdings" }, make("p", { class: "fbn-step" }, "what clients hold, by class"), ...rows.map((r) => r.element));
    const draw = (own) =>
      model.clients(own).forEach((client, i) => {
        const part = client.filter((p) => p.label < 0).length / client.length;
        rows[i].first.style.width = percent(part);
        rows[i].second.style.width = percent(1 - part);
        rows[i].strip.setAttribute("aria-label", `${percent(part)} of the first class, ${percent(1 - part)} of the second`);
      });
    return { element, draw };
  }

  const CAUSES = [
    { name: "longer", title: "makes the weights longer (negative: shorter)", note: "the next merge undoes it" },
    { name: "within", title: "turns them: from what clients see within their own data", note: "no share removes this" },
    { name: "between", title: "turns them: from how clients differ", note: "a part of 1 − ρ remains" },
  ];

  /** What a step is made of, at the same weights, for the three shares: bars to either side of zero. */
  function stepBars() {
    const groups = CAUSES.map((cause) => {
      const rows = ["zero", "chosen", "one"].map((kind) => {
        const [name, number] = [make("span", { class: `fbn-tag fbn-text-${kind}` }), make("span", { class: "fbn-number" })];
        const fill = make("span", { class: `fbn-fill fbn-fill-${kind}` });
        return { name, number, fill, element: make("div", { class: "fbn-row" }, name, make("span", { class: "fbn-track" }, fill), number) };
      });
      const title = make("p", { class: "fbn-cause" }, make("strong", {}, cause.title), ` · ${cause.note}`);
      return { cause: cause.name, rows, element: make("div", { class: "fbn-group" }, title, ...rows.map((r) => r.element)) };
    });
    const element = make("div", { class: "fbn-groups" }, ...groups.map((g) => g.element));
    const draw = (lines, at, own) => {
      const chosen = lines[1].rounds[at];
      const parts = lines.map((l) => model.stepParts(chosen, own, l.share));
      const most = Math.max(1, ...parts.flatMap((p) => Object.values(p).map(Math.abs)));
      for (const { cause, rows } of groups) {
        rows.forEach((row, i) => {
          const value = parts[i][cause];
          row.name.textContent = lines[i].title;
          row.number.textContent = `${Math.round(100 * value) || 0}%`;
          row.fill.style.width = `${(50 * Math.abs(value)) / most}%`;
          row.fill.style.left = `${50 + Math.min(0, (50 * value) / most)}%`;
        });
      }
    };
    return { element, draw };
  }

  /** A run in words and three numbers. */
  function runCard(kind) {
    const [title, subtitle, words] = [make("p", { class: `fbn-title fbn-text-${kind}` }), make("p", { class: "fbn-subtitle" }), make("p", { class: "fbn-verdict" })];
    const numbers = ["Points told apart", "Length of the weights", "Running variance"].map((name) => {
      const value = make("dd");
      return { value, row: make("div", {}, make("dt", {}, name), value) };
    });
    const list = make("dl", {}, ...numbers.map((n) => n.row));
    const element = make("section", { class: `fbn-card fbn-run fbn-edge-${kind}`, "data-run": kind }, title, subtitle, words, list);
    const draw = (line, at) => {
      const now = line.rounds[at];
      element.setAttribute("aria-label", `${line.title}, ${line.subtitle}`);
      title.textContent = line.title;
      subtitle.textContent = line.subtitle;
      words.textContent = verdict(line.rounds, at);
      [percent(now.accuracy), now.length.toFixed(2), now.variance.toFixed(2)].forEach((text, i) => (numbers[i].value.textContent = text));
    };
    return { element, draw };
  }

  const CHARTS = [
    { title: "Points told apart", unit: "(guessing: 50%)", read: (r) => 100 * r.accuracy, top: () => 100, format: (d) => `${d}%` },
    { title: "Length of the weights", unit: "(1 at the start)", read: (r) => r.length },
    { title: "Running variance", unit: "of the layer's input", read: (r) => r.variance },
  ];

  function explanation(place) {
    const settings = starting();
    let width = 0;
    const redraw = controls.oncePerFrame(() => draw());
    const change = (fields) => {
      Object.assign(settings, fields);
      redraw();
    };
    const knobs = {
      own: slider({
        label: "How different clients are:",
        hint: "of a client's points belong to its own class; the others belong to either class",
        min: 0, max: 1, step: 0.05, value: settings.own, words: percent, changed: (own) => change({ own }),
      }),
      share: slider({
        label: "Share ρ of BatchNorm's gradient:",
        hint: "0: the shared statistics are constants; 1: nothing may move a batch's mean or scale",
        min: 0, max: 1, step: 0.05, value: settings.share, words: (s) => s.toFixed(2), changed: (share) => change({ share }),
      }),
      rate: slider({
        label: "Learning rate:", min: 0.02, max: 0.4, step: 0.02, value: settings.rate, words: (r) => r.toFixed(2), changed: (rate) => change({ rate }),
      }),
      steps: slider({
        label: "Local steps in a round:", min: 1, max: 20, step: 1, value: settings.steps, words: String, changed: (steps) => change({ steps }),
      }),
    };
    const presets = choice({ label: "Presets", options: PRESETS, changed: (own) => { change({ own }); knobs.own.set(own); } });
    const rounds = player({
      first: 0, last: model.ROUNDS, value: settings.round, milliseconds: 150,
      changed: (round) => change({ round }),
      reset: () => { change(starting()); for (const [name, knob] of Object.entries(knobs)) knob.set(settings[name]); },
    });
    const [weights, held, steps] = [weightsPlane(), holdings(), stepBars()];
    const charts = CHARTS.map((c) => ({ ...c, ...chart({ title: c.title, unit: c.unit, height: 150, room: 76 }) }));
    const cards = ["zero", "chosen", "one"].map(runCard);
    const left = make("div", { class: "fbn-left" }, make("p", { class: "fbn-cause" }, make("strong", {}, "Where the weights point"), " and how long they are"), weights.node, held.element);

    place.append(
      make("p", { class: "fbn-lead" }, "Four clients train one layer together. Learning means that the weights ", make("strong", {}, "turn"), ", from the noise to the feature that tells the classes apart. If they only grow ", make("strong", {}, "longer"), ", nothing is gained: the next merge of the statistics divides the length out."),
      make("div", { class: "fbn-controls" }, presets.element, knobs.own.element, knobs.share.element),
      make("div", { class: "fbn-cards fbn-three" }, ...cards.map((card) => card.element)),
      make("div", { class: "fbn-two" }, left, make("div", {}, ...charts.map((c) => c.element))),
      make("div", { class: "fbn-controls" }, rounds.element, knobs.rate.element, knobs.steps.element),
      make("p", { class: "fbn-heading" }, make("strong", {}, "What one step consists of, at the weights of your choice of ρ"), ", in percent of the whole gradient of FBN there"),
      steps.element,
      make("p", { class: "fbn-note" }, ...notes()),
    );

    function draw() {
      if (!width) return;
      const at = settings.round;
      const lines = runs(settings.share).map((run) => ({ ...run, rounds: trained({ ...settings, share: run.share }) }));
      presets.set((value) => value === settings.own);
      cards.forEach((card, i) => card.draw(lines[i], at));
      held.draw(settings.own);
      weights.draw(Math.min(left.clientWidth, 460), lines, at);
      for (const { element, draw: plot, read, top, format } of charts) {
        const series = lines.map((l) => ({ name: l.title, kind: `fbn-line fbn-${l.kind}`, values: l.rounds.map(read) }));
        plot(element.clientWidth, { series, at, top: top ? top() : 1.08 * Math.max(...series.flatMap((s) => s.values)), format });
      }
      steps.draw(lines, at, settings.own);
    }
    controls.watchWidth(place, (now) => {
      width = now;
      redraw();
    });
  }

  const notes = () => [
    make("strong", {}, "The model:"), " x = ⟨w, point⟩, y = (x − m)/s with the shared mean and standard deviation as constants; the sign of y is the predicted class. " +
    "Backward, dx = (1/s)(g − ρ [mean(g) + b·mean(g·b)]), where b is the client's batch normalized by itself. SGD with momentum 0.9, reset in every round; the statistics start " +
    "from those of the data. ", make("strong", {}, "What it leaves out:"), " in this small model, longer weights only slow learning down. In a network with several layers, " +
    "they also change what the layers above receive, and training can diverge. In the library the share follows the drift, layer by layer.",
  ];

  controls.register("scale", explanation);
})();
