"""Normalization alone, without learning: the paper's Gaussian ring (section 3, figures 1 and 2)."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ..data.datasets import ring_points
from ..norm.moments import Running
from .recipe import torch_seed
from .rules import Must, checked
from .schemes import PAPER, SCHEMES


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One scheme on the ring: every client normalizes a fresh batch of its points in every round."""

    scheme: str = "fbn"
    """What clients normalize with, and what they share."""
    gamma: Annotated[float, Must("between 0 (each client its own classes) and 1 (iid)", ge=0, le=1)] = 0.0
    """The probability of a point to be of any class; otherwise it is of its client's own."""
    clients: Annotated[int, Must("at least 1", ge=1)] = 10
    """How many clients; client i has class i."""
    points: Annotated[int, Must("at least 2", ge=2)] = 30
    """Points a client draws in a round."""
    rounds: Annotated[int, Must("at least 1", ge=1)] = 100
    """How many rounds."""
    beta: Annotated[float, Must("above 0 and at most 1", gt=0, le=1)] = 0.1
    """Momentum of the running statistics."""
    switch: Annotated[int | None, Must("a step from 0 on, or nothing for half of the rounds", ge=0)] = None
    """The round at which FixBN freezes its statistics; half of the rounds if not given."""
    seed: Annotated[int, Must("a whole number from 0 on", ge=0)] = 0
    """Of the points."""

    def __post_init__(self):
        vars(self).update(checked(self))
        if self.scheme not in PAPER:
            raise ValueError(f"scheme is {self.scheme!r}; on the ring it must be one of {', '.join(PAPER)}")

    def identity(self) -> dict[str, object]:
        """The fields that determine the result."""
        fields = dict(vars(self))
        fields["switch"] = self.switch_step() if self.scheme == "fixbn" else None
        return fields

    def switch_step(self) -> int:
        """The round at which FixBN freezes its statistics."""
        return self.rounds // 2 if self.switch is None else self.switch


class RingResult(NamedTuple):
    """What came out: the distance in each round, the last round's points, and the running statistics.

    distance: (rounds,), mean Euclidean distance of the normalized points from the centralized ones.
    points, normalized, centralized: (clients, points, 2); labels: (clients, points).
    mean, var: (2,).
    """

    distance: Tensor
    points: Tensor
    labels: Tensor
    normalized: Tensor
    centralized: Tensor
    mean: Tensor
    var: Tensor


def normalize_ring(config: Ring) -> RingResult:
    """Run a scheme and centralized BatchNorm on the same points, side by side.

    Example:
        >>> far, near = (normalize_ring(Ring(scheme=s, rounds=20)).distance[-1] for s in ("naive", "fbn"))
        >>> bool(near < far)
        True
    """
    generator = torch.Generator().manual_seed(torch_seed(config.seed, "batches"))
    scheme, central = SCHEMES[config.scheme], SCHEMES["centralized"].before
    running = Running(torch.zeros(2), torch.ones(2), momentum=config.beta)
    distance = []
    for step in range(config.rounds):
        points, labels = ring_points(config.clients, config.points, config.gamma, generator)
        x = points.flatten(0, 1)
        centralized, _ = central.normalize(x, running)
        phase = scheme.phase(step, config.switch_step())
        normalized, seen = phase.normalize(x, running, clients=1 if phase.union else config.clients)
        if phase.share is not None and seen is not None:
            running = phase.share(running, seen)
        distance.append((normalized - centralized).norm(dim=1).mean())
    normalized, centralized = normalized.view_as(points), centralized.view_as(points)
    distances = torch.stack(distance)
    return RingResult(distances, points, labels, normalized, centralized, running.mean, running.var)


def separability(points: Tensor, labels: Tensor) -> float:
    """The share of points whose nearest class center is that of their own class: 1 if classes lie apart.

    Args:
        points: (..., 2).
        labels: (...).
    """
    points, labels = points.flatten(0, -2), labels.flatten()
    classes = labels.unique()
    centers = torch.stack([points[labels == c].mean(0) for c in classes])
    nearest = classes[torch.cdist(points, centers).argmin(1)]
    return (nearest == labels).double().mean().item()
