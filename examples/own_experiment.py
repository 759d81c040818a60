"""A scheme, a dataset and a partition of one's own, beside two schemes of the package: a table and a plot."""

import numpy as np
import torch

from fedbatchnorm import experiments as fx


def shards(labels, clients, rng, each=2):
    """Every client holds `each` pieces of the samples sorted by class."""
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * each)
    return [np.concatenate(pieces[i::clients]) for i in range(clients)]


y = torch.arange(1200) % 4
x = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0)) + 4 * torch.stack([y % 2, y // 2], 1)
pooled = fx.scheme("pooled", fx.with_own_batch, fx.merge_exactly, title="Own batch, merged exactly")

results = fx.sweep(
    scheme=["fbn", "naive", pooled], seed=range(2), dataset=fx.dataset("four_clouds", (x, y)),
    partition=fx.partition("shards", shards)(each=1), clients=4, rounds=60, out="own_runs",
)  # fmt: skip
print(results)
results.to_csv("own_experiment.csv")
curves = results.curves().pivot_table(index="round", columns="scheme", values="accuracy")
curves.plot(ylabel="test accuracy", ylim=(0, 1)).figure.savefig("own_experiment.png")
