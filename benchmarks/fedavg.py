"""FedAvg on a GPU: a round of our simulator and of pfl-research, in one run.

    python benchmarks/fedavg.py --json results/benchmarks/fedavg.json    # every part
    python benchmarks/fedavg.py --only steps growth                      # some of them
    python benchmarks/fedavg.py --only steps --rows 'FBN, TF32'          # one contender
    python benchmarks/fedavg.py --profile                                # and what a round's time goes to

Parts: `steps` is 10 clients with 10 steps of 50 images and the paper's network; `pfl` is pfl-research's own
CIFAR-10 benchmark (50 of 1000 clients, one epoch of 50 images in batches of 10); `tiny` is HBN's protocol
(one epoch of 500 images in batches of 4); `resnets` is `steps` with other networks; `growth` is `steps` with
a cohort of 10 out of more and more clients. Contenders of a part take turns, in random order; figures are
medians over turns. Images are random bytes: no time depends on what they show. pfl-research takes part where
it can be imported.
"""

import argparse
import gc
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from common import result
from gpu import milliseconds, take_turns
from pfl_rounds import Pfl, available, pfl_cnn
from round import dataset

from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe
from fedbatchnorm.simulation.simulator import Simulation

SHAPE, IMAGES = (3, 32, 32), 50_000
TF32, BF16 = {"precision": "tf32"}, {"precision": "bf16"}
LANES = {"abreast": False}


def data():
    return dataset(SHAPE, IMAGES)


def ours(clients, model="cnn", lanes=None, abreast=None, **recipe):
    """A federation of ours; plain SGD, as pfl-research's benchmark has it."""
    settings = {"algorithm": "fedavg", "scheme": "fbn", "lr": 0.01, "momentum": 0.0, "weighting": "equal"}
    recipe = Recipe(**settings | {"clients": clients} | recipe)
    parts = np.array_split(np.arange(IMAGES), clients)
    net = pfl_cnn() if model == "pfl" else models.build(model, SHAPE, 10, seed=0)
    return Simulation(net, data(), parts, recipe, device="cuda", chunk=lanes, abreast=abreast)


def pfl(clients, model="cnn", **settings):
    parts = np.array_split(np.arange(IMAGES), clients)
    net = pfl_cnn() if model == "pfl" else models.build(model, SHAPE, 10, seed=0)
    return Pfl(net, data(), parts, lr=0.01, device="cuda", **settings)


STEPS = {"clients": 10, "local_steps": 10, "batch": 50}
PFL_STEPS = {"clients": 10, "cohort": 10, "local_steps": 10, "batch": 50}
USERS = {"clients": 1000, "cohort": 50, "batch": 10, "model": "pfl"}
TINY = {"clients": 100, "batch": 4, "local_epochs": 1, "model": "cnn16"}
FOLDED = {"algorithm": "dsgd", "clients": 10, "batch": 50, "momentum": 0.0}

PARTS = {
    "steps": {
        "FBN, TF32": lambda: ours(**STEPS, **TF32),
        "FBN, bf16": lambda: ours(**STEPS, **BF16),
        "FBN, momentum and clipping, TF32": lambda: ours(**STEPS, **TF32, momentum=0.9, clip=1.0),
        "FBN, gradient auto, TF32": lambda: ours(**STEPS, **TF32, gradient="auto"),
        "FBN, gradient auto, limit, TF32": lambda: ours(**STEPS, **TF32, gradient="auto", limit=2.0),
        "naive, TF32": lambda: ours(**STEPS, **TF32, scheme="naive"),
        "GroupNorm, TF32": lambda: ours(**STEPS, **TF32, scheme="groupnorm"),
        "FBN, lanes, TF32": lambda: ours(**STEPS, **TF32, **LANES),
        "FBN, lanes, bf16": lambda: ours(**STEPS, **BF16, **LANES),
        "naive, lanes, TF32": lambda: ours(**STEPS, **TF32, **LANES, scheme="naive"),
        "GroupNorm, lanes, TF32": lambda: ours(**STEPS, **TF32, **LANES, scheme="groupnorm"),
        "FBN, one client after another, TF32": lambda: ours(**STEPS, **TF32, **LANES, lanes=1),
        "ten rounds of distributed SGD, TF32": lambda: Ten(ours(**FOLDED, **TF32)),
        "ten rounds of distributed SGD, bf16": lambda: Ten(ours(**FOLDED, **BF16)),
        "pfl-research, TF32": lambda: pfl(**PFL_STEPS),
        "pfl-research, TF32, channels_last": lambda: pfl(**PFL_STEPS, channels_last=True),
        "pfl-research, bf16": lambda: pfl(**PFL_STEPS, precision="bf16"),
    },
    "pfl": {
        "ours, TF32": lambda: ours(**USERS, **TF32, scheme="none", local_epochs=1, lr=0.1),
        "ours, bf16": lambda: ours(**USERS, **BF16, scheme="none", local_epochs=1, lr=0.1),
        "pfl-research, TF32": lambda: pfl(**USERS, epochs=1),
        "pfl-research, TF32, channels_last": lambda: pfl(**USERS, epochs=1, channels_last=True),
        "pfl-research, bf16": lambda: pfl(**USERS, epochs=1, precision="bf16"),
    },
    "tiny": {
        "FBN, cohort of 10, TF32": lambda: ours(**TINY, **TF32, cohort=10),
        "FBN, cohort of 10, bf16": lambda: ours(**TINY, **BF16, cohort=10),
        "FBN, lanes, cohort of 10, TF32": lambda: ours(**TINY, **TF32, **LANES, cohort=10),
        "FBN, lanes, cohort of 10, bf16": lambda: ours(**TINY, **BF16, **LANES, cohort=10),
        "FBN, all 100 clients, TF32": lambda: ours(**TINY, **TF32),
        "FBN, lanes, all 100 clients, TF32": lambda: ours(**TINY, **TF32, **LANES),
        "naive, cohort of 10, TF32": lambda: ours(**TINY, **TF32, cohort=10, scheme="naive"),
    },
    "resnets": {
        "ResNet-20, FBN, TF32": lambda: ours(**STEPS, **TF32, model="resnet20"),
        "ResNet-20, FBN, bf16": lambda: ours(**STEPS, **BF16, model="resnet20"),
        "ResNet-18, FBN, TF32": lambda: ours(**STEPS, **TF32, model="resnet18"),
        "ResNet-18, FBN, bf16": lambda: ours(**STEPS, **BF16, model="resnet18"),
    },
}


