"""FedAvg on a CPU: clients abreast in one pass against one client after another, in one run.

    python benchmarks/abreast_cpu.py

Ten clients, in CPU time, so that other work on the machine changes little. Contenders take turns; figures are
medians. The bound `_SMALL` in `simulation/stacked.py` comes from here.
"""

import statistics
import time

import numpy as np
import torch
from round import dataset

from fedbatchnorm.simulation import models
from fedbatchnorm.simulation.recipe import Recipe
from fedbatchnorm.simulation.simulator import Simulation

CASES = [  # model, images, batch, local steps
    ("mlp", (1, 8, 8), 10, 10),
    ("mlp", (1, 8, 8), 32, 10),
    ("cnn16", (1, 8, 8), 4, 10),
    ("cnn16", (1, 8, 8), 32, 5),
    ("cnn16", (3, 32, 32), 4, 5),
    ("cnn16", (3, 32, 32), 50, 2),
]


def federation(model, shape, batch, steps, scheme, abreast):
    recipe = Recipe(
        algorithm="fedavg",
        scheme=scheme,
        lr=0.01,
        clients=10,
        batch=batch,
        local_steps=steps,
        weighting="equal",
    )
    parts = np.array_split(np.arange(2000), 10)
    return Simulation(
        models.build(model, shape, 10, seed=0), dataset(shape, 2000), parts, recipe, abreast=abreast
    )


def main():
    torch.set_num_threads(1)
    for (model, shape, batch, steps), scheme in ((case, s) for case in CASES for s in ("fbn", "naive")):
        ways = {how: federation(model, shape, batch, steps, scheme, how) for how in (False, True)}
        times = {how: [] for how in ways}
        for turn in range(6):
            for how, simulation in ways.items():
                start = time.process_time()
                simulation.round()
                if turn:  # the first one warms up
                    times[how].append(1e3 * (time.process_time() - start))
        alone, together = (statistics.median(times[how]) for how in (False, True))
        size = "x".join(map(str, shape))
        print(
            f"{model:<6} {size:<8} batches of {batch:<3} {scheme:<6} one after another {alone:7.1f} ms, "
            f"abreast {together:7.1f} ms, {together / alone:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
