/* The ring: clients draw a batch of points in every round, and four schemes normalize them side by side.

A run is a function of its settings: whatever is changed, all rounds are computed anew from the first one, with the
same random numbers. No page here; ring.js draws what this returns. */
(() => {
  "use strict";
  const play = (globalThis.fbnPlay = globalThis.fbnPlay || {});
  const { measure, combine, mergeExactly, averageRunning, fixRunning, normalize, separability, meanDistance, updateRunning } =
    play.formulas;

  const CLIENTS = 6;
  const POINTS = 40; // that a client draws in a round
  const ROUNDS = 60;
  const SWITCH = ROUNDS / 2; // FixBN's
  const RADIUS = 6; // of the ring; a cloud has a standard deviation of 1
  const EPS = 1e-5;
  const START = Object.freeze({ mean: [0, 0], var: [1, 1] });

  /** Where the clouds are to begin with. */
  const centers = () =>
    Array.from({ length: CLIENTS }, (_, k) => {
      const angle = (2 * Math.PI * (k - 1)) / CLIENTS - Math.PI / 6;
      return [RADIUS * Math.cos(angle), RADIUS * Math.sin(angle)];
    });

  /** Random numbers for all rounds, drawn once: of each point whether it is of its client's own class (if the
  first is below the share), of which class otherwise, and where in the cloud it is. */
  function draw(seed = 7) {
    const { uniform, normal } = play.random(seed);
    const point = () => ({ own: uniform(), label: Math.floor(CLIENTS * uniform()), at: [normal(), normal()] });
    const batch = () => Array.from({ length: POINTS }, point);
    return Array.from({ length: ROUNDS }, () => Array.from({ length: CLIENTS }, batch));
  }
  const drawn = draw();

  /** One round's batches, (clients, points): {x, label}. */
  function batches(settings, round) {
    return drawn[round].map((points, client) =>
      points.map(({ own, label, at }) => {
        const k = own < settings.own ? client : label;
        return { label: k, x: [settings.centers[k][0] + at[0], settings.centers[k][1] + at[1]] };
      }),
    );
  }

  /** The table of schemes: what a server makes of the round, and what a client trains with.

  own: every client trains with its own batch; union: with the batch of all; else with the shared statistics. */
  const exactly = (running, seen, beta) => mergeExactly(running, seen, beta);
  const SCHEMES = [
    { name: "centralized", server: exactly, trains: () => "union" },
    { name: "naive", server: (running, seen, beta) => averageRunning(running, seen, beta), trains: () => "own" },
    {
      name: "fixbn",
      server: (running, seen, beta, round) => fixRunning(running, seen, beta, round, SWITCH),
      trains: (round) => (round < SWITCH ? "own" : "shared"),
    },
    { name: "fbn", server: exactly, trains: () => "shared" },
  ];

  /** What a scheme's running variance is made of: the starting value, within clients, between clients. They add up,
  because the update is linear. */
  function traceParts(parts, scheme, union, beta, round) {
    if (scheme.name === "fixbn" && round >= SWITCH) return parts;
    const between = scheme.server === exactly ? union.between : [0, 0];
    const pooled = scheme.server === exactly ? union.count : union.count / CLIENTS; // for N/(N-1)
    const toward = (old, now) => updateRunning({ mean: old, var: old }, { count: pooled, mean: now, var: now }, beta).var;
    return {
      start: parts.start.map((v) => (1 - beta) * v),
      within: toward(parts.within, union.within),
      between: toward(parts.between, between),
    };
  }

  /** What each client divides by in training, one {mean, var} for each. */
  function trainingRulers(scheme, round, running, seen, union) {
    const how = scheme.trains(round);
    return seen.map((own) => (how === "own" ? own : how === "union" ? union : running));
  }

  const flat = (rows) => rows.map((client) => client.map((p) => p.x));
  const byClient = (rows, rulers) => rows.flatMap((client, i) => normalize(client, rulers[i], EPS));

  /** All rounds up to `settings.round`, and what is to be seen in that round.

  Args: settings {own: 0..1, beta: (0, 1], round: 1..ROUNDS, centers: [[x, y], ...]}.
  Returns {points, labels, seen, union, schemes: {name: {training, evaluation}}, distances: {name: [...]}}. */
  function simulate(settings) {
    const state = SCHEMES.map(() => ({ running: START, parts: { start: START.var, within: [0, 0], between: [0, 0] } }));
    const distances = Object.fromEntries(SCHEMES.map((scheme) => [scheme.name, []]));
    let last;
    for (let round = 0; round < ROUNDS; round++) {
      const points = batches(settings, round);
      const rows = flat(points);
      const seen = rows.map(measure);
      const union = combine(seen);
      const central = byClient(rows, seen.map(() => union));
      const shown = round === settings.round - 1;
      if (shown) last = { points, labels: points.flat().map((p) => p.label), seen, union, schemes: {} };
      SCHEMES.forEach((scheme, i) => {
        const before = state[i];
        const rulers = trainingRulers(scheme, round, before.running, seen, union);
        const out = byClient(rows, rulers);
        distances[scheme.name].push(meanDistance(out, central));
        const running = scheme.server(before.running, seen, settings.beta, round);
        state[i] = { running, parts: traceParts(before.parts, scheme, union, settings.beta, round) };
        if (!shown) return;
        const now = { round, scheme, rows, seen, union, central, labels: last.labels };
        last.schemes[scheme.name] = {
          training: result(now, rulers, out, trainingParts(scheme, round, before.parts, union)),
          evaluation: evaluate(now, state[i]),
        };
      });
    }
    return { ...last, distances };
  }

  function evaluate(now, { running, parts }) {
    const rulers = now.seen.map(() => running);
    return result(now, rulers, byClient(now.rows, rulers), parts);
  }

  function trainingParts(scheme, round, parts, union) {
    const how = scheme.trains(round);
    if (how === "shared") return parts;
    return { start: [0, 0], within: union.within, between: how === "union" ? union.between : [0, 0] };
  }

  const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;

  function result({ labels, central }, rulers, out, parts) {
    const averaged = Object.fromEntries(Object.entries(parts).map(([name, values]) => [name, mean(values)]));
    return {
      rulers,
      out,
      parts: averaged, // of the variance divided by, averaged over clients and both axes
      apart: separability(out, labels),
      spread: Math.sqrt(mean(measure(out).var)),
      distance: meanDistance(out, central),
    };
  }

  play.ringModel = Object.freeze({ CLIENTS, POINTS, ROUNDS, SWITCH, EPS, SCHEMES, centers, batches, simulate });
})();
