"""How a local step handles gradients and the moments of layers; for one client, or for many abreast."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..norm.moments import Moments, Running
from .device import Machine
from .fold import FoldedNorm
from .packing import Packing
from .schemes import Phase
from .sharing import Kept


def fill_gradient(packing: Packing, place: Tensor, loss: Tensor, parameters: Sequence[Tensor]) -> None:
    """Write the gradient of a loss (d,), or of the sum of clients' losses (clients, d), into its place."""
    found = torch.autograd.grad(loss, parameters, torch.ones_like(loss), allow_unused=True)
    with torch.no_grad():
        packing.fill(place, found)


def keep_seen(
    layers: Mapping[str, FoldedNorm],
    machine: Machine,
    phase: Phase,
    own_statistics: bool,
    counts: Tensor,
    kept: Tensor,
    beta: float,
) -> None:
    """Add what the layers saw in a step to what clients keep.

    Args:
        layers: by name.
        machine: how it runs.
        phase: says whether moments are needed.
        own_statistics: whether clients do, for themselves.
        counts: (clients, C), changed.
        kept: (clients, 2, C), changed.
        beta: momentum of running statistics.
    """
    wanted = phase.survey is None and (phase.share is not None or own_statistics)
    found = [layer.rows(name, 1, wanted) for name, layer in layers.items()]
    if all(m is None for m in found):
        return
    seen = [m or nothing_seen(layer.running()) for m, layer in zip(found, layers.values(), strict=True)]
    machine.call(add_step, phase.kept, counts, kept, seen, beta)


def add_step(how: Kept, counts: Tensor, kept: Tensor, seen: Sequence[Moments], beta: float) -> None:
    """Add one step to what clients keep, all layers side by side, in place.

    Args:
        how: moments of all steps, or running statistics.
        counts: (clients, C), values seen so far.
        kept: (clients, 2, C), mean and variance so far, in float64 where the device has it.
        seen: each layer's moments in the step, (clients, c), or (1, c) where they are the same for all.
        beta: momentum of running statistics.
    """
    clients = len(counts)
    mean, var = (
        torch.cat([getattr(m, k).expand(clients, -1) for m in seen], 1).to(kept.dtype)
        for k in ("mean", "var")
    )
    count = torch.cat([_by_channel(m).expand(clients, -1) for m in seen], 1).to(kept.dtype)
    after = how.over_steps(Moments(counts, *kept.unbind(1)), Moments(count, mean, var), beta)
    counts.copy_(torch.as_tensor(after.count))
    kept.copy_(torch.stack([after.mean, after.var], 1))


def nothing_seen(like: Running) -> Moments:
    """What a layer measured in a step that it took no part in, (1, c)."""
    return Moments(0, torch.zeros_like(like.mean)[None], torch.zeros_like(like.var)[None])


def _by_channel(seen: Moments) -> Tensor:
    """Counts, once for every channel, (clients, c)."""
    count, mean = seen.count, seen.mean
    return count.reshape(-1, 1).expand_as(mean) if isinstance(count, Tensor) else torch.full_like(mean, count)
