/* The mathematics of the two explanations, without a page: numbers in, numbers out, in float64.

The same formulas as in src/fedbatchnorm (named beside each), and tests compare the two number by number.
Values are rows, one array per point with a number for each channel; means and variances are arrays over channels. */
(() => {
  "use strict";
  const channels = (rows) => rows[0].map((_, c) => c);
  const squaredDistance = (x, y) => x.reduce((sum, value, c) => sum + (value - y[c]) ** 2, 0);
  const total = (numbers) => numbers.reduce((sum, x) => sum + x, 0);

  /** What a client measures of its batch: count, mean, biased variance (norm.moments.measure). */
  function measure(rows) {
    const mean = channels(rows).map((c) => rows.reduce((sum, x) => sum + x[c], 0) / rows.length);
    const variance = mean.map((u, c) => rows.reduce((sum, x) => sum + (x[c] - u) ** 2, 0) / rows.length);
    return { count: rows.length, mean, var: variance };
  }

  /** Moments of the union of all clients' values, by the law of total variance (norm.moments.combine).

  var = within + between, with within = sum K_i s_i^2 / N and between = sum K_i (u_i - u)^2 / N. */
  function combine(clients) {
    const count = total(clients.map((m) => m.count));
    const average = (of) => clients[0].mean.map((_, c) => total(clients.map((m) => m.count * of(m, c))) / count);
    const mean = average((m, c) => m.mean[c]);
    const within = average((m, c) => m.var[c]);
    const between = average((m, c) => (m.mean[c] - mean[c]) ** 2);
    return { count, mean, var: within.map((v, c) => v + between[c]), within, between };
  }

  /** The weight of a round of so many steps: 1 - (1 - beta)^steps (norm.moments.round_momentum). */
  function roundMomentum(beta, steps = 1) {
    return steps === 1 || beta === 1 ? beta : -Math.expm1(steps * Math.log1p(-beta));
  }

  /** BatchNorm's running update, variance times N/(N-1) (norm.moments.update_running). */
  function updateRunning(running, seen, beta, steps = 1) {
    const weight = roundMomentum(beta, steps);
    const toward = (old, now) => old.map((x, c) => (1 - weight) * x + weight * now[c]);
    const unbiased = seen.var.map((v) => v * (seen.count / (seen.count - 1)));
    return {
      mean: toward(running.mean, seen.mean),
      var: seen.count > 1 ? toward(running.var, unbiased) : running.var.slice(),
    };
  }

  /** FBN's and centralized BatchNorm's server: one update with the union's moments (aggregation.statistics.merge). */
  function mergeExactly(running, clients, beta, steps = 1) {
    return updateRunning(running, combine(clients), beta, steps);
  }

  /** The naive server: each client makes its own running update, and the results are averaged
  (simulation.sharing.average). What lies between clients is lost from the variance. */
  function averageRunning(running, clients, beta) {
    const own = clients.map((seen) => updateRunning(running, seen, beta));
    const mean = (of) => running.mean.map((_, c) => total(own.map((r) => of(r)[c])) / own.length);
    return { mean: mean((r) => r.mean), var: mean((r) => r.var) };
  }

  /** FixBN's server: naive before the switch round, then nothing changes (simulation.schemes, "fixbn"). */
  function fixRunning(running, clients, beta, round, switchRound) {
    return round < switchRound ? averageRunning(running, clients, beta) : running;
  }

  /** (x - mean) / sqrt(var + eps), with constants (norm.moments.with_constants). */
  function normalize(rows, { mean, var: variance }, eps) {
    const deviation = variance.map((v) => Math.sqrt(v + eps));
    return rows.map((x) => x.map((value, c) => (value - mean[c]) / deviation[c]));
  }

  /** Each client by its own batch (simulation.normalizers.with_own_batch). */
  function normalizeByOwn(batches, eps) {
    return batches.map((rows) => normalize(rows, measure(rows), eps));
  }

  /** The gradient for a layer's input, from that for its output (norm.gradient).

  dx = (1/s) (g - share [mean(g) + b mean(g b)]), with s of the shared statistics and b the client's batch,
  normalized by itself. Share 0 is FBN as published, share 1 leaves nothing that moves the batch's mean or scale. */
  function inputGradient(g, rows, running, eps, share) {
    const seen = measure(rows);
    const b = normalize(rows, seen, eps);
    const level = channels(g).map((c) => total(g.map((x) => x[c])) / g.length);
    const slope = channels(g).map((c) => total(g.map((x, i) => x[c] * b[i][c])) / g.length);
    return g.map((x, i) =>
      x.map((value, c) => (value - share * (level[c] + b[i][c] * slope[c])) / Math.sqrt(running.var[c] + eps)),
    );
  }

  /** The share of points whose nearest class center is that of their own class (simulation.ring.separability). */
  function separability(rows, labels) {
    const classes = [...new Set(labels)].sort((a, b) => a - b);
    const centers = classes.map((k) => measure(rows.filter((_, i) => labels[i] === k)).mean);
    const nearest = (x) => {
      const far = centers.map((m) => squaredDistance(x, m));
      return classes[far.indexOf(Math.min(...far))];
    };
    return rows.filter((x, i) => nearest(x) === labels[i]).length / rows.length;
  }

  /** The mean Euclidean distance of points from where they should be (simulation.ring.normalize_ring). */
  function meanDistance(rows, others) {
    let sum = 0;
    rows.forEach((x, i) => (sum += Math.sqrt(squaredDistance(x, others[i]))));
    return sum / rows.length;
  }

  /** Uniform and normal random numbers, the same for the same seed (mulberry32; Box and Muller). */
  function random(seed) {
    let state = seed >>> 0;
    const uniform = () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
    return { uniform, normal };
  }

  const play = (globalThis.fbnPlay = globalThis.fbnPlay || {});
  play.random = random;
  play.formulas = Object.freeze({
    measure,
    combine,
    roundMomentum,
    updateRunning,
    mergeExactly,
    averageRunning,
    fixRunning,
    normalize,
    normalizeByOwn,
    inputGradient,
    separability,
    meanDistance,
  });
})();
