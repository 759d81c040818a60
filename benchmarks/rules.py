"""Robust rules against straightforward numpy, client by client, as ratios in one run.

    python benchmarks/rules.py

n clients send rows of length d in float64; f is the largest that n allows. Every contender takes its turn in
every round; figures are ratios of medians. Below 1 ours is faster.
"""

import statistics
import time

import numpy as np
import torch
from common import arguments, write

from fedbatchnorm.aggregation.aggregators import AGGREGATORS
from fedbatchnorm.aggregation.mixing import MIXING

SIZES = [(10, 10_000), (10, 1_200_000), (30, 100_000), (100, 10_000), (100, 100_000)]


def squared_distances(rows):
    return np.array([[((x - y) ** 2).sum() for y in rows] for x in rows])


def nnm(rows, f):
    nearest = [np.argsort(d)[: len(rows) - f] for d in squared_distances(rows)]
    return np.stack([rows[index].mean(0) for index in nearest])


def krum_scores(rows, f):
    return np.sort(squared_distances(rows), axis=1)[:, 1 : len(rows) - f].mean(1)


def geometric_median(rows, f):
    point = np.median(rows, axis=0)
    for _ in range(1000):
        weights = np.array([1 / max(np.linalg.norm(x - point), 1e-12) for x in rows])
        moved = sum(w * x for w, x in zip(weights, rows, strict=True)) / weights.sum()
        step, point = np.linalg.norm(moved - point), moved
        if step <= 1e-10 * np.median([np.linalg.norm(x - point) for x in rows]):
            break
    return point


def arc(rows, f):
    n, norms = len(rows), [np.linalg.norm(x) for x in rows]
    radius = sorted(norms, reverse=True)[int(2 * f / n * (n - f))]
    return np.stack([x * min(1, radius / norm) for x, norm in zip(rows, norms, strict=True)])


PLAIN = {
    "mean": lambda rows, f: sum(rows) / len(rows),
    "median": lambda rows, f: np.median(rows, axis=0),
    "trimmed_mean": lambda rows, f: np.sort(rows, axis=0)[f : len(rows) - f].mean(0),
    "krum": lambda rows, f: rows[krum_scores(rows, f).argmin()],
    "multi_krum": lambda rows, f: rows[krum_scores(rows, f).argsort()[: len(rows) - f]].mean(0),
    "geometric_median": geometric_median,
    "centred_clipping": lambda rows, f: np.mean([x * min(1, 100 / np.linalg.norm(x)) for x in rows], axis=0),
    "nnm": nnm,
    "arc": arc,
    "clipping": lambda rows, f: np.stack([x * min(1, 2 / np.linalg.norm(x)) for x in rows]),
}


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def main():
    args = arguments(__doc__, rounds=3)
    ours = {**AGGREGATORS, **MIXING}
    rows = []
    for n, d in SIZES:
        data, f = np.random.default_rng(0).standard_normal((n, d)), (n - 1) // 2
        tensor = torch.from_numpy(data)
        for name, plain in PLAIN.items():
            times = {"ours": [], "plain": []}
            for i in range(args.rounds):
                spent, result = timed(ours[name], tensor, f)
                other, expected = timed(plain, data, f)
                if i == 0:
                    torch.testing.assert_close(result, torch.from_numpy(expected), rtol=1e-6, atol=1e-7)
                times["ours"].append(spent)
                times["plain"].append(other)
            ms = {key: 1e3 * statistics.median(value) for key, value in times.items()}
            rows.append({"n": n, "d": d, "f": f, "rule": name, **ms})
            ratio = ms["ours"] / ms["plain"]
            print(f"n {n:>4}  d {d:>8}  {name:<17} {ms['ours']:>9.1f} ms   {ratio:>5.2f} x numpy", flush=True)
    write(args, {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
