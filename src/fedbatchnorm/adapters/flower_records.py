"""Translates between Flower's records and the core's arrays by name."""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from .extras import needs
from .replies import Reply
from .session import Request, Taken

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
except ImportError as error:
    raise needs("Flower", "flower", error) from error

STATISTICS = "statistics"  # the name of the record that statistics travel in, either way
GRADIENT = "fedbatchnorm"  # and of that with the share of BatchNorm's gradient and the limit
_LENGTHS = {b"\x01\x00": 2, b"\x02\x00": 4}  # version -> bytes of the number that says how long a header is
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Views(Mapping[str, np.ndarray]):
    """A record's arrays, each read in place when it is needed: read-only, not copied."""

    def __init__(self, record: Mapping[str, Array]):
        """Of this record."""
        self._record = record

    def __getitem__(self, name: str) -> np.ndarray:
        return view(self._record[name])

    def __contains__(self, name: object) -> bool:
        return name in self._record

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


class Known(Array):
    """An array that has been looked at before: `numpy` need not read its header again, and copies at once."""

    def numpy(self) -> np.ndarray:
        """The values as a copy, because the caller may write to them."""
        return view(self).copy(order="K")


def view(array: Array) -> np.ndarray:
    """The values of a Flower array in place, which `Array.numpy` would copy; an error if they are invalid."""
    if array.stype != "numpy.ndarray":
        return array.numpy()
    start = _header_ends(array.data)
    if start is None:
        return Array.numpy(array)
    shape, by_column, dtype = _parsed(array.data[:start])
    values = np.frombuffer(array.data, dtype, math.prod(shape), start)
    return values.reshape(shape, order="F" if by_column else "C")


def _header_ends(data: bytes) -> int | None:
    """Where the values begin in what `np.save` wrote; None for unknown versions of the format."""
    if data[:6] != b"\x93NUMPY" or data[6:8] not in _LENGTHS:
        return None
    size = _LENGTHS[data[6:8]]
    return 8 + size + int.from_bytes(data[8 : 8 + size], "little")


@functools.lru_cache(4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether it is stored by column, and type; the same few headers come in every reply."""
    stream = io.BytesIO(header)
    shape, by_column, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return shape, by_column, dtype


def record_of(arrays: Mapping[str, np.ndarray], known: Mapping[str, Array] | None = None) -> ArrayRecord:
    """Arrays as a record; an array that came from a record is not serialized again."""
    known, found = known or {}, {}
    for name, value in arrays.items():
        same = name in known and str(value.dtype) == known[name].dtype and _shows(known[name], value)
        found[name] = known[name] if same else Array(np.asarray(value))
    return ArrayRecord(found)


def beside(request: Request) -> dict[str, ArrayRecord | ConfigRecord]:
    """What travels beside the parameters."""
    found: dict[str, ArrayRecord | ConfigRecord] = {STATISTICS: record_of(request.statistics)}
    return found | ({GRADIENT: ConfigRecord(dict(request.settings))} if request.settings else {})


def replies_of(
    messages: Iterable[Message], trains: bool = True, sent: Iterable[Metadata] = ()
) -> list[Reply]:
    """The replies of Flower's nodes, as the core's `Reply`.

    Args:
        messages: the answers.
        trains: whether they hold parameters.
        sent: of what is answered: the SuperLink answers in its own name for a node that is gone.
    """
    messages, asked = list(messages), {to.message_id: to.dst_node_id for to in sent if to.message_id}
    answers = [message.content for message in messages if not message.has_error()]
    usual = _usual_names(answers)
    return [_reply(message, usual, trains, asked) for message in messages]


def contents_of(
    message: Message, taken: Taken, like: Iterable[str], name: str, of_metrics: str
) -> RecordDict:
    """A reply that any strategy can use: metrics, and parameters in the order in which they were sent."""
    [metrics] = message.content.metric_records.values()
    if dict(metrics) != taken.metrics[message.metadata.src_node_id]:
        metrics = MetricRecord(taken.metrics[message.metadata.src_node_id])
    content = RecordDict({of_metrics: metrics})
    for record in _parameter_records(message.content).values() if name else ():
        content[name] = known = ArrayRecord()  # which, made of a dict, would make its arrays anew
        for key in like:
            known[key] = _known(record[key])
    return content


def usual_names(messages: Iterable[Message]) -> tuple[str, str]:
    """What most replies call their record of parameters, and that of metrics."""
    return _usual_names([message.content for message in messages])


def _usual_names(answers: list[RecordDict]) -> tuple[str, str]:
    parameters = Counter(name for content in answers for name in _parameter_records(content))
    metrics = Counter(name for content in answers for name in content.metric_records)
    return tuple(c.most_common(1)[0][0] if c else "" for c in (parameters, metrics))  # pyrefly: ignore


def _reply(message: Message, usual: tuple[str, str], trains: bool, asked: Mapping[str, int]) -> Reply:
    node = message.metadata.src_node_id
    if message.has_error():
        node = asked.get(message.metadata.reply_to_message_id, node)
        return Reply(node, failure=message.error.reason or "no reason was given")
    content, problem = message.content, ""
    records, metrics = list(_parameter_records(content).values()), dict(content.metric_records)
    if len(metrics) != 1 and usual[1]:
        problem = f"{len(metrics)} records of metrics, expected 1"
    elif metrics and (usual[1] not in metrics or usual[0] in metrics):
        problem = f"metrics in a record that is called {next(iter(metrics))}, expected {usual[1]}"
    elif trains and len(records) != 1:
        problem = f"{len(records)} records of parameters, expected 1"
    row = next(iter(metrics.values()), {})
    statistics = content.array_records.get(STATISTICS)
    return Reply(
        node,
        Views(records[0]) if trains and records else None,
        dict(row),
        None if statistics is None else Views(statistics),
        problem=problem,
    )


def _known(array: Array) -> Array:
    known = Known.__new__(Known)
    vars(known).update(vars(array))
    return known


def _parameter_records(content: RecordDict) -> dict[str, ArrayRecord]:
    return {name: record for name, record in content.array_records.items() if name != STATISTICS}


def _shows(array: Array, value: np.ndarray) -> bool:
    """Whether these are the array's own values, seen where they are."""
    base = value
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base is array.data
