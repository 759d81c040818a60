"""What trains well with BatchNorm in a federation: every scheme, over steps, splits, rates and seeds.

    python benchmarks/training.py digits RUNS                     # on a CPU; Ctrl-C and start again
    python benchmarks/training.py steps RUNS --data-dir DIR       # on a GPU
    python benchmarks/training.py digits RUNS --json FILE         # collect what has finished

A study is a list of runs. Start the command several times with the same folder to share the work; finished
runs are skipped. `--list` counts the runs of every study.
"""

import argparse
import dataclasses
import itertools
import json
import random
import warnings
from pathlib import Path

import torch

from fedbatchnorm.experiments.config import Run, digest
from fedbatchnorm.experiments.environment import choose_device
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import Options, run_all

OURS = {"scheme": "fbn", "gradient": "auto", "limit": "auto", "recalibrate": True}
RIVALS = [{"scheme": s} for s in ("naive", "groupnorm", "fixbn", "fbn", "hbn", "fbn_blend")]
ONE_CLASS = {"partition": "gamma", "gamma": 0.0}
DIRICHLET = {"partition": "dirichlet", "alpha": 0.1}
FEDAVG = {"algorithm": "fedavg", "clients": 10, "calibrate": True}


def grid(*axes):
    """All runs that take one entry of each axis, which is a list of settings."""
    for entries in itertools.product(*axes):
        settings = {}
        for entry in entries:
            settings |= entry
        yield Run(**settings)


def axis(name, *values):
    return [{name: value} for value in values]


def digits():
    """Digits as a quickstart app trains them: ten clients, batches of 32, momentum 0.9, reset each round."""
    work = [
        {"local_steps": 1, "rounds": 100},
        {"local_epochs": 1, "rounds": 30},
        {"local_epochs": 5, "rounds": 12},
    ]
    limits = [{"schedule": "constant"}, {"schedule": "cosine", "clip": 1.0}]
    base = [FEDAVG | {"dataset": "digits", "batch": 32, "evaluate_every": 200}]
    splits = [{"partition": "gamma", "gamma": 1.0}, DIRICHLET, ONE_CLASS]
    rates, seeds = axis("lr", 0.01, 0.05, 0.2), axis("seed", 0, 1, 2)
    again = {"scheme": "naive", "recalibrate": True}  # what evaluating with fresh statistics does by itself
    ways = [OURS, *RIVALS, again]
    return grid(axis("model", "cnn16", "plain9"), seeds, base, work, splits, rates, limits, ways)


def shares():
    """Digits again, one seed, with constant shares in place of the one that follows drift."""
    for run in digits():
        if run.seed == 0 and run.gradient == "auto":
            for share, limit in itertools.product((0.3, 0.6, 0.9), (None, 2.0)):
                yield dataclasses.replace(run, gradient=share, limit=limit)


def paper():
    """The paper's recipe: distributed SGD, T = 3000, with its dampened momentum and with an ordinary one."""
    base = [{"dataset": "cifar10", "rounds": 3000, "precision": "bf16", "evaluate_every": 500}]
    kinds = [{}, {"momentum": 0.9, "momentum_kind": "ordinary", "lr": 0.05}]
    splits = [ONE_CLASS, {"partition": "gamma", "gamma": 1.0}]
    return grid(
        axis("seed", 0, 1, 2), base, kinds, splits, [OURS, {"scheme": "fbn"}, {"scheme": "centralized"}]
    )


def steps():
    """CIFAR-10, the paper's network, 1200 local steps in all, in rounds of 1, 2, 10 and 50 steps."""
    base = [
        FEDAVG
        | {"dataset": "cifar10", "batch": 50, "schedule": "cosine", "clip": 1.0, "precision": "bf16"}
        | {"evaluate_every": 10_000}
    ]
    splits = [DIRICHLET, ONE_CLASS, {"partition": "gamma", "gamma": 0.1}]
    for seed in (0, 1, 2):
        for k, rates in ((10, (0.2, 0.1)), (50, (0.1,)), (2, (0.1,)), (1, (0.1,))):
            work = [{"local_steps": k, "rounds": 1200 // k, "seed": seed}]
            yield from grid(base, work, splits, axis("lr", *rates), [OURS, *RIVALS])


def attacks():
    """Digits with three Byzantine clients of ten: statistics attacked, with and without a defense."""
    fedavg = FEDAVG | {
        "local_epochs": 1,
        "rounds": 30,
        "batch": 32,
        "lr": 0.05,
        "model": "cnn16",
        "gamma": 0.5,
    }
    paper_recipe = {"algorithm": "dsgd", "rounds": 300, "batch": 10, "model": "mlp", "gamma": 0.0}
    base = [{"dataset": "digits", "partition": "gamma", "weighting": "equal", "evaluate_every": 1000}]
    lies = [{}] + [
        {"byzantine": 3, "attack": attack, "defense": defense}
        for attack in ("sf", "foe", "alie")
        for defense in ("none", "nnm+median")
    ]
    return grid(axis("seed", 0, 1, 2), base, [paper_recipe, fedavg], lies, [OURS, {"scheme": "fbn"}])


STUDIES = {"digits": digits, "shares": shares, "paper": paper, "steps": steps, "attacks": attacks}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES, nargs="?")
    parser.add_argument("runs", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--data-dir", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--where", action="append", default=[], help="FIELD=VALUE: only such runs")
    parser.add_argument("--json", type=Path, help="collect what has finished into this file, and run nothing")
    parser.add_argument("--list", action="store_true", help="count the runs of every study")
    args = parser.parse_args()
    if args.list:
        for name, study in STUDIES.items():
            print(f"{name:<8} {len(list(study())):>5} runs  {study.__doc__.splitlines()[0]}")
        return
    if args.study is None or args.runs is None:
        parser.error("give a study and a folder, or --list")
    configs = [c for c in STUDIES[args.study]() if all(_fits(c, w) for w in args.where)]
    if args.json:
        collect(args.runs, args.json, args.study, configs)
        return
    warnings.simplefilter("once")
    device = choose_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        random.shuffle(configs)
    run_all(configs, args.runs, Options(device, args.data_dir, share=True))


def _fits(config, condition):
    name, _, value = condition.partition("=")
    return str(getattr(config, name)) in value.split(",")


def collect(runs, file, study, configs):
    """One line for each run: what sets it apart, and how it ended."""
    wanted = {digest(c): c for c in configs}
    common = {
        f.name: getattr(configs[0], f.name)
        for f in dataclasses.fields(Run)
        if len({getattr(c, f.name) for c in configs}) == 1
    }
    rows, environments = {}, set()
    for result in read_results(runs)[0]:
        name = result.name
        if name in wanted:
            config = dataclasses.asdict(result.config)
            apart = {k: v for k, v in config.items() if k not in common and v is not None}
            rows[name] = apart | {"accuracy": result.summary.get("accuracy")}
            environment = result.environment[-1]
            environments.add((environment.get("device"), environment.get("torch"), environment.get("commit")))
    lines = ",\n  ".join(json.dumps(rows[name]) for name in wanted if name in rows)
    head = {
        "study": study,
        "common": common,
        "environments": sorted(environments, key=str),
        "missing": len(wanted) - len(rows),
    }
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    file.write_text(text)
    print(f"{file}: {len(rows)} runs, {head['missing']} missing")


if __name__ == "__main__":
    main()
