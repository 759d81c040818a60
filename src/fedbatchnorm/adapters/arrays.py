"""A model by the names of its state_dict: parameters are averaged, statistics are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..norm.convert import federated_layers
from ..norm.moments import Running
from ..norm.reduce import statistics_dtype

_FIELDS = ("running_mean", "running_var", "num_batches_tracked")
# Layer -> the names of its mean, variance and counter in a state_dict, once for each place it is used in.
Names = dict[str, list[tuple[str, ...]]]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DistributedDataParallel."""
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or model.module  # pyrefly: ignore
    return model


def as_numpy(value: Any, name: str) -> np.ndarray:
    """An array or a tensor, as an array; an error names it."""
    if isinstance(value, Tensor):
        if value.dtype == torch.bfloat16:
            raise TypeError(f"{name} is in bfloat16, which numpy has not: exchange it in float32")
        value = value.detach().cpu().numpy()
    elif not isinstance(value, np.ndarray | np.generic) and callable(getattr(value, "numpy", None)):
        value = value.numpy()  # an engine's own kind of array
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{name} is a {type(value).__name__}, expected an array")
    return np.asarray(value)


def is_finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite; a sum detects most that are not and needs no memory."""
    if not np.issubdtype(array.dtype, np.floating):
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def statistic_names(model: nn.Module) -> Names:
    """Where a converted model's state_dict has statistics; a layer that is used twice appears twice."""
    first = {id(layer): name for name, layer in federated_layers(model).items()}
    found: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            found.setdefault(first[id(module)], []).append(_names(name))
    return found


def guessed_names(arrays: Iterable[str]) -> Names:
    """Where statistics seem to be, by the names of the arrays alone."""
    arrays = set(arrays)
    layers = [""] if _FIELDS[0] in arrays else []
    layers += sorted(n.removesuffix(f".{_FIELDS[0]}") for n in arrays if n.endswith(f".{_FIELDS[0]}"))
    return {layer: [_names(layer)] for layer in layers if arrays.issuperset(_names(layer))}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """What a client sends back to be averaged: floating-point arrays that are not statistics."""
    kept = _flat(statistic_names(model))
    state = model.state_dict().items()
    return {name: t.detach().cpu() for name, t in state if name not in kept and t.is_floating_point()}


class Parts(NamedTuple):
    """A server's arrays: parameters, integers that stay as they are, and where statistics are."""

    order: list[str]
    parameters: dict[str, np.ndarray]
    fixed: dict[str, np.ndarray]
    names: Names

    def statistics(self, shared: Mapping[str, Running]) -> dict[str, np.ndarray]:
        """Statistics under the names of a state_dict; the counter is an integer, and the server's."""
        found = {}
        for layer, running in shared.items():
            values = running.mean.numpy(), running.var.numpy(), np.array(running.tracked, dtype=np.int64)
            for names in self.names[layer]:
                found |= dict(zip(names, values, strict=True))
        return found

    def join(
        self, parameters: Mapping[str, np.ndarray], shared: Mapping[str, Running]
    ) -> dict[str, np.ndarray]:
        """Join all parts, in the order and with the types of the first."""
        whole = dict(parameters) | self.statistics(shared) | self.fixed
        for name, sent in self.parameters.items():
            if whole[name].dtype != sent.dtype:
                whole[name] = whole[name].astype(sent.dtype)
        return {name: whole[name] for name in self.order}


def split(
    arrays: Mapping[str, np.ndarray],
    names: Names,
    settings: Mapping[str, Any],
    usual: tuple[float | None, float],
) -> tuple[Parts, dict[str, Running]]:
    """Separate parameters, statistics, and what is not averaged (integers).

    Args:
        arrays: the whole model.
        names: where its statistics are.
        settings: layer -> (momentum, eps).
        usual: (momentum, eps) of layers that are not in the settings.
    """
    shared: dict[str, Running] = {}
    for layer, places in names.items():
        missing = [name for names in places for name in names if name not in arrays]
        if missing:
            raise ValueError(
                f"the arrays have no {missing[0]!r}, the statistics of layer {layer!r} of the model"
            )
        mean, var, tracked = (torch.from_numpy(np.array(arrays[name])) for name in places[0])
        exact = statistics_dtype(mean)
        shared[layer] = Running(mean.to(exact), var.to(exact), int(tracked), *settings.get(layer, usual))
    kept = _flat(names)
    rest = {name: array for name, array in arrays.items() if name not in kept}
    sent = {name: a for name, a in rest.items() if np.issubdtype(a.dtype, np.floating)}
    fixed = {name: array for name, array in rest.items() if name not in sent}
    return Parts(list(arrays), sent, fixed, names), shared


def _flat(names: Names) -> set[str]:
    return {name for places in names.values() for triple in places for name in triple}


def _names(layer: str) -> tuple[str, ...]:
    """A layer's statistics in a state_dict; the model itself may be the layer."""
    return tuple(f"{layer}.{field}" if layer else field for field in _FIELDS)
