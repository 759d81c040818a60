"""Every scheme under FedAvg on CIFAR-10, at the best of a few learning rates.

    python benchmarks/schemes.py RUNS --data-dir DIR      # on a GPU; start it several times to share the work
    python benchmarks/schemes.py RUNS --json FILE         # collect what has finished

10 clients, all take part, 10 local steps of 50 images, the paper's network, momentum 0.9 reset each round,
gradients clipped at 1, cosine learning rate, 120 rounds, a calibrated start, clients weighted by size.
"""

import argparse
import json
import warnings
from pathlib import Path

import torch

from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.environment import choose_device
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import Options, run_all
from fedbatchnorm.simulation.schemes import SCHEMES

RATES = (0.2, 0.1, 0.05)
SPLITS = {
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "gamma 0": {"partition": "gamma", "gamma": 0.0},
}
SETTING = {
    "dataset": "cifar10",
    "algorithm": "fedavg",
    "clients": 10,
    "local_steps": 10,
    "batch": 50,
    "momentum": 0.9,
    "clip": 1.0,
    "schedule": "cosine",
    "rounds": 120,
    "evaluate_every": 20,
    "calibrate": True,
    "weighting": "size",
}
FIRST = ("fbn", "fixbn", "naive", "groupnorm")  # those that the notes of others give figures for


def configurations(precision, seeds):
    schemes = [name for name, scheme in SCHEMES.items() if "fedavg" in scheme.algorithms]
    ordered = [*FIRST, *(name for name in schemes if name not in FIRST)]
    return [
        Run(scheme=scheme, lr=rate, seed=seed, precision=precision, **SETTING, **split)
        for seed in range(seeds)
        for scheme in ordered
        for rate in RATES
        for split in SPLITS.values()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--data-dir", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--precision", default="bf16", choices=["tf32", "bf16"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--part", help="K/N: every N-th scheme, from the K-th on, so that processes compile apart"
    )
    parser.add_argument("--json", type=Path, help="collect what has finished into this file, and run nothing")
    args = parser.parse_args()
    configs = configurations(args.precision, args.seeds)
    if args.json:
        collect(args.runs, args.json, configs)
        return
    if args.part:
        k, n = map(int, args.part.split("/"))
        schemes = list(dict.fromkeys(c.scheme for c in configs))[k::n]
        configs = [c for c in configs if c.scheme in schemes]
    warnings.simplefilter("once")
    run_all(configs, args.runs, Options(choose_device("auto"), args.data_dir, share=True))


def collect(runs, file, configs):
    wanted = {digest(c): c for c in configs}
    rows, environment = [], None
    for result in read_results(runs)[0]:
        if result.name not in wanted:
            continue
        run, split = (
            result.config,
            next(k for k, v in SPLITS.items() if v["partition"] == result.config.partition),
        )
        rows.append(
            {"scheme": run.scheme, "split": split, "lr": run.lr, "seed": run.seed, "precision": run.precision}
            | {k: v for k, v in result.summary.items() if k not in ("round", "files", "digest")}
        )
        environment = result.environment[-1]
    order = list(SCHEMES)
    rows.sort(key=lambda r: (r["split"], order.index(r["scheme"]), r["lr"], r["seed"]))
    content = {
        "setting": SETTING,
        "environment": environment,
        "rows": rows,
        "missing": len(wanted) - len(rows),
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{file}: {len(rows)} runs, {content['missing']} missing; torch {torch.__version__}")


if __name__ == "__main__":
    main()
