"""The fast path against the slow, obvious one: 100 rounds in float64, every scheme, as relative differences.

    python benchmarks/exactness.py --device cuda --json results/benchmarks/exactness-h200.json

Fast is the simulator: clients folded, passes compiled, rounds replayed as CUDA graphs on a GPU. Slow is the
tests' twin: one client after another, with torch's own BatchNorm and the library, on the same device. The
difference of a tensor is the largest one in it, relative to the largest value in it.
"""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from common import arguments, write

from fedbatchnorm.data.datasets import Dataset, Split
from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe
from fedbatchnorm.simulation.schemes import SCHEMES
from fedbatchnorm.simulation.simulator import Simulation

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulation"))
from twin import Twin  # pyrefly: ignore

SHAPE, CLIENTS, TOLERANCE = (3, 8, 8), 4, 1e-9


def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (400, *SHAPE), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (400,), generator=generator)
    mean, std = torch.full((3, 1, 1), 127.5), torch.full((3, 1, 1), 73.9)
    return Dataset(Split(x, y), Split(x[:50], y[:50]), mean, std, tuple("abcdefghij"))


def apart(ours, theirs):
    """The largest difference over all tensors, each relative to its largest value."""
    return max(
        (
            (value.cpu() - theirs[name].cpu()).abs().max() / theirs[name].abs().max().clamp(min=1e-30).cpu()
        ).item()
        for name, value in ours.items()
        if value.is_floating_point()
    )


def main():
    args = arguments(__doc__, rounds=100)
    rows = []
    for name in ("mlp", "cnn"):
        for scheme in (key for key, row in SCHEMES.items() if "dsgd" in row.algorithms):
            recipe = Recipe(scheme=scheme, clients=CLIENTS, batch=5, rounds=args.rounds, precision="float64")
            model = models.build(name, SHAPE, 10, seed=0)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0  # its masks depend on who shares a pass
            data, parts = images(), np.array_split(np.arange(400), CLIENTS)
            twin = Twin(copy.deepcopy(model), data, parts, recipe, args.device)
            fast = Simulation(model, data, parts, recipe, device=args.device, engine="compiled")
            for _ in range(args.rounds):
                fast.round()
                twin.round()
            row = {"model": name, "scheme": scheme, "engine": fast.engine, "rounds": args.rounds}
            rows.append(row | {"difference": apart(fast.model.state_dict(), twin.model.state_dict())})
            print(f"{name:<4} {scheme:<12} {fast.engine:<12} {rows[-1]['difference']:.1e}", flush=True)
    write(args, {"tolerance": TOLERANCE, "rows": rows})
    sys.exit(any(not row["difference"] <= TOLERANCE for row in rows))


if __name__ == "__main__":
    main()
