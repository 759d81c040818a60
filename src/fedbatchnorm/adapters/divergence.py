"""An alarm for a model that diverges: then most clients fail in the same way.

A client that sends values that are not finite is left out, and the round continues with the others. If the
model itself diverges, all clients do so sooner or later, and if they were only left out, the run would end as
if it had succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from logging import ERROR
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from ..aggregation.verdicts import Verdict
from ..norm.moments import Moments, Running
from .events import Teller
from .replies import Examined, all_finite

# What a layer gets, as the median of the clients has it: the mean of squares, against its smallest so far.
# FBN as published, where it barely trains, grows a few hundredfold and stays finite.
SUSPICIOUS_GROWTH, DIVERGED_GROWTH = 1e2, 1e4
# The clients' median training loss, against that of the first round, or 1 if that is more.
SUSPICIOUS_LOSS, DIVERGED_LOSS = 10.0, 1e3
FAILURES = 2  # replies that are not finite: one alone may be a faulty client


class DivergedError(RuntimeError):
    """The model diverged and training was stopped.

    Attributes:
        round: where it began.
        good_round: the round after which the state was last known to be good; 0 is before the first.
        arrays: that state, parameters and statistics.
        gradient: the share of BatchNorm's gradient at that state; None if clients decide themselves.
    """

    def __init__(self, what: str, began: int, good: State, checkpoint: Path | None):
        """Say what was seen, where it began, and where the last good state is."""
        saved = f" and in {checkpoint}" if checkpoint else ""
        super().__init__(
            f"{what}. The last good state, after round {good.round}, is in this error's `arrays`{saved}. A "
            "smaller learning rate, fewer local steps or clipping of gradients may help"
        )
        self.round, self.good_round, self.arrays = began, good.round, good.arrays
        self.gradient = good.gradient


class NothingTrainedError(RuntimeError):
    """A run in which no round changed anything; the message has the first reason."""


class State(NamedTuple):
    """A state to which a server can return: the round, all arrays, the wrapped strategy's state, and the
    share of BatchNorm's gradient for the next round.
    """

    round: int
    arrays: Any
    strategy: Mapping[str, Any]
    gradient: float | None = None


class Watch:
    """Follows what clients report in each round, and says when the model has diverged and where it began.

    A state is good if clients have trained from it without a sign of divergence.
    """

    def __init__(self, first: State, sizes: Mapping[str, float]):
        """Begin with the state before the first round, and the size of layers' inputs there, if known."""
        self.good, self._latest = first, first
        self.began: int | None = None
        """The first of the suspicious rounds up to now; None if the last one was fine."""
        self._smallest = dict(sizes)
        self._scale: float | None = None
        self._failed = 0

    def look(
        self, server_round: int, sizes: Mapping[str, float], loss: float | None, failed: int, fine: int
    ) -> str | None:
        """Look at a round's replies; returns what is wrong if the model has diverged.

        Args:
            server_round: its number.
            sizes: layer -> the median client's input size, as `input_sizes` returns it.
            loss: the clients' median training loss, where they report one.
            failed: replies left out because something in them is not finite.
            fine: replies that are used.
        """
        most = 2 * failed > failed + fine
        self._failed = self._failed + failed if most else 0
        layer, growth = self._growth(sizes)
        if loss is not None and self._scale is None:
            self._scale = max(1.0, loss)
        times = 0.0 if loss is None or self._scale is None else loss / self._scale
        if not (most or growth > SUSPICIOUS_GROWTH or times > SUSPICIOUS_LOSS):
            self.began = None
            self.good = self._latest  # clients have trained from it, and all is well
            return None
        self.began = self.began or server_round
        if self._failed >= FAILURES:
            return f"{failed} of {failed + fine} replies are not finite"
        if growth > DIVERGED_GROWTH:
            return f"the inputs of layer {layer} are {growth:.0e} times as large (squared) as they were"
        if times > DIVERGED_LOSS:
            return f"the training loss is {loss:.3g}"
        return None

    def after(self, state: State) -> None:
        """Remember the state that a round has ended with."""
        self._latest = state

    def back(self) -> State:
        """The good state, from which training continues."""
        self._latest, self.began, self._failed = self.good, None, 0
        return self.good

    def _growth(self, sizes: Mapping[str, float]) -> tuple[str, float]:
        """The layer whose inputs have grown most, and by how much."""
        worst = ("", 0.0)
        for layer, size in sizes.items():
            least = self._smallest[layer] = min(size, self._smallest.get(layer, math.inf))
            worst = max(worst, (layer, size / least), key=lambda found: found[1])
        return worst


def alarm(
    watch: Watch,
    tell: Teller,
    number: int,
    shared: Mapping[str, Running],
    found: Examined,
    good: Collection[Hashable],
    left_out: Mapping[Hashable, Verdict],
) -> str:
    """What is wrong if a round shows that the model has diverged, which is also logged; otherwise nothing."""
    sizes = input_sizes(shared, [found.updates[client] for client in good]) if shared else {}
    losses = losses_of([found.replies[client].metrics for client in good])
    lost = sum(not all_finite(loss) for loss in losses)
    failed = lost + sum(verdict.reason == "non_finite" for verdict in left_out.values())
    finite = [loss for loss in losses if all_finite(loss)]
    wrong = watch.look(number, sizes, median(finite) if finite else None, failed, len(good) - lost)
    if wrong is None:
        return ""
    text = f"the MODEL diverged: {wrong}. It began in round {watch.began}"
    tell(number, "diverged", f"{text}; the last good state is that after round {watch.good.round}", ERROR)
    return f"round {number}: {text}"


def input_sizes(shared: Mapping[str, Running], updates: Iterable[Mapping[str, Moments]]) -> dict[str, float]:
    """Layer -> the median over clients of eps + the channels' mean of s_i^2 + u_i^2.

    The median, and not the merged statistics, because a single client may have reported false values.
    """
    found: dict[str, list[float]] = {}
    for update in updates:
        for layer, running in shared.items():
            count, mean, var = update[layer]
            if int(count):
                square: Tensor = var.double() + mean.double().square()
                found.setdefault(layer, []).append(running.eps + float(square.mean()))
    return {layer: median(sizes) for layer, sizes in found.items()}


def expected_sizes(shared: Mapping[str, Running]) -> dict[str, float]:
    """Layer -> eps + the channels' mean of v + m^2: the same from the shared statistics."""
    return {layer: r.eps + float((r.var + r.mean.square()).mean()) for layer, r in shared.items()}


def losses_of(metrics: Iterable[Mapping[str, Any]]) -> list[float]:
    """The clients' metric whose name is or ends in loss."""
    rows = list(metrics)
    names = sorted({name for row in rows for name in row if name.lower().endswith("loss")}, key=len)
    return [row[names[0]] for row in rows if names and isinstance(row.get(names[0]), int | float)]
