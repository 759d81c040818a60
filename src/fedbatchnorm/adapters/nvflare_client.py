"""The client's side of federated BatchNorm on NVFlare: what to load, and what to send.

    flare.init()
    while flare.is_running():
        received = flare.receive()
        if wants_calibration(received):  # once, before the first round of training
            flare.send(calibrate(model, received, (x for x, _ in loader)))
            continue
        load(model, received)
        train_locally(model, loader)  # as ever
        flare.send(reply(model, received, {"accuracy": accuracy}, steps=len(loader)))

Parameters travel as usual. What the layers have seen travels in the model's `meta`, which NVFlare does not
change for any exchange format or transfer type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from . import client
from .extras import needs
from .replies import CALIBRATED

try:
    from nvflare.app_common.abstract.fl_model import FLModel, MetaKey
except ImportError as error:
    raise needs("NVFlare", "nvflare", error) from error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KEY = "fedbatchnorm"  # the entry of a model's meta, either way
STEPS = MetaKey.NUM_STEPS_CURRENT_ROUND
_ASKS, _SETTINGS = "calibrate", "settings"
_UNWRAPPED = (
    f"the received model has no {KEY!r} in its meta: give the recipe a FederatedBatchNormAggregator, "
    "or use FederatedBatchNormRecipe"
)


class Sent(NamedTuple):
    """What a client received."""

    parameters: Mapping[str, Any]
    statistics: Mapping[str, Any]
    settings: Mapping[str, object]


def load(model: nn.Module, received: FLModel) -> None:
    """Load the server's parameters and statistics into a client's converted model.

    This includes the share of BatchNorm's gradient and the limit, if the server sends them.

    Args:
        model: what `convert` returned.
        received: what `flare.receive()` returned, for training or for evaluation.
    """
    client.load(model, sent_of(received))


def reply(
    model: nn.Module,
    received: FLModel,
    metrics: Mapping[str, Any] | None = None,
    *,
    steps: int = 1,
    meta: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
) -> FLModel:
    """A client's reply, for `flare.send`: parameters, what its layers have seen since `load`, and metrics.

    Args:
        model: the converted model, after local training.
        received: what is answered.
        metrics: as in NVFlare: usually those of the model that was received.
        steps: optimizer steps since `load`, which by default are also the reply's weight; 0 if there was no
            batch: the server then ignores the reply.
        meta: further entries of the reply's meta.
        group: of a client that trains on several devices; see `collect`.
    """
    if KEY not in (received.meta or {}):
        raise RuntimeError(_UNWRAPPED)
    answer = client.answer(model, steps=steps, like=received.params, group=group)
    parameters = {name: _like(received.params, value) for name, value in answer.parameters.items()}
    return FLModel(
        params=parameters,
        metrics=None if metrics is None else dict(metrics),
        current_round=received.current_round,
        meta={STEPS: steps, **(meta or {}), KEY: packed(answer.statistics)},
    )


def wants_calibration(received: FLModel) -> bool:
    """Whether the server asks for `calibrate` instead of training: once, before the first round."""
    return bool((received.meta or {}).get(KEY, {}).get(_ASKS))


def calibrate(
    model: nn.Module, received: FLModel, batches: Iterable[Tensor], *, group: ProcessGroup | None = None
) -> FLModel:
    """A client's reply to round 0: the moments of a pass with plain BatchNorm, without training.

    Args:
        model: the converted model; what was received is loaded into it.
        received: what is answered.
        batches: inputs of the model, on its device: an epoch, or a few of its batches.
        group: of a client that trains on several devices; see `collect`.
    """
    answer = client.measure(model, sent_of(received), batches, group=group)
    # NVFlare takes no answer without parameters: the smallest goes back as it came.
    name, value = min(received.params.items(), key=lambda item: int(np.prod(tuple(item[1].shape))))
    meta = {STEPS: 1, KEY: packed(answer.statistics)}
    return FLModel(params={name: value}, current_round=received.current_round, meta=meta)


def packed(statistics: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A client's statistics as plain values, which all filters and formats leave unchanged."""
    found: dict[str, Any] = {name: array.item() for name, array in statistics.items() if array.ndim == 0}
    return found | {name: array.tobytes() for name, array in statistics.items() if array.ndim}


def unpacked(meta: Mapping[str, Any] | None) -> dict[str, np.ndarray] | None:
    """The inverse of `packed`, from a reply's meta; None if there is none."""
    found = (meta or {}).get(KEY)
    if not isinstance(found, Mapping):
        return None
    arrays = {name: np.frombuffer(v, np.uint8) for name, v in found.items() if isinstance(v, bytes)}
    return arrays | {name: np.array(found[name]) for name in ("steps", CALIBRATED) if name in found}


def beside(settings: Mapping[str, Any], calibrates: bool) -> dict[str, Any]:
    """What the server sends in the model's meta."""
    return {KEY: {_ASKS: calibrates, _SETTINGS: dict(settings)}}


def sent_of(received: FLModel) -> Sent:
    """What the server sent in a model."""
    settings = (received.meta or {}).get(KEY, {}).get(_SETTINGS, {})
    return Sent(received.params, {}, settings)


def _like(sent: Mapping[str, Any], value: Tensor) -> Tensor | np.ndarray:
    """A parameter as tensor or as array, as parameters came."""
    return value.numpy() if all(isinstance(v, np.ndarray | np.generic) for v in sent.values()) else value
