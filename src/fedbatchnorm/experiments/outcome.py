"""How a run ended, as text."""

import math
from typing import Any

from ..data.datasets import DATASETS
from .config import Run
from .results import Result

_CLASSES = 10  # of each of the package's datasets
_FAR = 10.0  # times the loss of a guess: a training loss beyond it has run away


def divergence(result: Result) -> str:
    """Why a run counts as diverged; empty if it does not.

    It does if it ends at chance level, and its loss is not finite or its training loss is above 10 ln C, ten
    times that of a guess among C classes. Chance level is the share of the largest class. If the classes were
    not recorded, a loss that is not finite is enough.
    """
    run, rows = result.config, result.metrics
    if not isinstance(run, Run) or not rows:
        return ""
    classes, chance = _chance(run, result.holdings)
    last, accuracy = rows[-1], result.summary["accuracy"]
    if chance is not None and accuracy > 1.1 * chance + 0.01:
        return ""
    lost = _not_finite(last)
    far = (
        classes is not None and not lost and (last.get("train_loss") or 0) > _FAR * math.log(max(classes, 2))
    )
    if not lost and not far:
        return ""
    first = rows[-1]["round"]
    for row in reversed(rows):
        if _not_finite(row) != lost or (far and row["train_loss"] <= _FAR * math.log(max(classes or 0, 2))):
            break
        first = row["round"]
    loss = "the loss is not finite" if lost else f"the training loss is {last['train_loss']:.3g}"
    where = "" if chance is None else f", which is chance (the largest class is {100 * chance:.0f}%)"
    return f"diverged: accuracy {100 * accuracy:.1f}%{where}, and {loss} from round {first} on"


def _not_finite(row: dict[str, Any]) -> bool:
    """Whether a loss is not finite, which is null in files."""
    values = [row[name] for name in ("loss", "train_loss") if name in row]
    return any(value is None or not math.isfinite(value) for value in values)


def _chance(run: Run, holdings: dict[str, Any] | None) -> tuple[int | None, float | None]:
    """How many classes there are, and the share of the largest."""
    if holdings is not None:
        counts = [sum(column) for column in zip(*holdings["samples"], strict=True)]
        return len(counts), max(counts) / max(1, sum(counts))
    known = run.dataset in DATASETS and run.part("dataset") is None
    return (_CLASSES, 1 / _CLASSES) if known else (None, None)
