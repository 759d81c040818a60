"""A whole federated round: the simulator against clients one after another and a centralized step.

    python benchmarks/round.py            # CPU
    python benchmarks/round.py --device cuda

A round of 10 clients, the paper's network with 50 images each and the demo's with 10. Every contender takes
its turn in every round, so that whatever else the machine does hits all of them; figures are ratios of
medians. It also says where the simulator's time goes: what is not the model's forward and backward.
"""

import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from common import arguments, write

import fedbatchnorm as fbn
from fedbatchnorm.data.datasets import Dataset, Split
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.federation import draw
from fedbatchnorm.simulation.recipe import Recipe, stream
from fedbatchnorm.simulation.simulator import Simulation

CLIENTS = 10
CASES = {
    "cnn, 10 x 50 images of 3 x 32 x 32": ("cnn", (3, 32, 32), 50),
    "mlp, 10 x 10 digits": ("mlp", (1, 8, 8), 10),
}


def dataset(shape, images=5000):
    """Random bytes of the right shape: the time of a round does not depend on what is learned."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (images, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(10, (images,), generator=generator)
    mean, std = torch.full((shape[0], 1, 1), 127.5), torch.full((shape[0], 1, 1), 73.9)
    return Dataset(Split(x, y), Split(x, y), mean, std, tuple("0123456789"))


class Loop:
    """What one would write without a simulator: a model, clients one after another, `merge` at the end."""

    def __init__(self, model, data, parts, recipe, device):
        self.model, self.data, self.parts, self.recipe = (
            fbn.convert(model).to(device),
            data.to(device),
            parts,
            recipe,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.99, dampening=0.99)
        self.shared, self.step = fbn.statistics(self.model), 0

    def round(self):
        self.model.train()
        self.optimizer.zero_grad()
        updates = []
        for index in draw(self.parts, self.recipe.batch, stream(0, "batches", self.step)):
            x, y = self.data.inputs(self.data.train.x[index]), self.data.train.y[index]
            fbn.load_statistics(self.model, self.shared)
            (F.cross_entropy(self.model(x), y) / CLIENTS).backward()
            updates.append(fbn.collect(self.model))
        self.optimizer.step()
        self.shared = fbn.merge(self.shared, updates).statistics
        self.step += 1


class Centralized:
    """Plain PyTorch on the merged batch, with torch's own BatchNorm."""

    def __init__(self, model, data, parts, recipe, device):
        self.model, self.data, self.parts, self.recipe = model.to(device), data.to(device), parts, recipe
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.99, dampening=0.99)
        self.step = 0

    def round(self):
        self.model.train()
        self.optimizer.zero_grad()
        index = draw(self.parts, self.recipe.batch, stream(0, "batches", self.step)).ravel()
        x, y = self.data.inputs(self.data.train.x[index]), self.data.train.y[index]
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.step += 1


def contenders(name, shape, batch, device):
    data, parts = dataset(shape), np.array_split(np.arange(5000), CLIENTS)

    def made(kind, scheme="fbn", **options):
        recipe = Recipe(scheme=scheme, clients=CLIENTS, batch=batch)
        return kind(models.build(name, shape, 10, seed=0), data, parts, recipe, device=device, **options)

    return {
        "FBN, simulator": made(Simulation),
        "FBN, all clients in one pass": made(Simulation, chunk=CLIENTS),
        "FBN, one client a pass": made(Simulation, chunk=1),
        "FBN, a plain loop over clients": made(Loop),
        "naive, simulator": made(Simulation, "naive"),
        "centralized, simulator": made(Simulation, "centralized"),
        "centralized, plain PyTorch": made(Centralized),
    }


def seconds(contender, device):
    start = time.perf_counter()
    contender.round()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def overhead(simulation, rounds):
    """The share of a round that is not the model's own forward and backward; on a CPU only."""
    inside = [0.0]

    def timed(function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inside[0] += time.perf_counter() - start

        return call

    simulation.model.forward = timed(simulation.model.forward)
    plain, torch.Tensor.backward = torch.Tensor.backward, timed(torch.Tensor.backward)
    try:
        whole = sum(seconds(simulation, "cpu") for _ in range(rounds))
    finally:
        torch.Tensor.backward = plain
        del simulation.model.forward
    return 1 - inside[0] / whole


def main():
    args = arguments(__doc__, rounds=7)
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads")
    rows = []
    for case, (name, shape, batch) in CASES.items():
        found = contenders(name, shape, batch, args.device)
        rounds = args.rounds if name == "cnn" and args.device == "cpu" else 20 * args.rounds
        keys = list(found)
        times = {key: [] for key in keys}
        for i in range(rounds + 1):
            # In random order: what ran before leaves its mark on the heap.
            for key in np.random.default_rng(i).permutation(keys):
                spent = seconds(found[key], args.device)
                if i:
                    times[key].append(spent)
        row = {
            "case": case,
            "rounds": rounds,
            "ms": {k: 1e3 * statistics.median(v) for k, v in times.items()},
        }
        print(f"\n{case} ({rounds} rounds)")
        for key, value in row["ms"].items():
            loop, plain = (
                value / row["ms"][k] for k in ("FBN, a plain loop over clients", "centralized, plain PyTorch")
            )
            print(
                f"  {key:<32} {value:>10.2f} ms   {loop:>5.2f} x the loop   {plain:>5.2f} x plain centralized"
            )
        if args.device == "cpu":
            row["outside"] = overhead(found["FBN, simulator"], max(3, rounds // 3))
            print(f"  outside the model's forward and backward: {100 * row['outside']:.1f}% of FBN's round")
        rows.append(row)
    write(args, {"rows": rows})


if __name__ == "__main__":
    main()
