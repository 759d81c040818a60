"""What a server can be set to, whatever the engine; an error names the setting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from torch import nn

from ..aggregation.statistics import Aggregator
from ..norm.gradient import Limit
from ..norm.moments import settings_problem
from .events import Event
from .replies import MOST_EXAMPLES, MOST_STEPS


class Options(TypedDict, total=False):
    """The settings of federated BatchNorm at a server, the same for every engine.

    Attributes:
        model: the converted model: which arrays are statistics, and its layers' momentum and eps. Without
            it, what is called running_mean, running_var and num_batches_tracked is taken for statistics.
        momentum: of all layers, where no model is given; 0.1.
        eps: of all layers, where no model is given; 1e-5.
        aggregator: None is exact; a rule such as `defense("nnm+median", f=2)` withstands Byzantine clients.
        quorum: with fewer usable replies the round changes nothing.
        max_count: the most values per channel that an honest client can see, a number or by layer.
        max_examples: the most that an honest client's weight in training, `num-examples`, can be. Where one
            of the two is not given, a client that claims 10,000 times what the others do is left out, or 100
            times as many examples and has not seen so many.
        nonnegative: layers that follow a ReLU: a negative mean there is false.
        steps: local steps a round; what clients report if not given.
        calibrate: start from the data: a round 0 in which clients measure and nothing is learned. Only
            with fresh statistics; clients that cannot do it are passed over.
        gradient: the share of BatchNorm's gradient that clients take, sent with every request to train.
            "auto" starts at 0.8 and follows how far the statistics drift (`next_gradient`), and layers
            in which clients are alike take more (`set_gradient`); None sends neither it nor the limit,
            and clients train with what they gave `convert`.
        limit: how wide and how far away a normalized batch may come out, as for `convert`: "auto" goes
            with the share, None leaves it to the clients.
        on_divergence: when most clients' replies are not finite, or losses or activations explode, it is
            the model that diverged. "stop" raises `DivergedError`, with the last good state in it and in
            the checkpoint; "restore" continues from that state, with the largest share of the gradient
            that "auto" can take, and stops at the fourth time; "ignore" says so in the log.
        checkpoint: a file to save to after every round, and to continue from if it is there.
        on_event: called with every line of the log as an `Event`: for TensorBoard and the like.
    """

    model: nn.Module | None
    momentum: float | None
    eps: float
    aggregator: Aggregator | None
    quorum: int
    max_count: float | Mapping[str, float] | None
    max_examples: float | None
    nonnegative: Collection[str]
    steps: int | None
    calibrate: bool
    gradient: float | Literal["auto"] | None
    limit: Limit
    on_divergence: Literal["stop", "restore", "ignore"]
    checkpoint: Path | str | None
    on_event: Callable[[Event], None] | None


@dataclass(frozen=True)
class Settings:
    """`Options` with their defaults, checked."""

    model: nn.Module | None = None
    momentum: float | None = 0.1
    eps: float = 1e-5
    aggregator: Aggregator | None = None
    quorum: int = 1
    max_count: float | Mapping[str, float] | None = None
    max_examples: float | None = None
    nonnegative: Collection[str] = ()
    steps: int | None = None
    calibrate: bool = True
    gradient: float | Literal["auto"] | None = "auto"
    limit: Limit = "auto"
    on_divergence: Literal["stop", "restore", "ignore"] = "stop"
    checkpoint: Path | str | None = None
    on_event: Callable[[Event], None] | None = None

    def __post_init__(self) -> None:
        """An error names what cannot be."""
        problem = settings_problem(self.momentum, self.eps)
        if problem:
            raise ValueError(problem)
        for name, value, least, most in (
            ("steps", 1 if self.steps is None else self.steps, 1, MOST_STEPS),
            ("quorum", self.quorum, 1, MOST_EXAMPLES),
        ):
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} is {value}; it must be a whole number from {least} to {most}")
        if self.max_examples is not None and not 0 < self.max_examples <= MOST_EXAMPLES:
            raise ValueError(
                f"max_examples is {self.max_examples}; it must be from 1 to {MOST_EXAMPLES}, or None"
            )
        if self.on_divergence not in ("stop", "restore", "ignore"):
            raise ValueError(
                f"on_divergence is {self.on_divergence!r}; it must be 'stop', 'restore' or 'ignore'"
            )


def check_population(population: object, word: str) -> None:
    """A number of clients, nothing, or the word for those that an engine knows of."""
    number = isinstance(population, int) and not isinstance(population, bool) and population >= 1
    if not (number or population is None or population == word):
        raise ValueError(f"population is {population!r}; it must be a number of clients, {word!r} or None")
