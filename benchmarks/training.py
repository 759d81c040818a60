"""What trains well with BatchNorm in a federation: every scheme, over steps, splits, rates and seeds.

    python benchmarks/training.py digits RUNS                     # on a CPU; Ctrl-C and start again
    python benchmarks/training.py steps RUNS --data-dir DIR       # on a GPU
    python benchmarks/training.py digits RUNS --json FILE         # collect what has finished

A study is a list of runs. Start the command several times with the same folder to share the work; finished
runs are skipped, and a run that fails is named and left out. What a file has stays where a run is not among
those that are collected. `--list` counts the runs of every study.
"""

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import sys
import traceback
import warnings
from pathlib import Path

import torch

from fedbatchnorm.experiments import parts
from fedbatchnorm.experiments.config import Run, digest, to_json
from fedbatchnorm.experiments.environment import choose_device
from fedbatchnorm.experiments.results import read_results
from fedbatchnorm.experiments.runner import Options, Stopped, run_all
from fedbatchnorm.norm.moments import Moments
from fedbatchnorm.simulation.normalizers import with_shared
from fedbatchnorm.simulation.schemes import Phase
from fedbatchnorm.simulation.sharing import MOMENTS, Kept, merge_exactly

OURS = {"scheme": "fbn", "gradient": "auto", "limit": "auto", "recalibrate": True}
RIVALS = [{"scheme": s} for s in ("naive", "groupnorm", "fixbn", "fbn", "hbn", "fbn_blend")]
ONE_CLASS = {"partition": "gamma", "gamma": 0.0}
DIRICHLET = {"partition": "dirichlet", "alpha": 0.1}
FEDAVG = {"algorithm": "fedavg", "clients": 10, "calibrate": True}


def mean_over_steps(kept, seen, beta):
    """Mean and variance of a client's batches, averaged: what lies between batches is lost."""
    total = torch.as_tensor(kept.count + seen.count)
    weight = seen.count / total.clamp(min=1)
    return Moments(total, torch.lerp(kept.mean, seen.mean, weight), torch.lerp(kept.var, seen.var, weight))


def merge_about_new_mean(mean, var, kept, shares, beta, total, population=None):
    """Clients' spread is taken about the smoothed mean, not about their own; both are smoothed by 0.1."""
    shares = shares.to(kept.mean.dtype)
    mean = 0.9 * mean + 0.1 * (shares @ kept.mean)
    spread = shares @ (kept.var + (kept.mean - mean).square())
    return mean, 0.9 * var + 0.1 * spread


# FBN as the repository of HBN has it (1c0e151), to see how far it is from FBN.
IN_HBN = parts.scheme(
    "fbn_in_hbn",
    Phase(with_shared, merge_exactly, kept=Kept(mean_over_steps, merge_about_new_mean, MOMENTS.rows)),
    title="FBN in HBN's repository",
    algorithms=("fedavg",),
)


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


def clipping():
    """CIFAR-10 with and without clipping: plain BatchNorm and ours, 120 rounds of 10 local steps."""
    base = FEDAVG | {"dataset": "cifar10", "batch": 50, "local_steps": 10, "rounds": 120}
    base |= {"schedule": "cosine", "evaluate_every": 10_000}
    rates, limits = axis("lr", 0.02, 0.05, 0.1), [{"clip": 1.0}, {}]
    return grid(
        axis("seed", 0, 1), [base], [DIRICHLET, ONE_CLASS], rates, limits, [{"scheme": "naive"}, OURS]
    )


def hbn():
    """HBN's protocol: CIFAR-10, 10 of 100 clients a round, one epoch, its network, 500 rounds."""
    base = {"algorithm": "fedavg", "dataset": "cifar10", "model": "cnn16", "clients": 100, "cohort": 10}
    base |= {"local_epochs": 1, "rounds": 500, "schedule": "exponential", "decay": 0.998, "clip": 10.0}
    base |= {"augment": True, "evaluate_every": 2, "partition": "dirichlet"}
    rates = {"groupnorm": 0.005, "layernorm": 0.005, "fixbn": 0.002}  # as published; 0.01 for all others
    schemes = ("naive", "groupnorm", "layernorm", "fixbn", "hbn", IN_HBN, "fbn", "fbn_blend")
    ways = [{"scheme": s, "lr": rates.get(s, 0.01) if isinstance(s, str) else 0.01} for s in schemes]
    ways.append(OURS | {"lr": 0.01, "calibrate": True})
    return grid([base], axis("batch", 50, 4), axis("alpha", 0.6, 0.1), ways)


