"""Clients' replies: which are used, which are left out, and why."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..aggregation.verdicts import Reason, Verdict
from ..norm.messages import Update
from ..norm.wire import FormatError, from_bytes
from .arrays import as_numpy, is_finite

CALIBRATED = "calibrated"  # among the statistics: measured with plain BatchNorm, to be merged with momentum 1
MOST_STEPS = 10**6
MOST_EXAMPLES = 2**53  # beyond it a float64 no longer counts one by one
# What a weight and a count may be, against the median of the other clients', where no limit is set.
UNBACKED, IMPOSSIBLE = 100, 10_000
_EMPTY = Verdict(False, "empty", None, "it has trained on nothing")


class Reply(NamedTuple):
    """What a client answered.

    Attributes:
        client: its id.
        parameters: name -> array or tensor; each is read once.
        metrics: name -> number or list of numbers, with the weight among them.
        statistics: what the client's `Answer.statistics` was.
        failure: why the client failed; then there is nothing else.
        problem: why the engine cannot read the reply: it is left out as `schema`.
    """

    client: Hashable
    parameters: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] = {}
    statistics: Mapping[str, Any] | None = None
    failure: str = ""
    problem: str = ""


class Examined(NamedTuple):
    """By client: usable replies, their updates and local steps, and verdicts on the others."""

    replies: dict[Hashable, Reply]
    updates: dict[Hashable, Mapping[str, Any]]
    steps: dict[Hashable, int]
    left_out: dict[Hashable, Verdict]


class Wanted(NamedTuple):
    """What a reply is compared with: the parameters that were sent (None: it has none), the metric that is
    its weight, the largest weight (None: judged by the others and the counts), whether it has statistics, and
    whether the server limits their counts by itself.
    """

    parameters: Mapping[str, np.ndarray] | None
    weight: str
    most: float | None = None
    statistics: bool = True
    limited: bool = False


class _LeftOutError(Exception):
    """A reply that cannot be used, with the verdict that says why."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(False, reason, None, detail)


def examine(answers: list[Reply], wanted: Wanted) -> Examined:
    """Check each reply before it is used: an unusable one is left out and never raises an error."""
    found = Examined({}, {}, {}, {})
    forms = Counter(map(_form, answers))
    usual = forms.most_common(1)[0][0] if forms else None
    for reply, verdict in _each(answers):
        try:
            if verdict is not None:
                raise _LeftOutError(verdict.reason or "schema", verdict.detail)
            _expect(_form(reply) == usual, "schema", "other metrics than in most replies")
            weight = _weight(reply, wanted)
            update, steps = _read(reply.statistics) if wanted.statistics else (Update({}), 1)
            if wanted.parameters is not None:
                _check_parameters(reply.parameters, wanted.parameters)
            if weight == 0 or steps == 0:
                found.left_out[reply.client] = _EMPTY
                continue
            found.replies[reply.client], found.updates[reply.client] = reply, update
            found.steps[reply.client] = steps
        except _LeftOutError as error:
            found.left_out[reply.client] = error.verdict
        except Exception as error:  # whatever a client may have put into a record
            found.left_out[reply.client] = _unreadable(error)
    _compare(found, wanted)
    return found


def read_calibrations(answers: list[Reply]) -> tuple[dict[Hashable, Update], dict[Hashable, Verdict]]:
    """Round 0: updates by client, and verdicts on replies that are not calibrations or cannot be read."""
    updates: dict[Hashable, Update] = {}
    left_out: dict[Hashable, Verdict] = {}
    for reply, verdict in _each(answers):
        try:
            if verdict is not None:
                raise _LeftOutError(verdict.reason or "schema", verdict.detail)
            _expect(CALIBRATED in (reply.statistics or {}), "schema", "the reply is no calibration")
            updates[reply.client] = _read(reply.statistics)[0]
        except _LeftOutError as error:
            left_out[reply.client] = error.verdict
        except Exception as error:  # whatever a client may have put into a record
            left_out[reply.client] = _unreadable(error)
    return updates, left_out


def finite_metrics(
    replies: Mapping[Hashable, Reply], weight: str
) -> tuple[dict[Hashable, dict[str, Any]], dict[str, list[Hashable]]]:
    """Metrics in which everything is finite, and by metric the clients whose number was not.

    Such a number is replaced by the weighted mean of the others, so that an average over all clients is
    theirs. A metric that is finite for no client is left out.
    """
    rows = {client: dict(reply.metrics) for client, reply in replies.items()}
    odd: dict[str, list[Hashable]] = {}
    for name in list(next(iter(rows.values()), {})):
        bad = [client for client, row in rows.items() if not all_finite(row[name])]
        if not bad:
            continue
        odd[name] = bad
        good = {client: row for client, row in rows.items() if client not in bad}
        total = math.fsum(row[weight] for row in good.values())
        for client, row in rows.items():
            if not good:
                del row[name]
            elif client in bad:
                means = [
                    math.fsum(r[weight] * _numbers(r[name])[i] for r in good.values()) / total
                    for i in range(len(_numbers(row[name])))
                ]
                row[name] = means if isinstance(row[name], list) else means[0]
    return rows, odd


def is_usable(value: Any) -> bool:
    """Whether this is a number, or a list of numbers, as metrics are."""
    return isinstance(value, int | float) or (
        isinstance(value, list) and all(isinstance(v, int | float) for v in value)
    )


