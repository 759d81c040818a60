"""A first local step that all clients of a round take abreast: their layers see all of them (FedTAN)."""

import torch
from torch import Tensor

from ..norm.moments import Moments
from .byzantine import client_gradients
from .device import Machine
from .federation import Federation
from .lanes import Batches, Rows, nothing_seen
from .optim import Local, local_step
from .packing import Packing
from .schemes import Phase


def first_step_abreast(
    federation: Federation,
    machine: Machine,
    packing: Packing,
    rows: Rows,
    batches: Batches,
    phase: Phase,
    rate: Tensor,
) -> None:
    """Take the first local step of every client, by `vmap` over the clients; changes the rows.

    Args:
        federation: model, data and recipe.
        machine: where; the step is always eager.
        packing: the layout of the rows.
        rows: what the clients were sent.
        batches: what they train on.
        phase: what the step normalizes with, and what clients keep of what they saw.
        rate: the learning rate.
    """
    recipe, layers = federation.recipe, federation.layers
    assert phase.first is not None
    sizes = machine.upload(batches.sizes[:, :1])
    keep = torch.arange(recipe.batch, device=sizes.device) < sizes
    chosen = batches.index[:, 0]
    x = federation.data.inputs(federation.samples(chosen.flatten())).unflatten(0, chosen.shape)
    federation.model.train()
    for layer in layers.values():
        layer.start(phase._replace(normalise=phase.first, settings=()))
    stacked = dict(zip(packing.names, packing.views(rows.weights), strict=True))
    weights = keep / sizes.to(rows.weights.dtype)
    arguments = x, federation.data.train.y[chosen], len(x), machine.half, stacked, weights
    gradients, losses = client_gradients(federation.model, layers, *arguments)
    found = {name: layer.rows(name, 1) for name, layer in layers.items()}
    seen = [m or nothing_seen(layers[name].running()) for name, m in found.items()]
    flat, how = torch.empty_like(gradients), Local.of(recipe)
    flat[:, packing.order] = gradients
    for i, row in enumerate(rows.weights):
        local_step(row, flat[i], rows.state[i], rows.taken[i], row.clone(), rate, how)
    if seen:
        _keep(rows, seen, phase, recipe.beta)
    rows.losses.copy_(losses)


def _keep(rows: Rows, seen: list[Moments], phase: Phase, beta: float) -> None:
    """Add what the layers saw to what each client keeps."""
    clients = len(rows.weights)
    mean, var = (
        torch.cat([getattr(m, k).expand(clients, -1) for m in seen], 1).to(rows.counts)
        for k in ("mean", "var")
    )
    counts = [torch.as_tensor(m.count, device=mean.device).to(mean).view(-1, 1) for m in seen]
    count = torch.cat([c.expand(clients, m.mean.shape[1]) for c, m in zip(counts, seen, strict=True)], 1)
    before = Moments(rows.counts, *rows.statistics.unbind(1))
    after = phase.kept.over_steps(before, Moments(count, mean, var), beta)
    rows.counts.copy_(torch.as_tensor(after.count))
    rows.statistics.copy_(torch.stack([after.mean, after.var], 1))
