"""What Flower's nodes answered: who can be used, who is left out, and why."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..aggregation.verdicts import Reason, Verdict
from ..norm.messages import Update
from ..norm.wire import FormatError, from_bytes

try:
    from flwr.app import Array, Message, RecordDict
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

STATISTICS = "statistics"  # the name of the record that statistics travel in, either way
MOST_STEPS = 10**6


class Examined(NamedTuple):
    """By node id: updates and local steps of replies of the right form, and verdicts on the others."""

    updates: dict[Hashable, Mapping[str, Any]]
    steps: dict[Hashable, int]
    left_out: dict[Hashable, Verdict]


def examine(answers: list[Message], sent: Mapping[str, Array], weight: str, has_statistics: bool) -> Examined:
    """Look at each reply before any strategy does: a bad one is left out, and never an error.

    Args:
        answers: the nodes' replies, those with errors apart.
        sent: the parameters that the nodes were sent.
        weight: the metric that replies are weighted by.
        has_statistics: whether the model has layers with statistics.
    """
    found = Examined({}, {}, {})
    keys = Counter(_metric_keys(message) for message in answers)
    usual = keys.most_common(1)[0][0] if keys else frozenset()
    repeated = Counter(message.metadata.src_node_id for message in answers)
    for message in answers:
        node = message.metadata.src_node_id
        try:
            _expect(repeated[node] == 1, "duplicate", "the node has answered more than once")
            _check_parameters(message.content, sent)
            _check_metrics(message, weight, usual)
            update, steps = _read(message.content) if has_statistics else (Update({}), 1)
            found.updates[node], found.steps[node] = update, steps
        except _LeftOutError as error:
            found.left_out[node] = error.verdict
        except Exception as error:  # whatever a client may have put into a record
            found.left_out[node] = Verdict(False, "schema", None, f"{type(error).__name__}: {error}")
    return found


class _LeftOutError(Exception):
    """A reply that cannot be used, with the verdict that says why."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(False, reason, None, detail)


def _expect(condition: bool, reason: Reason, detail: str) -> None:
    if not condition:
        raise _LeftOutError(reason, detail)


def _check_parameters(content: RecordDict, sent: Mapping[str, Array]) -> None:
    """One record with the parameters that were sent, in their shapes and types, finite."""
    records = [record for name, record in content.array_records.items() if name != STATISTICS]
    _expect(len(records) == 1, "schema", f"{len(records)} records of parameters, expected 1")
    _expect(records[0].keys() == sent.keys(), "schema", "other parameters than were sent")
    for name, array in records[0].items():
        value, wanted = array.numpy(), f"{tuple(sent[name].shape)} of {sent[name].dtype}"
        form = f"{tuple(value.shape)} of {value.dtype}"
        _expect(form == wanted, "schema", f"parameter {name} is {form}, expected {wanted}")
        _expect(bool(np.isfinite(value).all()), "non_finite", f"parameter {name} is not finite")


def _check_metrics(message: Message, weight: str, usual: frozenset[str]) -> None:
    """One record of metrics with the names that most replies have, and a usable weight."""
    _expect(len(message.content.metric_records) == 1, "schema", "expected one record of metrics")
    _expect(_metric_keys(message) == usual, "schema", "other metrics than in most replies")
    value = next(iter(message.content.metric_records.values())).get(weight)
    fine = isinstance(value, int | float) and math.isfinite(value) and value > 0
    _expect(fine, "count_out_of_range", f"{weight} is {value!r}, not a positive number")


def _read(content: RecordDict) -> tuple[Update, int]:
    """A client's update and its steps."""
    _expect(STATISTICS in content.array_records, "schema", "no statistics in the reply")
    record = content.array_records[STATISTICS]
    try:
        update = from_bytes(record["update"].numpy().tobytes())
    except FormatError as error:
        raise _LeftOutError("schema", str(error)) from error
    if not isinstance(update, Update):
        raise _LeftOutError("schema", "statistics in place of an update")
    steps = int(record["steps"].numpy())
    _expect(1 <= steps <= MOST_STEPS, "count_out_of_range", f"{steps} local steps")
    return update, steps


def _metric_keys(message: Message) -> frozenset[str]:
    return frozenset(name for record in message.content.metric_records.values() for name in record)
