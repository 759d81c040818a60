"""A pass that only measures: clients run one batch through the model that they were sent and report moments.

It serves a calibrated start and calibrated evaluations (plain BatchNorm, merged with momentum 1), and schemes
whose statistics come from a pass of their own (HBN).
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ..norm.moments import Moments, accumulator_dtype
from .device import Machine, set_seed
from .federation import Federation
from .recipe import torch_seed
from .schemes import CALIBRATION, Phase, Survey
from .sharing import merge_moments


def survey(
    federation: Federation,
    machine: Machine,
    step: int,
    phase: Phase,
    how: Survey,
    become: Callable[[int], None] = lambda client: None,
) -> Moments:
    """What the clients of a round measure: counts, means and variances of all layers side by side, (M, C).

    Args:
        federation: its model, whose weights the clients were sent.
        machine: how passes run; these are always eager.
        step: the round, which says who takes part.
        phase: what the pass normalizes with, unless `how` says otherwise.
        how: the size of the batch, and what counts.
        become: called before a client's pass, to put its local parts into the model.
    """
    clients, batches = federation.survey_batches(step, how.images)
    phase = (
        phase if how.normalize is None else phase._replace(normalize=how.normalize, learned=(), settings=())
    )
    set_seed(federation.device, torch_seed(federation.recipe.seed, "survey", step))
    federation.model.train()
    found: list[tuple[torch.Tensor, ...]] = []
    for client, batch in zip(clients, batches, strict=True):
        become(int(client))
        for layer in federation.layers.values():
            layer.start(phase, federation.recipe.settings())
            layer.clients = 1
            # torch's BatchNorm refuses a single value, and we do not.
            layer.keep = torch.ones_like(layer.running().mean[:1]) if len(batch) == 1 else None
        x = federation.data.inputs(federation.samples(machine.upload(batch)))
        with torch.no_grad(), torch.autocast(federation.device.type, torch.bfloat16, enabled=machine.half):
            federation.model(x)
        seen = {name: layer.rows(name, 1, wanted=True) for name, layer in federation.layers.items()}
        kept = [m for m in seen.values() if m is not None]
        if len(kept) < len(seen):
            missing = next(name for name, m in seen.items() if m is None)
            raise ValueError(
                f"layer {missing!r} did not run in a pass that measures, so it has no statistics"
            )
        counts = [torch.full_like(m.mean[0], len(batch) if how.by_images else float(m.count)) for m in kept]
        found.append(
            (torch.cat(counts), *(torch.cat([getattr(m, k)[0] for m in kept]) for k in ("mean", "var")))
        )
    columns = [torch.stack(column) for column in zip(*found, strict=True)]
    return Moments(*(column.to(accumulator_dtype(column)) for column in columns))


def calibrate(federation: Federation, machine: Machine, step: int = 0) -> None:
    """Give all layers statistics of the model as it is: one pass with plain BatchNorm, merged with momentum
    1.

    The clients of round `step` make it. Where a layer's scheme has no statistics there is nothing to do.
    """
    if not federation.layers:
        return
    seen = survey(federation, machine, step, federation.scheme.before, CALIBRATION)
    sizes = [layer.num_features for layer in federation.layers.values()]
    zero, one = torch.zeros_like(seen.mean[0]), torch.ones_like(seen.mean[0])
    total = torch.as_tensor(seen.count).sum(0)
    population = federation.population(federation.scheme.before)
    merged = merge_moments(zero, one, seen, None, CALIBRATION.momentum, total, population)
    with torch.no_grad():
        parts = zip(federation.layers.values(), *(m.split(sizes) for m in merged), strict=True)
        for layer, mean, var in parts:
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)


@contextlib.contextmanager
def calibrated(federation: Federation, machine: Machine, step: int) -> Iterator[None]:
    """The model with statistics that the clients of round `step` measure now; afterwards those of training
    are restored.
    """
    layers = federation.layers.values()
    buffers = [statistic for layer in layers for statistic in (layer.running().mean, layer.running().var)]
    before = [buffer.clone() for buffer in buffers]
    try:
        calibrate(federation, machine, step)
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
