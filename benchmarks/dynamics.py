"""What moves while a federation trains on digits, by layer: weights, variances, gradients, drift.

    python benchmarks/dynamics.py --json results/training/dynamics.json            # ten minutes on one core
    python benchmarks/dynamics.py --shares --json results/training/constant.json   # five

Ten clients train for one epoch a round with ordinary SGD: the study `digits` of training.py at learning rate
0.05, without clipping. A convolution and the BatchNorm layer behind it are a layer here. In each round, over
all clients and local steps:

- weights: the norm of the convolution's weights after the round, over that at the start;
- variance: the mean over channels of the running variance after the round;
- gradient: the norm of the gradient of the convolution's weights;
- radial: the part of that gradient along the weights, channel by channel: sqrt(sum <g, w / |w|>^2) / |g|,
  over the steps whose gradient is not 0;
- level: the norm of the gradient of the convolution's bias, which moves a channel's mean and nothing else;
- drift: of the union's mean, in standard deviations (aggregation/drift.py).

`--shares` gives the accuracy at the end for constant shares of BatchNorm's gradient, without a limit: in that
setting, and for an MLP with the paper's recipe, distributed SGD with dampened momentum.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from unittest import mock

import torch
from common import result
from torch import nn

from fedbatchnorm.aggregation.drift import drift
from fedbatchnorm.experiments.config import Run
from fedbatchnorm.experiments.runner import federation
from fedbatchnorm.simulation.federation import Federation
from fedbatchnorm.simulation.lanes import Lane

SPLITS = {
    "iid": {"partition": "gamma", "gamma": 1.0},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "one class each": {"partition": "gamma", "gamma": 0.0},
}
CONTENDERS = {
    "plain": {"scheme": "naive"},
    "FBN": {"scheme": "fbn"},
    "0.7, limit": {"scheme": "fbn", "gradient": 0.7, "limit": "auto"},
    "ours": {"scheme": "fbn", "gradient": "auto", "limit": "auto", "recalibrate": True},
    "1": {"scheme": "fbn", "gradient": 1.0},
}
SETTING = {"algorithm": "fedavg", "dataset": "digits", "model": "cnn16", "clients": 10, "batch": 32}
SETTING |= {"local_epochs": 1, "rounds": 30, "lr": 0.05, "calibrate": True}


PAPER = {"dataset": "digits", "model": "mlp", "clients": 10, "batch": 10, "rounds": 300}
RECIPES = {"FedAvg, 1 epoch, `cnn16`": SETTING, "the paper's recipe, `mlp`": PAPER}
SHARES = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
BY_LAYER = ("weights", "variance", "gradient", "radial", "level", "drift")


def radial(weight, gradient):
    """How much of a gradient is along the weights, channel by channel; NaN for a gradient of 0."""
    w, g = weight.flatten(1).double(), gradient.flatten(1).double()
    along = (w * g).sum(1) / w.norm(dim=1)
    return (along.norm() / g.norm()).item()


class Watch:
    """Looks at every local step's gradient, and at every merge."""

    def __init__(self, simulation):
        packing = simulation.algorithm.packing
        modules = simulation.model.named_modules()
        self.names = [name for name, module in modules if isinstance(module, nn.Conv2d)]
        self.views, self.places = packing.views, packing.names
        self.steps, self.moved = [], []

    def parts(self, flat, kind):
        """Each convolution's weight or bias in a flat vector of all parameters."""
        views = dict(zip(self.places, self.views(flat), strict=True))
        return [views[f"{name}.{kind}"] for name in self.names]

    def step(self, weights, gradient):
        w, g, b = self.parts(weights, "weight"), self.parts(gradient, "weight"), self.parts(gradient, "bias")
        row = [[x.norm().item() for x in g], list(map(radial, w, g)), [x.norm().item() for x in b]]
        self.steps.append(row)

    def merge(self, before, after, beta):
        self.moved = [drift([b], [a], beta).item() for b, a in zip(before, after, strict=True)]

    def round(self):
        """By quantity and layer: means over the round's clients and steps, and the merge's drift."""
        means = torch.tensor(self.steps, dtype=torch.float64).nanmean(0).tolist()
        self.steps = []
        return dict(zip(("gradient", "radial", "level"), means, strict=True)) | {"drift": self.moved}


def trace(config):
    """Train, and return {quantity: an entry for each round}, or for each layer one of these."""
    simulation, _ = federation(config, torch.device("cpu"), None)
    watch, step, follow = Watch(simulation), Lane.step, Federation.follow_drift

    def watched_step(lane, *args, **more):
        before = lane.weights.clone()
        step(lane, *args, **more)
        watch.step(before, lane.gradient)

    def watched_merge(self, before, after, beta, *more):
        watch.merge(before, after, beta)
        follow(self, before, after, beta, *more)

    def norms():
        return [w.norm().item() for w in watch.parts(simulation.algorithm.weights, "weight")]

    rounds, start = [], norms()
    with (
        mock.patch.object(Lane, "step", watched_step),
        mock.patch.object(Federation, "follow_drift", watched_merge),
    ):
        while simulation.step < config.rounds:
            share = simulation.federation.share
            now = {"share": 0.0 if share is None else share.item()}
            simulation.round()
            now |= watch.round() | {
                "accuracy": simulation.evaluate().accuracy,
                "weights": [after / first for after, first in zip(norms(), start, strict=True)],
                "variance": [layer.running_var.mean().item() for layer in simulation.layers.values()],
            }
            if simulation.federation.follows:
                now["between"] = simulation.federation.between.tolist()
            rounds.append(now)
    found = {name: [now[name] for now in rounds] for name in ("accuracy", "share")}
    by_layer = [name for name in (*BY_LAYER, "between") if name in rounds[0]]
    return found | {
        name: [list(layer) for layer in zip(*(now[name] for now in rounds), strict=True)] for name in by_layer
    }


def rounded(value):
    """Four digits, and null for what is not finite, so that files are small and valid JSON."""
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = [(k, rounded(v)) for k, v in pairs]
        return dict(found) if isinstance(value, dict) else [v for _, v in found]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def traces(seeds):
    for seed, (split, where), (name, how) in itertools.product(
        range(seeds), SPLITS.items(), CONTENDERS.items()
    ):
        row = {"split": split, "contender": name, "seed": seed}
        row |= trace(Run(**SETTING, **where, **how, seed=seed))
        print(f"{split:<15} {name:<13} seed {seed}: {100 * row['accuracy'][-1]:.1f}", flush=True)
        yield row


def final_accuracies(seeds):
    for (recipe, setting), (split, where), share, seed in itertools.product(
        RECIPES.items(), SPLITS.items(), SHARES, range(seeds)
    ):
        config = Run(**setting, **where, gradient=share, seed=seed)
        simulation, _ = federation(config, torch.device("cpu"), None)
        while simulation.step < config.rounds:
            simulation.round()
        accuracy = simulation.evaluate().accuracy
        print(f"{recipe}, {split}, share {share}, seed {seed}: {100 * accuracy:.1f}", flush=True)
        yield {"recipe": recipe, "split": split, "share": share, "seed": seed, "accuracy": accuracy}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shares", action="store_true", help="accuracies for constant shares, in place of traces"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = result(args, "cpu") | ({} if args.shares else {"setting": SETTING})
    found = final_accuracies(args.seeds) if args.shares else traces(args.seeds)
    lines = ",\n  ".join(json.dumps(rounded(row)) for row in found)
    args.json.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
