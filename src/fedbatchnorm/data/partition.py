"""Which client holds which samples: iid, gamma similarity, Dirichlet.

One table, `PARTITIONS`; a new partition is one function (labels, clients, its parameter, rng) and one row.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_REDRAWS = 1000


def split(
    name: str, labels: np.ndarray, clients: int, parameter: float | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Split samples with these labels among clients; for each the indices of its samples.

    Args:
        name: a name in `PARTITIONS`.
        labels: (N,).
        clients: how many.
        parameter: gamma or alpha; None where the partition has none.
        rng: all that is drawn comes from it.
    """
    if name not in PARTITIONS:
        raise ValueError(f"partition {name!r} is not known; choose from {', '.join(PARTITIONS)}")
    if not 1 <= clients <= len(labels):
        raise ValueError(f"clients is {clients}; it must be between 1 and {len(labels)}, one sample for each")
    arguments = () if PARTITIONS[name].parameter is None else (parameter,)
    return PARTITIONS[name].split(labels, clients, *arguments, rng)


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Split at random into parts of equal size, within one sample."""
    return np.array_split(rng.permutation(len(labels)), clients)


def gamma_similarity(
    labels: np.ndarray, clients: int, gamma: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """A share gamma of the samples at random, the rest sorted by label and split in sequence (section 4).

    Client i gets part i of the one and chunk i of the other: disjoint, of equal size within one sample.
    gamma = 1 is iid; at gamma = 0, with as many clients as equally large classes, each holds one class.

    Example:
        >>> parts = gamma_similarity(np.array([1, 0, 1, 0]), 2, 0.0, np.random.default_rng(0))
        >>> [sorted(part.tolist()) for part in parts]
        [[1, 3], [0, 2]]
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be between 0 (each client its own classes) and 1 (iid)")
    order = rng.permutation(len(labels))
    shared, rest = np.split(order, [int(gamma * len(labels))])
    rest = rest[np.argsort(labels[rest], kind="stable")]
    # The larger parts of the one go with the smaller chunks of the other, so that sizes stay within one.
    parts, chunks = np.array_split(shared, clients), np.array_split(rest, clients)
    return [np.concatenate(pair) for pair in zip(parts[::-1], chunks, strict=True)]


def dirichlet(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Each class split among the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    The smaller alpha, the fewer clients share a class. A draw that leaves a client with nothing is
    drawn again, a thousand times at most.
    """
    if not 0 < alpha < np.inf:
        raise ValueError(
            f"alpha is {alpha}; it must be positive (0.1 is strongly heterogeneous, 10 nearly iid)"
        )
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_REDRAWS):
        shares = [rng.dirichlet(np.full(clients, alpha)) for _ in by_class]
        cuts = [(np.cumsum(s)[:-1] * len(c)).astype(int) for s, c in zip(shares, by_class, strict=True)]
        sizes = sum(np.diff(cut, prepend=0, append=len(c)) for cut, c in zip(cuts, by_class, strict=True))
        if np.min(sizes) > 0:
            split = [np.split(rng.permutation(c), cut) for c, cut in zip(by_class, cuts, strict=True)]
            return [np.concatenate(pieces) for pieces in zip(*split, strict=True)]
    raise ValueError(
        f"in {_REDRAWS} draws, Dirichlet({alpha}) always left one of {clients} clients without a sample: "
        "take a larger alpha or fewer clients"
    )


def holdings(labels: np.ndarray, parts: list[np.ndarray], classes: int) -> np.ndarray:
    """How many samples of each class each client holds, (clients, classes)."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


class Partition(NamedTuple):
    """A way to split data: its function, the name of its parameter if it has one, and what it does."""

    split: Callable[..., list[np.ndarray]]
    parameter: str | None
    summary: str


PARTITIONS = {
    "iid": Partition(iid, None, "at random, equal sizes"),
    "gamma": Partition(gamma_similarity, "gamma", "a share gamma at random, the rest sorted by label"),
    "dirichlet": Partition(dirichlet, "alpha", "each class in proportions from Dirichlet(alpha)"),
}
