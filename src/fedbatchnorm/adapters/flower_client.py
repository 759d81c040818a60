"""A client's side of federated BatchNorm on Flower: what to load, and what to answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..norm.calibrate import calibrating
from ..norm.exchange import collect, load_statistics, statistics
from ..norm.wire import to_bytes
from .arrays import parameters_of, unwrapped
from .replies import CALIBRATED, STATISTICS
from .share import GRADIENT, apply

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
except ImportError as error:
    raise ImportError(f"this needs Flower ({error}): pip install 'fedbatchnorm[flower]'") from error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_aside: ContextVar[dict[str, ArrayRecord] | None] = ContextVar("statistics", default=None)
_share_aside: ContextVar[ConfigRecord | None] = ContextVar("gradient", default=None)


def load(model: nn.Module, message: Message) -> None:
    """Load the server's parameters and statistics into a client's converted model.

    Also the share of BatchNorm's gradient to train with, and the limit, if the server sends them.

    Args:
        model: what `convert` returned.
        message: as the client app received it, for training or for evaluation.
    """
    records = dict(message.content.array_records) | (_aside.get() or {})
    if STATISTICS not in records:
        raise ValueError(
            f"the message has no record {STATISTICS!r}: wrap the server's strategy in "
            "FederatedBatchNormStrategy"
        )
    model = unwrapped(model)
    state: dict[str, torch.Tensor] = {}
    for record in records.values():
        state |= record.to_torch_state_dict()
    model.load_state_dict(state)
    apply(model, message.content.config_records.get(GRADIENT) or _share_aside.get())
    load_statistics(model, statistics(model))  # a new round: nothing has been seen yet


def reply(
    model: nn.Module,
    message: Message,
    metrics: Mapping[str, int | float | list[int] | list[float]],
    *,
    steps: int = 1,
    arrays: str = "arrays",
    group: ProcessGroup | None = None,
) -> Message:
    """A client's answer: parameters, what its layers have seen since `load`, and metrics.

    Args:
        model: the converted model, after local training.
        message: what is answered.
        metrics: with the strategy's weight among them, which is `num-examples` unless it was set otherwise.
        steps: optimiser steps since `load`.
        arrays: the name of the record of parameters.
        group: of a client that trains on several devices; see `collect`.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}; it must be a whole number, at least 1")
    model = unwrapped(model)
    seen = _seen(model, steps, group)
    parameters = parameters_of(model)
    for sent in message.content.array_records.values():
        if sent.keys() == parameters.keys():
            parameters = {name: parameters[name] for name in sent}  # in the order in which they came
    content: dict[str, Any] = {
        arrays: ArrayRecord(parameters),
        "metrics": MetricRecord(dict(metrics)),
    }
    aside = _aside.get()
    (content if aside is None else aside)[STATISTICS] = seen
    return Message(content=RecordDict(content), reply_to=message)


def calibrate(
    model: nn.Module,
    message: Message,
    batches: Iterable[torch.Tensor],
    *,
    group: ProcessGroup | None = None,
) -> Message:
    """A client's answer to round 0: what its layers see in a pass with plain BatchNorm, and nothing learned.

        @app.train("calibrate")
        def measure(message, context):
            return calibrate(fbn.convert(Net()), message, (x for x, _ in loader))

    Args:
        model: the converted model; the message is loaded into it.
        message: what is answered.
        batches: inputs of the model, on its device: an epoch, or a few of its batches.
        group: of a client that trains on several devices; see `collect`.
    """
    load(model, message)
    model.train()
    with torch.no_grad(), calibrating(model):
        for x in batches:
            model(x)
    seen = _seen(model, 1, group)
    seen[CALIBRATED] = Array(np.array(1))
    content: dict[str, Any] = {}
    aside = _aside.get()
    (content if aside is None else aside)[STATISTICS] = seen
    return Message(content=RecordDict(content), reply_to=message)


def _seen(model: nn.Module, steps: int, group: ProcessGroup | None) -> ArrayRecord:
    update = np.frombuffer(to_bytes(collect(unwrapped(model), group=group)), dtype=np.uint8)
    return ArrayRecord({"update": Array(update), "steps": Array(np.array(steps))})


def statistics_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A mod for a ClientApp: keeps what is federated BatchNorm's away from the mods that come after it.

    Mods such as `fixedclipping_mod` want one record of arrays and one of settings, and no more:
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
