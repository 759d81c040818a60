"""Whether something else than the server changed a layer's running statistics: what they were when loaded.

Values are compared, because `F.batch_norm` does not raise the version of the buffers that it writes to.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .walk import grouped

_BEHIND = (
    "not by load_statistics or load_state_dict. If a module calls F.batch_norm with their buffers, have it "
    "call the layers: what it normalized was not measured. If you set them yourself, use load_statistics"
)


class Noted(NamedTuple):
    """A layer's statistics as they were loaded: the tensors and their values."""

    mean: Tensor
    var: Tensor
    values: Tensor  # (2 c,), a copy


def note(layers: Iterable[Any]) -> None:
    """Remember the layers' current statistics as loaded; one operation for all layers of a device."""
    for group in _alike(layers):
        for layer, values in zip(group, _values(group), strict=True):
            mean, var = layer._buffers["running_mean"], layer._buffers["running_var"]
            # Past nn.Module, whose way of setting an attribute costs more than all the rest.
            layer.__dict__["_noted"] = None if mean.is_meta else Noted(mean, var, values)
            layer.__dict__["_was_reset"] = False


def touched(layers: Mapping[str, Any]) -> list[str]:
    """Names of layers whose statistics have changed since they were noted; one comparison for all.

    Writing the same values again is not a change: DistributedDataParallel does it in every step.
    """
    found: list[str] = []
    for group in _noted(layers):
        then = [layer._noted.values for layer in group]
        if not _equal(_side_by_side(group), torch.cat(then)):
            names = {id(layer): name for name, layer in layers.items()}
            pairs = zip(group, _values(group), then, strict=True)
            found += [names[id(layer)] for layer, one, two in pairs if not _equal(one, two)]
    return found


def suspicions(layers: Mapping[str, Any]) -> list[Tensor]:
    """Whether anything may be `touched`, for each group of layers, without waiting for a device."""
    found = []
    for group in _noted(layers):
        now, then = _side_by_side(group), torch.cat([layer._noted.values for layer in group])
        alike = now.shape == then.shape and now.device == then.device
        found.append((now != then).any() if alike else torch.tensor(True))
    return found


def _noted(layers: Mapping[str, Any]) -> list[list[Any]]:
    groups = _alike(layer for layer in layers.values() if layer._noted is not None)
    return [group for group in groups if not group[0]._buffers["running_mean"].is_meta]


def warn_of_changes(layers: Mapping[str, Any]) -> None:
    """Warn of layers whose statistics changed since they were noted, once for each change."""
    found = touched(layers)
    if found:
        note(layers[name] for name in found)
        rows = ((name, type(layers[name]).__name__, _BEHIND) for name in found)
        warnings.warn("\n  ".join(["running statistics changed unseen:", *grouped(rows)]), stacklevel=3)


def refuse_averaging(layers: Mapping[str, Any]) -> None:
    """Raise an error that names a layer which torch's update_bn has turned into a plain BatchNorm."""
    for name, layer in layers.items():
        if layer._averaging:
            raise ValueError(
                f"layer {name!r} averages its statistics as a plain BatchNorm, since they were reset and its "
                "momentum was set to None, as torch's update_bn does: set momentum to what it was before"
            )


def _equal(one: Tensor, two: Tensor) -> bool:
    two = two.to(one.device, one.dtype)
    if one.shape != two.shape or torch.equal(one, two):
        return one.shape == two.shape
    return bool(torch.isclose(one, two, rtol=0, atol=0, equal_nan=True).all())


def _values(group: list[Any]) -> list[Tensor]:
    """A copy of each layer's mean and variance in one tensor, (2 c,)."""
    with torch.inference_mode(False), torch.no_grad():
        # Copies, for a view is pickled with all layers' values.
        sizes = [2 * layer._buffers["running_mean"].numel() for layer in group]
        return list(torch.split_with_sizes_copy(_joined(group), sizes))  # pyrefly: ignore


def _side_by_side(group: list[Any]) -> Tensor:
    """Each layer's mean and variance, one layer after another."""
    with torch.inference_mode(False), torch.no_grad():
        return _joined(group)


def _joined(group: list[Any]) -> Tensor:
    buffers = [layer._buffers for layer in group]
    return torch.cat([b[name] for b in buffers for name in ("running_mean", "running_var")])


def _alike(layers: Iterable[Any]) -> Iterable[list[Any]]:
    """Layers by device and type, so that each group goes into one tensor."""
    groups: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
    for layer in layers:
        mean = layer._buffers["running_mean"]
        groups.setdefault((mean.device, mean.dtype), []).append(layer)
    return groups.values()
