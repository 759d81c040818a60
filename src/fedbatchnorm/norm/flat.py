"""All layers of a model side by side, so that a few operations handle all of them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .moments import Moments

Item = TypeVar("Item")


class Flat(NamedTuple):
    """What each of L layers has seen: count and refused (L,), mean and var (d,) with layers side by side."""

    count: Tensor
    refused: Tensor
    mean: Tensor
    var: Tensor


def side_by_side(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate, on the CPU if the tensors are not all on one device; empty if there are none."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    devices = {tensor.device for tensor in tensors}
    return torch.cat([t.cpu() for t in tensors] if len(devices) > 1 else list(tensors), dim)


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor on the CPU; those of a device travel as one, so that it is waited for once.

    Example:
        >>> on_cpu([torch.ones(2, dtype=torch.int64), torch.zeros(1)])
        [tensor([1, 1]), tensor([0.])]
    """
    found = list(tensors)
    far = [i for i, tensor in enumerate(found) if tensor.device.type != "cpu"]
    for group in grouped(far, lambda i: _together(found[i])):
        ours = [found[i] for i in group]
        values = torch.cat([t.detach().flatten().to(_carrier(t)) for t in ours]).cpu()
        for i, tensor, part in zip(group, ours, values.split([t.numel() for t in ours]), strict=True):
            found[i] = part.view(tensor.shape).to(tensor.dtype)
    return found


def _carrier(tensor: Tensor) -> torch.dtype:
    """A type that holds every value: float64 has all counts that there can be, but MPS has no float64."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def _together(tensor: Tensor) -> Hashable:
    return tensor.device, _carrier(tensor)


def spread(values: Tensor, sizes: Tensor, channels: int) -> Tensor:
    """One value for each layer, (..., L), to one for each channel, (..., d).

    Example:
        >>> spread(torch.tensor([5, 7]), torch.tensor([2, 1]), 3)
        tensor([5, 5, 7])
    """
    return torch.repeat_interleave(values, sizes, -1, output_size=channels)


def of_layers(flags: Tensor, sizes: Tensor) -> Tensor:
    """How many of each layer's channels are flagged: (..., d) -> (..., L).

    Example:
        >>> of_layers(torch.tensor([True, False, True]), torch.tensor([2, 0, 1]))
        tensor([1, 0, 1])
    """
    ends = sizes.cumsum(0)
    running = torch.nn.functional.pad(flags.cumsum(-1), (1, 0))
    return running.index_select(-1, ends) - running.index_select(-1, ends - sizes)


def union(count: Tensor, mean: Tensor, var: Tensor, sizes: Tensor) -> Flat:
    """Moments of the union of n rows for every layer (equation RV); a row that is not finite is refused.

    Rows are those of one client, in the order in which they came, so they are added up as they stand.

    Args:
        count: (n, L) int64.
        mean: (n, d).
        var: (n, d).
        sizes: (L,), channels of each layer.
    """
    broken = (mean.isfinite() & var.isfinite()).logical_not()
    refused = of_layers(broken, sizes) > 0
    count = count * refused.logical_not()
    total = count.sum(0)
    share = spread(count.to(mean.dtype) / total.clamp(min=1), sizes, mean.shape[-1])
    there = share > 0
    mean, var = torch.where(there, mean, 0), torch.where(there, var, 0)
    center = (share * mean).sum(0)
    within = (share * (var + (mean - center).square())).sum(0)
    return Flat(total, refused.sum(0), center, within)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """The items with equal keys together, in the order in which each key came first."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def numbers(tensors: Sequence[Tensor]) -> list[int]:
    """The values of integer tensors of shape (), read in one go for each device."""
    values = [0] * len(tensors)
    for group, stacked in stacks(tensors):
        for i, value in zip(group, stacked.tolist(), strict=True):
            values[i] = value
    return values


def stacks(tensors: Sequence[Tensor]) -> list[tuple[list[int], Tensor]]:
    """Tensors of shape () by device: which ones, and their values as one tensor."""
    groups = grouped(range(len(tensors)), lambda i: tensors[i].device)
    return [(group, torch.stack([tensors[i] for i in group])) for group in groups]


def parts_of(values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Each layer's part, as a copy in one operation: a view would be pickled with all layers' values."""
    return tuple(torch.split_with_sizes_copy(values, list(sizes)))  # pyrefly: ignore


def split(flat: Flat, sizes: Sequence[int]) -> list[Moments]:
    """Each layer's moments."""
    parts = parts_of(flat.mean, sizes), parts_of(flat.var, sizes)
    return [Moments(*of_layer) for of_layer in zip(flat.count.tolist(), *parts, strict=True)]