def _each(answers: Iterable[Reply]) -> Iterable[tuple[Reply, Verdict | None]]:
    """Replies, with a verdict on those that came more than once or that the engine could not read."""
    answers = list(answers)
    repeated = Counter(reply.client for reply in answers)
    for reply in answers:
        if repeated[reply.client] > 1:
            yield reply, Verdict(False, "duplicate", None, "it has answered more than once")
        else:
            yield reply, Verdict(False, "schema", None, reply.problem) if reply.problem else None


def _expect(condition: bool, reason: Reason, detail: str) -> None:
    if not condition:
        raise _LeftOutError(reason, detail)


def _unreadable(error: Exception) -> Verdict:
    return Verdict(False, "schema", None, f"it cannot be read: {type(error).__name__}: {error}"[:300])


def _check_parameters(found: Mapping[str, Any] | None, sent: Mapping[str, np.ndarray]) -> None:
    """The parameters that were sent, in their shapes and types, finite."""
    if found is None:
        raise _LeftOutError("schema", "no parameters in the reply")
    for name in sent:
        _expect(name in found, "schema", f"parameter {name} is missing")
    for name in found:
        _expect(name in sent, "schema", f"parameter {name[:200]} was not sent, and is not averaged")
    for name, like in sent.items():
        value = as_numpy(found[name], f"parameter {name}")
        if value.shape != like.shape or value.dtype != like.dtype:
            detail = f"{value.shape} of {value.dtype}, expected {like.shape} of {like.dtype}"
            raise _LeftOutError("schema", f"parameter {name} is {detail}")
        if not is_finite(value):
            raise _LeftOutError("non_finite", f"parameter {name} is not finite")


def _form(reply: Reply) -> frozenset[tuple[str, int | None]]:
    """A reply's metrics: under which names, a number or a list of how many."""
    return frozenset(
        (name, len(value) if isinstance(value, list) else None) for name, value in reply.metrics.items()
    )


def _weight(reply: Reply, wanted: Wanted) -> float:
    """The reply's weight; metrics that are not numbers are refused."""
    for name, value in reply.metrics.items():
        _expect(is_usable(value), "schema", f"metric {name} is a {type(value).__name__}, expected a number")
    value, most = reply.metrics.get(wanted.weight), MOST_EXAMPLES if wanted.most is None else wanted.most
    _expect(
        value is not None,
        "count_out_of_range",
        f"no metric {wanted.weight}, which says how much the reply weighs",
    )
    fine = isinstance(value, int | float) and 0 <= value <= most
    _expect(fine, "count_out_of_range", f"{wanted.weight} is {value!r}, allowed is up to {most:.0f}")
    return float(value)  # pyrefly: ignore


def _compare(found: Examined, wanted: Wanted) -> None:
    """Without a limit, leave out clients that claim far more weight than the others.

    A client may hold a hundred times as much as others. If it claims more, its layers must have seen it,
    because every example gives a layer at least one value. Ten thousand times as much is never accepted.
    """
    claims = {client: float(reply.metrics[wanted.weight]) for client, reply in found.replies.items()}
    seen = {c: max((float(m.count) for m in u.values()), default=0.0) for c, u in found.updates.items()}
    backed = wanted.weight != "num-examples"  # another weight says nothing about what was seen
    for what, values, limit in (
        (wanted.weight, claims, wanted.most is not None),
        ("the count of a layer", seen, wanted.limited),
    ):
        ordered = sorted(v for v in values.values() if v > 0)
        for client, value in values.items() if not limit and len(ordered) > 1 else ():
            times = value / _median_of_others(ordered, value)
            unbacked = not backed and 0 < seen[client] < value
            if times > IMPOSSIBLE or (times > UNBACKED and unbacked):
                detail = f"{what} is {value:.0f}, {times:.0f} times that of the others: if that can be, set "
                detail += "the server's max_examples and max_count"
                found.left_out[client] = Verdict(False, "count_out_of_range", None, detail)
    for client in found.left_out:
        for rows in (found.replies, found.updates, found.steps):
            rows.pop(client, None)


def _median_of_others(ordered: list[float], value: float) -> float:
    """The median of a sorted list without one of these values."""
    at, n = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[i + (i >= at)] for i in ((n - 1) // 2, n // 2))
    return (low + high) / 2


def _numbers(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def all_finite(value: Any) -> bool:
    """Whether a metric is."""
    return all(map(math.isfinite, _numbers(value)))


def _read(sent: Mapping[str, Any] | None) -> tuple[Update, int]:
    """A client's update and its steps."""
    if not sent or "update" not in sent:
        raise _LeftOutError("schema", NO_STATISTICS)
    try:
        update = from_bytes(as_numpy(sent["update"], "update").tobytes())
    except FormatError as error:
        raise _LeftOutError("schema", str(error)) from error
    if not isinstance(update, Update):
        raise _LeftOutError("schema", "statistics in place of an update")
    steps = as_numpy(sent["steps"], "steps")
    _expect(np.issubdtype(steps.dtype, np.integer) and steps.ndim == 0, "schema", "steps is no whole number")
    _expect(0 <= int(steps) <= MOST_STEPS, "count_out_of_range", f"{int(steps)} local steps")
    return update, int(steps)


NO_STATISTICS = "no statistics in the reply: the client's model must be converted, and answer with `reply`"
