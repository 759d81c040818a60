"""The settings of a server, for any engine; an error names the setting."""

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
        model: the converted model. It says which arrays are statistics, and gives its layers' momentum and
            eps. Without it, arrays named running_mean, running_var and num_batches_tracked are the
            statistics.
        momentum: of all layers, if no model is given; 0.1 by default.
        eps: of all layers, if no model is given; 1e-5 by default.
        aggregator: None is exact; a rule such as `defense("nnm+median", f=2)` withstands Byzantine clients.
        quorum: with fewer usable replies the round changes nothing.
        max_count: the most values per channel that an honest client can see, a number or by layer.
        max_examples: the largest weight of an honest client in training, `num-examples`. If `max_count` or
            `max_examples` is not given, a client is left out that claims 10,000 times as much as the others,
            or 100 times as many examples without having seen them.
        nonnegative: layers that follow a ReLU: a negative mean there is false.
        steps: local steps a round; by default what clients report.
        calibrate: start with a round 0 in which clients measure without training. Only if the model's
            statistics are those of new layers. Clients that cannot calibrate are skipped.
        gradient: the share of BatchNorm's gradient that clients use, sent with every request to train. "auto"
            starts at 0.8 and follows the drift of the statistics (`next_gradient`); layers in which clients
            are alike use more (`set_gradient`). With None neither the share nor the limit is sent, and
            clients train with the arguments of their own `convert`.
        limit: the largest deviation of a normalized batch, as in `convert`. "auto" depends on the share; None
            leaves it to the clients.
        on_divergence: what to do if the model diverges: if most clients' replies are not finite, or losses or
            activations explode. "stop" raises `DivergedError`, which has the last good state, as the
            checkpoint does. "restore" continues from that state with the largest share of the gradient that
            "auto" can reach, and stops at the fourth time. "ignore" only logs it.
        checkpoint: a file that is saved after every round, and from which a run continues if it exists.
        on_event: called with every line of the log as an `Event`, for example for TensorBoard.
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
        """Check the settings; an error names the one that is wrong."""
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
    """Check a population: a number of clients, None, or the engine's word for the connected ones."""
    number = isinstance(population, int) and not isinstance(population, bool) and population >= 1
    if not (number or population is None or population == word):
        raise ValueError(f"population is {population!r}; it must be a number of clients, {word!r} or None")
