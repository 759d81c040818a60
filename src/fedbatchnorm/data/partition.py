"""Partitions, which say which client holds which samples: iid, gamma similarity, Dirichlet.

One table, `PARTITIONS`; a new partition is one function (labels, clients, its parameter, rng) and one row.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

_REDRAWS = 1000
Own = Callable[[np.ndarray, int, np.random.Generator], list[np.ndarray]]


def split(
    name: str | Own, labels: np.ndarray, clients: int, parameter: float | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Split samples with these labels among clients; for each the indices of its samples.

    Args:
        name: a name in `PARTITIONS`, or a function of the user's own, (labels, clients, rng) -> indices.
        labels: (N,).
        clients: how many.
        parameter: gamma or alpha; None if the partition has none.
        rng: all that is drawn comes from it.
    """
    if callable(name):
        return _checked(name(labels, clients, rng), labels, clients)
    if name not in PARTITIONS:
        raise ValueError(f"partition {name!r} is not known; choose from {', '.join(PARTITIONS)}")
    if not 1 <= clients <= len(labels):
        raise ValueError(f"clients is {clients}; it must be between 1 and {len(labels)}, one sample for each")
    arguments = () if PARTITIONS[name].parameter is None else (parameter,)
    return PARTITIONS[name].split(labels, clients, *arguments, rng)


def _checked(parts: Iterable[Any], labels: np.ndarray, clients: int) -> list[np.ndarray]:
    """What a function of the user's own returned; an error names the client."""
    found = [np.asarray(part) for part in parts]
    if len(found) != clients:
        raise ValueError(f"the partition gave {len(found)} parts for {clients} clients")
    for i, part in enumerate(found):
        if part.ndim != 1 or not len(part) or not np.issubdtype(part.dtype, np.integer):
            raise ValueError(f"the partition gave client {i} no list of indices: {part.dtype} {part.shape}")
        if part.min() < 0 or part.max() >= len(labels):
            raise ValueError(f"the partition gave client {i} an index that is not in 0 to {len(labels) - 1}")
    return found


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

    The smaller alpha, the fewer clients share a class. If a client gets nothing, the draw is repeated, at
    most a thousand times.
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


def test_parts(labels_test: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """For each client, test samples in the proportions of classes that it trains on.

    As many for each client as the smallest class of the test set has, so that any proportions can be
    had, rounded by largest remainders. Drawn without replacement; clients may share samples.

    Args:
        labels_test: (N,), the classes of the test set.
        held: (clients, classes), how many training samples of each class each client holds.
        rng: all that is drawn comes from it.

    Returns:
        For each client the indices of its test samples, class by class.

    Example:
        >>> parts = test_parts(np.array([0, 1, 0, 1]), np.array([[9, 0], [5, 5]]), np.random.default_rng(0))
        >>> [np.array([0, 1, 0, 1])[part].tolist() for part in parts]
        [[0, 0], [0, 1]]
    """
    classes = held.shape[1]
    there = np.bincount(labels_test, minlength=classes)
    if len(there) > classes:
        raise ValueError(
            f"the test set has the class {len(there) - 1}; held has columns for 0 to {classes - 1}"
        )
    missing = np.flatnonzero((held.sum(0) > 0) & (there == 0))
    if len(missing):
        raise ValueError(
            f"the test set has no sample of class {', '.join(map(str, missing))}, on which clients train: "
            "take a test set that has all classes"
        )
    totals = held.sum(1)
    if not totals.all():
        raise ValueError(f"client {np.argmin(totals)} holds no sample: give every client one at least")
    size = there[there > 0].min()
    by_class = [np.flatnonzero(labels_test == label) for label in range(classes)]
    parts = []
    for row, total in zip(held, totals, strict=True):
        wanted, remainder = np.divmod(row * size, total)
        wanted[np.argsort(-remainder, kind="stable")[: size - wanted.sum()]] += 1
        drawn = [rng.permutation(c)[:count] for c, count in zip(by_class, wanted, strict=True)]
        parts.append(np.concatenate(drawn))
    return parts


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
