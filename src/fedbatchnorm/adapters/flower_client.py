"""The client's side of federated BatchNorm on Flower: what to load, and what to reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from logging import WARNING, getLogger
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from . import client
from .arrays import unwrapped
from .client import Answer
from .extras import needs
from .flower_records import GRADIENT, STATISTICS, record_of

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
except ImportError as error:
    raise needs("Flower", "flower", error) from error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = getLogger("flwr").log
_aside: ContextVar[dict[str, ArrayRecord] | None] = ContextVar("statistics", default=None)
_share_aside: ContextVar[ConfigRecord | None] = ContextVar("gradient", default=None)
_UNWRAPPED = (
    "the message has no record 'statistics': wrap the server's strategy in FederatedBatchNormStrategy. A "
    "strategy that is not wrapped refuses what `reply` answers, and the run ends with an error"
)


class _Sent(NamedTuple):
    parameters: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]
    settings: Mapping[str, object]


def load(model: nn.Module, message: Message) -> None:
    """Load the server's parameters and statistics into a client's converted model.

    This includes the share of BatchNorm's gradient and the limit, if the server sends them.

    Args:
        model: what `convert` returned.
        message: the message that the client app received, for training or for evaluation.
    """
    client.load(model, _sent(message))


def reply(
    model: nn.Module,
    message: Message,
    metrics: Mapping[str, int | float | list[int] | list[float]],
    *,
    steps: int = 1,
    arrays: str = "arrays",
    group: ProcessGroup | None = None,
) -> Message:
    """A client's reply: parameters, what its layers have seen since `load`, and metrics.

    Args:
        model: the converted model, after local training.
        message: what is answered.
        metrics: metrics, including the weight that the strategy uses: `num-examples` by default.
        steps: optimizer steps since `load`; 0 if there was no batch: the server then ignores the reply.
        arrays: the name of the record of parameters.
        group: of a client that trains on several devices; see `collect`.
    """
    names = client.parameters_of(unwrapped(model)).keys()
    same = (sent for sent in message.content.array_records.values() if sent.keys() == names)
    answer = client.answer(model, steps=steps, like=next(same, None), group=group)
    content = {arrays: ArrayRecord(answer.parameters), "metrics": MetricRecord(dict(metrics))}
    return _answer(message, content, answer)


def calibrate(
    model: nn.Module, message: Message, batches: Iterable[Tensor], *, group: ProcessGroup | None = None
) -> Message:
    """A client's reply to round 0: the moments of a pass with plain BatchNorm, without training.

        @app.train("calibrate")
        def measure(message, context):
            return calibrate(fbn.convert(Net()), message, (x for x, _ in loader))

    Args:
        model: the converted model; the message is loaded into it.
        message: what is answered.
        batches: inputs of the model, on its device: an epoch, or a few of its batches.
        group: of a client that trains on several devices; see `collect`.
    """
    return _answer(message, {}, client.measure(model, _sent(message), batches, group=group))


def statistics_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A mod for a ClientApp that hides federated BatchNorm's records from the mods after it.

    Mods such as `fixedclipping_mod` expect exactly one record of arrays and one of settings:
    `@app.train(mods=[statistics_mod, fixedclipping_mod])`.
    """
    if STATISTICS not in message.content.array_records:
        return call_next(message, context)
    aside = {STATISTICS: message.content.array_records[STATISTICS]}
    share = message.content.config_records.get(GRADIENT)
    message.content = RecordDict(
        {k: v for k, v in message.content.items() if k not in (STATISTICS, GRADIENT)}
    )
    sent, token, of_share = aside[STATISTICS], _aside.set(aside), _share_aside.set(share)
    try:
        answer = call_next(message, context)
    finally:
        _aside.reset(token)
        _share_aside.reset(of_share)
    if not answer.has_error() and aside[STATISTICS] is not sent:
        answer.content[STATISTICS] = aside[STATISTICS]
    return answer


def _sent(message: Message) -> _Sent:
    """The content of a message, with what `statistics_mod` hides."""
    records = dict(message.content.array_records) | (_aside.get() or {})
    if STATISTICS not in records:
        log(WARNING, _UNWRAPPED)
    state: dict[str, Tensor] = {}
    for record in records.values():
        state |= record.to_torch_state_dict()
    settings = message.content.config_records.get(GRADIENT) or _share_aside.get() or {}
    return _Sent(state, {}, settings)


def _answer(message: Message, content: dict[str, Any], answer: Answer) -> Message:
    aside = _aside.get()
    (content if aside is None else aside)[STATISTICS] = record_of(answer.statistics)
    return Message(content=RecordDict(content), reply_to=message)
