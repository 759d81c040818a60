"""Translates between NVFlare's models and the core's arrays by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..norm.convert import convert
from .arrays import as_numpy
from .extras import needs
from .nvflare_client import KEY, STEPS, unpacked
from .replies import Reply, is_usable
from .session import Request, Taken

try:
    from nvflare.app_common.abstract.fl_model import FLModel, MetaKey, ParamsType
    from nvflare.fuel.utils.class_utils import instantiate_class
except ImportError as error:
    raise needs("NVFlare", "nvflare", error) from error


class Weighting:
    """The weight of a reply, times a factor by client."""

    def __init__(self, weight: str | Callable[[FLModel], float], factors: Mapping[str, float] | None = None):
        """Of the name of a number in a reply's meta or metrics, or of a function of the reply."""
        self.weight, self.factors = weight, factors or {}
        self.name = weight if isinstance(weight, str) else "weight"

    def __call__(self, client: str, model: FLModel) -> dict[str, Any]:
        """The weight under its name; nothing if the reply has none."""
        factor = self.factors.get(client, 1)
        if callable(self.weight):
            return {self.name: factor * float(self.weight(model))}
        for found in (model.meta or {}, model.metrics or {}):
            if self.name in found:
                value = plain(found[self.name])
                return {self.name: value if factor == 1 else factor * value}
        return {}


class Parameters(Mapping[str, Any]):
    """A reply's parameters, each read when it is needed: from disk, added to what was sent if it is a
    difference, and without the statistics of a whole state_dict, which moments replace.
    """

    def __init__(
        self, model: FLModel, sent: Mapping[str, np.ndarray], without: Collection[str] = frozenset()
    ):
        """Of a model.

        Args:
            model: as it came.
            sent: the parameters that the client had received.
            without: names that are left out.
        """
        self._params, self._sent, self._without = model.params, sent, without
        self._is_diff = model.params_type == ParamsType.DIFF

    def __getitem__(self, name: str) -> Any:
        value = self._params[name]
        materialize = getattr(value, "materialize", None)  # of tensors that NVFlare has put on the disk
        value = value if materialize is None else materialize()
        if self._is_diff and name in self._sent:
            return self._sent[name] + as_numpy(value, name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._params and name not in self._without

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._params if name not in self._without)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def reply_of(model: FLModel, weighting: Weighting, sent: Request) -> Reply:
    """A client's reply, as the core's `Reply`."""
    meta = model.meta or {}
    client = meta.get("client_name") or meta.get(MetaKey.SITE_NAME) or "(unnamed)"
    problem = "" if isinstance(model.params, Mapping) else "its parameters have no names"
    numbers = {name: plain(value) for name, value in (model.metrics or {}).items()}
    metrics = {name: value for name, value in numbers.items() if is_usable(value)}
    try:
        metrics |= weighting(client, model)
    except Exception as error:  # of a function that weighs, or of what a client may have sent
        problem = f"its weight cannot be read: {type(error).__name__}: {error}"[:300]
    parameters = Parameters(model, sent.parameters, sent.statistics)
    return Reply(client, parameters, metrics, unpacked(meta), problem=problem)


def converted(model: Any) -> nn.Module | None:
    """A converted copy of a model, which may be given by its class."""
    if model is None:
        return None
    if isinstance(model, Mapping):
        path = model.get("class_path") or model.get("path")
        if not path:
            raise ValueError('model is a dict without "class_path", which names its class')
        return convert(instantiate_class(path, dict(model.get("args") or {})))
    return convert(copy.deepcopy(model))


def plain(value: Any) -> Any:
    """A Python number, from a tensor or an array of one value."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(tuple(value.shape)) == 1:
        return value.item()
    return value


def in_kind(arrays: Mapping[str, np.ndarray], tensors: bool) -> dict[str, Any]:
    """Arrays as they are, or copied into tensors."""
    return {name: torch.from_numpy(np.array(value)) if tensors else value for name, value in arrays.items()}


def for_wrapped(
    model: FLModel, like: Mapping[str, np.ndarray], metrics: dict[str, Any], weight: float, tensors: bool
) -> FLModel:
    """A reply that any aggregator can use: whole parameters in the order in which they were sent."""
    received = Parameters(model, like)
    params = in_kind({name: as_numpy(received[name], name) for name in like}, tensors)
    meta = {key: value for key, value in (model.meta or {}).items() if key != KEY} | {STEPS: weight}
    return FLModel(ParamsType.FULL, params, metrics=metrics, current_round=model.current_round, meta=meta)


def mean_metrics(taken: Taken, without: str) -> dict[str, float] | None:
    """The weighted means of the metrics that are numbers, over the clients that were used."""
    rows, total = taken.metrics, sum(taken.weights.values())
    first = next(iter(rows.values()), {})
    names = [name for name, value in first.items() if name != without and not isinstance(value, list)]
    return {n: sum(taken.weights[c] * row[n] for c, row in rows.items()) / total for n in names} or None
