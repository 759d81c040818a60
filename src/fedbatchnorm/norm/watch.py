"""Whether running statistics changed behind a layer's back: what they were when they were given to it."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Noted(NamedTuple):
    """A layer's statistics as they were given to it: the tensors, their versions then, and what they held."""

    mean: Tensor
    var: Tensor
    versions: tuple[int, int] | None
    values: Tensor  # (2 c,), a copy


def note(layers: Iterable[Any]) -> None:
    """Take what the layers' statistics are now for given; one operation for all layers of a device."""
    for group in _by_device(layers):
        values = _values(group)
        for layer, value in zip(group, values, strict=True):
            mean, var = layer.running_mean, layer.running_var
            layer._noted = None if mean.is_meta else Noted(mean, var, _versions(mean, var), value)


def untouched(layer: Any) -> bool:
    """Whether nothing at all has written to a layer's statistics since they were noted."""
    noted, mean, var = layer._noted, layer.running_mean, layer.running_var
    if noted is None or noted.mean is not mean or noted.var is not var:
        return False
    return noted.versions is not None and noted.versions == _versions(mean, var)


def touched(layers: Mapping[str, Any]) -> list[str]:
    """Names of layers whose statistics are others than when they were noted.

    Writing the same values once more is no change: DistributedDataParallel does it in every step.
    """
    suspects = {id(v): k for k, v in layers.items() if v._noted is not None and not untouched(v)}
    found = []
    for group in _by_device(layer for layer in layers.values() if id(layer) in suspects):
        for layer, now in zip(group, _values(group), strict=True):
            then = layer._noted.values.to(now.device, now.dtype)
            if now.shape != then.shape or not torch.allclose(now, then, rtol=0, atol=0, equal_nan=True):
                found.append(suspects[id(layer)])
    return found


def _versions(mean: Tensor, var: Tensor) -> tuple[int, int] | None:
    """How often each tensor was written to; tensors made in inference mode do not know."""
    return None if mean.is_inference() or var.is_inference() else (mean._version, var._version)


def _values(group: list[Any]) -> list[Tensor]:
    """A copy of each layer's mean and variance in one tensor, (2 c,)."""
    with torch.no_grad():
        flat = torch.cat([t for layer in group for t in (layer.running_mean, layer.running_var)])
    return list(flat.split([2 * len(layer.running_mean) for layer in group]))


def _by_device(layers: Iterable[Any]) -> Iterable[list[Any]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
    for layer in layers:
        groups.setdefault((layer.running_mean.device, layer.running_mean.dtype), []).append(layer)
    return groups.values()
