/* One layer of one channel, trained by several clients with SGD, for a share of BatchNorm's gradient.

A point has two features: one tells two classes apart, the other is noise. The layer is x = <w, point>, normalized with
the shared statistics, y = (x - m)/s, and y > 0 means class +1; the loss is log(1 + exp(-label y)). What w can learn is
its direction: the next merge undoes its length. No page here; scale.js draws what this returns. */
(() => {
  "use strict";
  const play = (globalThis.fbnPlay = globalThis.fbnPlay || {});
  const { measure, combine, mergeExactly, inputGradient } = play.formulas;

  const CLIENTS = 4;
  const POINTS = 40; // that a client holds, and takes all of in every step
  const ROUNDS = 40;
  const GAP = 1; // from 0 to a class's center, along the first feature
  const SPREAD = Object.freeze([0.5, 2]); // standard deviations within a class
  const START = Object.freeze([Math.cos((80 * Math.PI) / 180), Math.sin((80 * Math.PI) / 180)]); // mostly noise
  const BETA = 0.1; // of the running statistics
  const MOMENTUM = 0.9; // of SGD, made anew in every round
  const EPS = 1e-5;

  const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
  const length = (w) => Math.sqrt(dot(w, w));
  const add = (a, b) => [a[0] + b[0], a[1] + b[1]];
  const scaled = (a, by) => [a[0] * by, a[1] * by];
  const average = (vectors) => scaled(vectors.reduce(add, [0, 0]), 1 / vectors.length);

  /** What clients hold: {x, label}, of which a share is of the client's own class and the rest of either. */
  function clients(own, seed = 1) {
    const { uniform, normal } = play.random(seed);
    const point = (i) => {
      const [mine, any] = [uniform(), uniform()];
      const label = mine < own ? (i % 2 ? 1 : -1) : any < 0.5 ? 1 : -1;
      return { x: [GAP * label + SPREAD[0] * normal(), SPREAD[1] * normal()], label };
    };
    return Array.from({ length: CLIENTS }, (_, i) => Array.from({ length: POINTS }, () => point(i)));
  }

  const outputs = (w, client) => client.map((p) => [dot(w, p.x)]);
  const moments = (w, data) => data.map((client) => measure(outputs(w, client)));

  /** dL/dx of a client's mean loss, for a share. */
  function pulls(w, client, running, share) {
    const x = outputs(w, client);
    const s = Math.sqrt(running.var[0] + EPS);
    const g = client.map((p, i) => [-p.label / (1 + Math.exp((p.label * (x[i][0] - running.mean[0])) / s)) / POINTS]);
    return inputGradient(g, x, running, EPS, share).map((h) => h[0]);
  }

  /** dL/dw of a client's mean loss. */
  function gradient(w, client, running, share) {
    return pulls(w, client, running, share).reduce((sum, h, i) => add(sum, scaled(client[i].x, h)), [0, 0]);
  }

  /** A client's round: its steps with the shared statistics as constants; its weights, and what it measured. */
  function localRound(w, client, running, { share, rate, steps }) {
    let velocity = [0, 0];
    const seen = [];
    for (let step = 0; step < steps; step++) {
      seen.push(measure(outputs(w, client)));
      velocity = add(scaled(velocity, MOMENTUM), gradient(w, client, running, share));
      w = add(w, scaled(velocity, -rate));
    }
    return { w, seen: combine(seen) };
  }

  /** All rounds for one share: what is known after each of them; the first entry is the start.

  Args: settings {share, own, rate, steps}. */
  function train(settings) {
    const data = clients(settings.own);
    let w = START.slice();
    let running = mergeExactly({ mean: [0], var: [1] }, moments(w, data), 1); // a calibrated start
    const rounds = [state(w, running, data)];
    for (let round = 0; round < ROUNDS; round++) {
      const ends = data.map((client) => localRound(w, client, running, settings));
      w = average(ends.map((end) => end.w));
      running = mergeExactly(running, ends.map((end) => end.seen), BETA, settings.steps);
      rounds.push(state(w, running, data));
    }
    return rounds;
  }

  function state(w, running, data) {
    const points = data.flat();
    const right = points.filter((p) => (dot(w, p.x) > running.mean[0]) === p.label > 0).length;
    return { w, running, length: length(w), variance: running.var[0], accuracy: right / points.length };
  }

  /** What one step of gradient descent would do at weights w, by cause, as parts of FBN's whole gradient.

  longer: along the weights, which the next merge undoes. within and between turn them toward the feature that tells
  the classes apart: from what a client sees within its own data, and from how clients differ, with the push on the
  mean. G = within + (1 - share) [between + push], projected on the direction across w. */
  function stepParts({ w, running }, own, share) {
    const data = clients(own);
    const whole = average(data.map((client) => gradient(w, client, running, share)));
    const within = average(data.map((client) => centeredGradient(w, client, running, share)));
    const unit = length(average(data.map((client) => gradient(w, client, running, 0))));
    const along = scaled(w, 1 / length(w));
    const across = w[1] >= 0 ? [along[1], -along[0]] : [-along[1], along[0]]; // toward the first feature
    return {
      longer: -dot(whole, along) / unit,
      within: -dot(within, across) / unit,
      between: -dot(add(whole, scaled(within, -1)), across) / unit,
    };
  }

  /** The part of a client's gradient that its points' differences from their own mean make. */
  function centeredGradient(w, client, running, share) {
    const h = pulls(w, client, running, share);
    const mean = average(client.map((p) => p.x));
    return h.reduce((sum, pull, i) => add(sum, scaled(add(client[i].x, scaled(mean, -1)), pull)), [0, 0]);
  }

  play.scaleModel = Object.freeze({ CLIENTS, POINTS, ROUNDS, START, BETA, MOMENTUM, EPS, clients, train, stepParts });
})();
