"""What Flower's nodes answered: who can be used, who is left out, and why."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from logging import WARNING, getLogger
from typing import Any, NamedTuple

import numpy as np

from ..aggregation.verdicts import Reason, Verdict
from ..norm.messages import Update
from ..norm.wire import FormatError, from_bytes

try:
    from flwr.app import Array, ArrayRecord, Message, RecordDict
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

log = getLogger("flwr").log
STATISTICS = "statistics"  # the name of the record that statistics travel in, either way
CALIBRATE = "train.calibrate"  # the type of the messages of round 0
CALIBRATED = "calibrated"  # in that record: measured with plain BatchNorm, to be merged with momentum 1
MOST_STEPS = 10**6
MOST_EXAMPLES = 2**53  # beyond it a float64 no longer counts one by one


class Examined(NamedTuple):
    """By node id: replies of the right form, their updates and local steps, and verdicts on the others."""

    replies: dict[Hashable, Message]
    updates: dict[Hashable, Mapping[str, Any]]
    steps: dict[Hashable, int]
    left_out: dict[Hashable, Verdict]


class Wanted(NamedTuple):
    """What a reply is held against: the parameters that were sent (None: it has none), the metric that weighs
    it, the most that this may be, and whether it has statistics."""

    parameters: Mapping[str, Array] | None
    weight: str
    most: float = MOST_EXAMPLES
    statistics: bool = True


def examine(answers: list[Message], wanted: Wanted) -> Examined:
    """Look at each reply before any strategy does: a bad one is left out, and never an error.

    What is handed on has one form: metrics, and parameters in the order in which they were sent, in records
    named as in most replies.
    """
    found = Examined({}, {}, {}, {})
    forms = Counter(_form(message) for message in answers)
    names = Counter(name for message in answers for name in _parameter_records(message.content))
    usual, name = (counter.most_common(1)[0][0] if counter else None for counter in (forms, names))
    repeated = Counter(message.metadata.src_node_id for message in answers)
    for message in answers:
        node = message.metadata.src_node_id
        try:
            _expect(repeated[node] == 1, "duplicate", "the node has answered more than once")
            _expect(_form(message) == usual, "schema", "other metrics than in most replies")
            _check_metrics(message, wanted)
            update, steps = _read(message.content) if wanted.statistics else (Update({}), 1)
            content: dict[str, Any] = dict(message.content.metric_records)
            if wanted.parameters is not None:
                _expect(name not in content, "schema", f"metrics in a record that is called {name}")
                content[str(name)] = _parameters(message.content, wanted.parameters)
            message.content = RecordDict(content)
            found.replies[node], found.updates[node], found.steps[node] = message, update, steps
        except _LeftOutError as error:
            found.left_out[node] = error.verdict
        except Exception as error:  # whatever a client may have put into a record
            found.left_out[node] = Verdict(False, "schema", None, f"{type(error).__name__}: {error}")
    return found


def read_calibrations(answers: list[Message]) -> tuple[dict[Hashable, Update], dict[Hashable, Verdict]]:
    """Round 0: updates by node, and verdicts on replies that are no calibration or cannot be read."""
    updates: dict[Hashable, Update] = {}
    left_out: dict[Hashable, Verdict] = {}
    repeated = Counter(message.metadata.src_node_id for message in answers)
    for message in answers:
        node = message.metadata.src_node_id
        try:
            _expect(repeated[node] == 1, "duplicate", "the node has answered more than once")
            record = message.content.array_records.get(STATISTICS, {})
            _expect(CALIBRATED in record, "schema", "the reply is no calibration")
            updates[node] = _read(message.content)[0]
        except _LeftOutError as error:
            left_out[node] = error.verdict
        except Exception as error:  # whatever a client may have put into a record
            left_out[node] = Verdict(False, "schema", None, f"{type(error).__name__}: {error}")
    return updates, left_out


def sorted_out(server_round: int, replies: Iterable[Message]) -> tuple[list[Message], list[Message]]:
    """Answers and failures, not in the order in which they happen to arrive; failures are logged."""
    answers, failures = [], []
    for message in sorted(replies, key=lambda m: m.metadata.src_node_id):
        (failures if message.has_error() else answers).append(message)
    for message in failures:
        where = server_round, message.metadata.src_node_id
        log(WARNING, "round %s: node %s failed: %s", *where, message.error.reason)
    return answers, failures


def log_left_out(server_round: int, verdicts: Mapping[Hashable, Verdict]) -> None:
    """A line for each client that was left out, with the reason."""
    for node, verdict in verdicts.items():
        where = f" in layer {verdict.layer}" if verdict.layer else ""
        text = f"{verdict.reason}{where} ({verdict.detail})"
        log(WARNING, "round %s: node %s left out: %s", server_round, node, text)


def attribute(strategy: object, name: str, default: Any = None) -> Any:
    """Of the strategy, or of one that is wrapped in it."""
    while strategy is not None:
        if hasattr(strategy, name):
            return getattr(strategy, name)
        strategy = getattr(strategy, "strategy", None)
    return default


class _LeftOutError(Exception):
    """A reply that cannot be used, with the verdict that says why."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(False, reason, None, detail)


def _expect(condition: bool, reason: Reason, detail: str) -> None:
    if not condition:
        raise _LeftOutError(reason, detail)


def _parameter_records(content: RecordDict) -> dict[str, ArrayRecord]:
    return {name: record for name, record in content.array_records.items() if name != STATISTICS}


def _parameters(content: RecordDict, sent: Mapping[str, Array]) -> ArrayRecord:
    """The one record with the parameters that were sent, in their shapes, types and order, finite."""
    records = list(_parameter_records(content).values())
    _expect(len(records) == 1, "schema", f"{len(records)} records of parameters, expected 1")
    _expect(records[0].keys() == sent.keys(), "schema", "other parameters than were sent")
    for name, array in records[0].items():
        value, wanted = array.numpy(), f"{tuple(sent[name].shape)} of {sent[name].dtype}"
        form = f"{tuple(value.shape)} of {value.dtype}"
        _expect(form == wanted, "schema", f"parameter {name} is {form}, expected {wanted}")
        _expect(bool(np.isfinite(value).all()), "non_finite", f"parameter {name} is not finite")
    return ArrayRecord({name: records[0][name] for name in sent})


def _form(message: Message) -> frozenset[tuple[str, str, int | None]]:
    """A reply's metrics: in which record, under which names, a number or a list of how many."""
    return frozenset(
        (record, name, len(value) if isinstance(value, list) else None)
        for record, metrics in message.content.metric_records.items()
        for name, value in metrics.items()
    )


def _check_metrics(message: Message, wanted: Wanted) -> None:
    """One record of finite metrics, with a usable weight."""
    records = list(message.content.metric_records.values())
    _expect(len(records) == 1, "schema", f"{len(records)} records of metrics, expected 1")
    for name, value in records[0].items():
        numbers = value if isinstance(value, list) else [value]
        _expect(all(map(math.isfinite, numbers)), "non_finite", f"metric {name} is {value!r}")
    value = records[0].get(wanted.weight)
    fine = isinstance(value, int | float) and 0 < value <= wanted.most
    _expect(fine, "count_out_of_range", f"{wanted.weight} is {value!r}, allowed is up to {wanted.most:.0f}")


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
    sent = record["steps"].numpy()
    _expect(np.issubdtype(sent.dtype, np.integer) and sent.ndim == 0, "schema", "steps is no whole number")
    steps = int(sent)
    _expect(1 <= steps <= MOST_STEPS, "count_out_of_range", f"{steps} local steps")
    return update, steps