class Ten:
    """Ten rounds of distributed SGD: the same arithmetic with weights that all clients share."""

    def __init__(self, simulation):
        self.simulation = simulation

    def round(self):
        for _ in range(10):
            self.simulation.round()


def compare(rows, turns, rounds):
    """Median milliseconds of each contender, and every turn's."""
    found = {name: make() for name, make in rows.items() if available() or "pfl-research" not in name}
    medians, times = take_turns(found, turns, rounds, warm_up=2)
    engines = {name: c.engine for name, c in found.items() if isinstance(c, Simulation)}
    slow = [name for name, engine in engines.items() if engine != "CUDA graphs"]
    for name in slow:  # the others are what they are
        print(f"  left out, since it did not run as CUDA graphs: {name}", flush=True)
    return tuple({k: v for k, v in found.items() if k not in slow} for found in (medians, times))


def chosen(part, rows):
    """Contenders of a part; of these names alone, if any are given."""
    return {name: make for name, make in PARTS[part].items() if not rows or name in rows}


def growth(turns, rounds):
    """Time and memory of a cohort of ten, against the number of clients."""
    found = []
    for clients in (10, 100, 1000, 10_000):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        simulation = ours(clients, cohort=10, local_steps=10, batch=50, **TF32)
        milliseconds(simulation, 2)
        ms = statistics.median(milliseconds(simulation, rounds) for _ in range(turns))
        memory = torch.cuda.max_memory_reserved() - before
        found.append({"clients": clients, "ms": ms, "bytes": memory})
        print(f"  {clients:>6} clients, cohort of 10 {ms:>8.2f} ms {memory / 2**30:>6.2f} GiB", flush=True)
        del simulation
    return found


def profile(rows):
    """The kernels of a round, by time."""
    found = {}
    for name in ("FBN, TF32", "FBN, bf16"):
        simulation = rows[name]()
        milliseconds(simulation, 3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            milliseconds(simulation, 5)
        events = [(e.key, e.self_device_time_total / 5e3, e.count / 5) for e in profiler.key_averages()]
        events = sorted((e for e in events if e[1] > 0), key=lambda e: -e[1])
        found[name] = [{"kernel": k[:120], "ms": ms, "calls": calls} for k, ms, calls in events]
        print(f"{name}: {sum(e[1] for e in events):.2f} ms of kernels", flush=True)
        for key, ms, calls in events[:30]:
            print(f"  {ms:>7.3f} ms {calls:>7.1f} x {key[:110]}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*PARTS, "growth"], help="parts to run")
    parser.add_argument("--rows", nargs="*", help="contenders to run, by name; all if not given")
    parser.add_argument("--turns", type=int, default=5, help="turns of every contender")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in a turn")
    parser.add_argument("--profile", action="store_true", help="also what a round's time goes to")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--json", type=Path, help="write the results to this file, part by part")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    content = result(args, "cuda") | {"turns": args.turns, "rounds": args.rounds, "parts": {}}
    if not available():
        print("no rows of pfl-research: it cannot be imported here")

    def save():
        if args.json:
            args.json.write_text(json.dumps(content, indent=1) + "\n")

    for part in args.only if args.only is not None else [*PARTS, "growth"]:
        print(f"{part}:", flush=True)
        if part == "growth":
            content["growth"] = growth(args.turns, args.rounds)
        else:
            medians, times = compare(chosen(part, args.rows), args.turns, args.rounds)
            content["parts"][part] = {"ms": medians, "times": times}
            for name, ms in medians.items():
                print(f"  {name:<42} {ms:>8.2f} ms", flush=True)
        save()
        gc.collect()
        torch.cuda.empty_cache()
    if args.profile:
        content["profile"] = profile(PARTS["steps"])
        save()


if __name__ == "__main__":
    main()