def resnets():
    """ResNet-20 on CIFAR-10 with crops and flips: ten clients, Dirichlet 0.1, 150 rounds of 10 steps."""
    base = FEDAVG | {"dataset": "cifar10", "model": "resnet20", "batch": 50, "local_steps": 10, "rounds": 150}
    base |= {"schedule": "cosine", "clip": 1.0, "augment": True, "evaluate_every": 10_000} | DIRICHLET
    base |= {"precision": "bf16"}
    return grid([base], axis("lr", 0.2, 0.1), [OURS, *RIVALS])


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
STUDIES |= {"hbn": hbn, "resnets": resnets, "clipping": clipping}
LAST_ROUNDS = 10  # HBN reports the mean accuracy over so many, and the best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES, nargs="?")
    parser.add_argument("runs", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--data-dir", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--where", action="append", default=[], help="FIELD=VALUE: only such runs")
    parser.add_argument("--but", type=Path, help="leave out runs that this file has")
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
    if args.but:
        done, _ = earlier(args.but, {digest(c): settings(c) for c in configs})
        configs = [c for c in configs if digest(c) not in done]
    warnings.simplefilter("once")
    device = choose_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        random.shuffle(configs)
    failed = 0
    for config in configs:
        try:
            run_all([config], args.runs, Options(device, args.data_dir, share=True))
        except (Stopped, KeyboardInterrupt):
            raise
        except Exception:
            failed += 1
            print(f"failed: {digest(config)}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"{failed} runs failed")


def _fits(config, condition):
    name, _, value = condition.partition("=")
    return str(getattr(config, name)) in value.split(",")


def settings(config):
    """What a run is, as plain values."""
    return {k: v for k, v in to_json(config).items() if k not in ("kind", "own", "source")}


def key(what):
    """The same for the same settings, whether or not what is off is written down."""
    return json.dumps({k: v for k, v in what.items() if v not in (None, False)}, sort_keys=True)


def collect(runs, file, study, configs):
    """One line for each run: what sets it apart, and how it ended."""
    wanted = {digest(c): settings(c) for c in configs}
    first = next(iter(wanted.values()))
    common = {k: v for k, v in first.items() if all(other[k] == v for other in wanted.values())}
    rows, environments = earlier(file, wanted)
    for result in read_results(runs)[0]:
        if result.name in wanted:
            ended = {"accuracy": result.summary.get("accuracy")}
            if study == "hbn":
                last = [m for m in result.metrics if m["round"] > result.config.rounds - LAST_ROUNDS]
                ended |= {"last": statistics.fmean(m["accuracy"] for m in last)}
                ended |= {"best": result.summary["best_accuracy"]}
            rows[result.name] = ended
            environment = result.environment[-1]
            environments.add((environment.get("device"), environment.get("torch"), environment.get("commit")))
    apart = {n: {k: v for k, v in s.items() if k not in common and v is not None} for n, s in wanted.items()}
    lines = ",\n  ".join(json.dumps(apart[name] | rows[name]) for name in wanted if name in rows)
    head = {
        "study": study,
        "common": common,
        "environments": sorted(environments, key=str),
        "missing": len(wanted) - len(rows),
    }
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    file.write_text(text)
    print(f"{file}: {len(rows)} runs, {head['missing']} missing")


def earlier(file, wanted):
    """How runs of the study ended that a file has already, and where they were run."""
    if not file.exists():
        return {}, set()
    content, found = json.loads(file.read_text()), {}
    names = {key(what): name for name, what in wanted.items()}
    for row in content["rows"]:
        ended = {k: row.pop(k) for k in ("accuracy", "last", "best") if k in row}
        name = names.get(key(content["common"] | row))
        if name is not None:
            found[name] = ended
    environments = {tuple(environment) for environment in content["environments"]} if found else set()
    return found, environments


if __name__ == "__main__":
    main()
