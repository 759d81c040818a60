"""The client's side of federated BatchNorm for any engine: what to load, and what to reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..norm.calibrate import calibrating
from ..norm.convert import set_gradient
from ..norm.exchange import collect, load_statistics, statistics
from ..norm.wire import to_bytes
from .arrays import parameters_of, unwrapped
from .replies import CALIBRATED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Sent(Protocol):
    """What a client received: a `session.Request`, or the like."""

    @property
    def parameters(self) -> Mapping[str, np.ndarray | Tensor]:
        """What is averaged."""

    @property
    def statistics(self) -> Mapping[str, np.ndarray | Tensor]:
        """Everything else of the state_dict."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The share of BatchNorm's gradient with its limit; nothing if the client decides itself."""


class Answer(NamedTuple):
    """What a client sends: parameters by name, and the moments of its layers, as arrays by name."""

    parameters: dict[str, Tensor]
    statistics: dict[str, np.ndarray]


def load(model: nn.Module, sent: Sent) -> None:
    """Load the server's parameters and statistics into a client's converted model.

    This includes the share of BatchNorm's gradient and the limit, if the server sends them.
    """
    model = unwrapped(model)
    state = dict(sent.parameters) | dict(sent.statistics)
    model.load_state_dict({name: _tensor(value) for name, value in state.items()})
    told = sent.settings
    if told:
        between = dict(zip(told.get("layers", ()), told.get("between", ()), strict=True))  # pyrefly: ignore
        set_gradient(model, told["gradient"], limit=told.get("limit"), between=between)  # pyrefly: ignore
    load_statistics(model, statistics(model))  # a new round: nothing has been seen yet


def answer(
    model: nn.Module,
    *,
    steps: int = 1,
    like: Mapping[str, object] | None = None,
    group: ProcessGroup | None = None,
) -> Answer:
    """A client's reply: parameters, and what its layers have seen since `load`.

    Args:
        model: the converted model, after local training.
        steps: optimizer steps since `load`; 0 for a client that had no batch, which the server ignores.
        like: parameters come in its order if it has the same names: what was sent.
        group: of a client that trains on several devices; see `collect`.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ValueError(
            f"steps is {steps!r}; it must be the number of optimizer steps since load, at least 0"
        )
    model = unwrapped(model)
    seen = _seen(model, steps, group)
    parameters = parameters_of(model)
    if like is not None and like.keys() == parameters.keys():
        parameters = {name: parameters[name] for name in like}
    return Answer(parameters, seen)


def measure(
    model: nn.Module, sent: Sent, batches: Iterable[Tensor], *, group: ProcessGroup | None = None
) -> Answer:
    """A client's reply to round 0: the moments of a pass with plain BatchNorm, without training.

    Args:
        model: the converted model; what was sent is loaded into it.
        sent: by the server.
        batches: inputs of the model, on its device: an epoch, or a few of its batches.
        group: of a client that trains on several devices; see `collect`.
    """
    load(model, sent)
    model.train()
    with torch.no_grad(), calibrating(model):
        for x in batches:
            model(x)
    return measured(model, group=group)


def measured(model: nn.Module, *, group: ProcessGroup | None = None) -> Answer:
    """A client's reply to round 0, after passes with `calibrating`."""
    return Answer({}, _seen(unwrapped(model), 1, group) | {CALIBRATED: np.array(1)})


def _seen(model: nn.Module, steps: int, group: ProcessGroup | None) -> dict[str, np.ndarray]:
    update = np.frombuffer(to_bytes(collect(model, group=group)), dtype=np.uint8)
    return {"update": update, "steps": np.array(steps)}


def _tensor(value: np.ndarray | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
