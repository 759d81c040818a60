"""Read and load the statistics of a model, and collect what its layers have seen."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .convert import federated_layers
from .flat import grouped, numbers, parts_of, side_by_side, split, stacks, union
from .layers import FederatedBatchNorm, seen_by, start_rounds
from .messages import DTYPES, Update, new_id, same_layers
from .moments import Moments, Running, settings_problem, shown
from .reduce import statistics_dtype
from .watch import note, refuse_averaging, suspicions, warn_of_changes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def statistics(model: nn.Module) -> dict[str, Running]:
    """Read a converted model's shared statistics, as copies on the CPU in float32 or better.

    Example:
        >>> import fedbatchnorm as fbn
        >>> shared = fbn.statistics(fbn.convert(nn.Sequential(nn.BatchNorm1d(2))))
        >>> shared["0"].var, shared["0"].tracked
        (tensor([1., 1.]), 0)
    """
    layers = federated_layers(model)
    steps = numbers([_buffers(layer)[2] for layer in layers.values()])
    tracked = dict(zip(layers, steps, strict=True))
    shared: dict[str, Running | None] = dict.fromkeys(layers)
    for group in _alike(layers):
        buffers = [buffer for what in (0, 1) for _, layer in group for buffer in [_buffers(layer)[what]]]
        values = side_by_side(buffers).detach()
        parts = parts_of(values.to("cpu", statistics_dtype(values)), [len(buffer) for buffer in buffers])
        for (name, layer), mean, var in zip(group, parts, parts[len(group) :], strict=False):
            shared[name] = Running(mean, var, tracked[name], layer.momentum, layer.eps)
    return shared  # pyrefly: ignore


def load_statistics(model: nn.Module, shared: Mapping[str, Running]) -> None:
    """Load shared statistics into a converted model; moments not yet collected are discarded.

    Everything is checked first: after an error the model is unchanged. The momentum is used by the server
    only and is not loaded.

    Args:
        model: a converted model.
        shared: what `statistics` or `merge` returned, for the same layers.
    """
    layers = federated_layers(model)
    refuse_averaging(layers)
    same_layers(shared, layers)
    check_statistics(shared, {name: layer.num_features for name, layer in layers.items()})
    for name, layer in layers.items():
        if shared[name].eps != layer.eps:
            raise ValueError(
                f"layer {name!r}: eps is {layer.eps} in the model and {shared[name].eps} in the "
                "statistics; build the model the same way everywhere"
            )
    with torch.no_grad():
        groups = _alike(layers)
        values = [_cast(group, shared) for group in groups]  # all of it before anything is changed
        for group, new in zip(groups, values, strict=True):
            means, variances, tracked = zip(*(_buffers(layer) for _, layer in group), strict=True)
            # Memory that is not pinned is read before the call returns, so that nothing need be waited for.
            parts = new.to(means[0].device, non_blocking=True).split(
                [len(buffer) for buffer in (*means, *variances)]
            )
            torch._foreach_copy_([*means, *variances], parts)
            steps = torch.tensor([shared[name].tracked for name, _ in group])
            torch._foreach_copy_(tracked, steps.to(tracked[0].device, non_blocking=True).unbind())
    start_rounds(list(layers.values()))
    note(layers.values())


def collect(model: nn.Module, *, group: "ProcessGroup | None" = None) -> Update:
    """Return the moments of what the model has seen since the last `collect`, and start over.

    A warning names layers whose running statistics are no longer those that were loaded. This happens if a
    module calls `F.batch_norm` with a layer's buffers instead of the layer: its input is then not measured.
    (With `training=False` this cannot be detected.) Layers skipped by `convert` are left out. So are the
    passes of `torch.optim.swa_utils.update_bn`, which also discards what was measured before: call `collect`
    first.

    Args:
        model: a converted model.
        group: the process group of a client that trains on several devices (DistributedDataParallel). The
            moments of all its processes are combined, and each process gets the same update.

    Returns:
        An `Update`: {layer name: Moments(count, mean, var)}. A layer in evaluation mode has count 0.

    Example:
        >>> import fedbatchnorm as fbn
        >>> model = fbn.convert(nn.Sequential(nn.BatchNorm1d(1)))
        >>> y = model(torch.tensor([[4.0], [8.0]]))
        >>> fbn.collect(model)["0"]
        Moments(count=2, mean=tensor([6.], dtype=torch.float64), var=tensor([4.], dtype=torch.float64))
    """
    layers = federated_layers(model)
    refuse_averaging(layers)
    every = list(layers.values())
    # Everything that is to be read goes in one message: waiting for a GPU is what an exchange costs there.
    steps = [stacked for _, stacked in stacks([_buffers(layer)[2] for layer in every])]
    changed = suspicions(layers)
    seen, read = seen_by(every, [*steps, *changed])
    current, identity = sum(int(s.sum()) for s in read[: len(steps)]), new_id()
    if any(map(bool, read[len(steps) :])):
        warn_of_changes(layers)
    if group is not None:
        device = next((layer._seen.device for layer in every), torch.device("cpu"))
        seen, identity = _gather(seen, identity, group, device)
    start_rounds(every)
    moments = {name: m for name, (m, _) in zip(layers, seen, strict=True)}
    skipped = {name: times for name, (_, times) in zip(layers, seen, strict=True) if times}
    return Update(moments, round=current, skipped=skipped, id=identity)


def discard_step(model: nn.Module) -> None:
    """Drop what the last step added, as when a loss scaler finds an overflow and skips it.

    A step is all passes since the optimizer changed the layer's weight or its gradient was cleared. So
    micro-batches of gradient accumulation are dropped together, and layers that were not used in the step
    keep what they have. If this cannot be detected (no trainable weight, torch.compile), and for a layer
    called several times before its first gradient, only the last pass is dropped.

    Example:
        >>> import fedbatchnorm as fbn
        >>> model = fbn.convert(nn.Sequential(nn.BatchNorm1d(1)))
        >>> y = model(torch.tensor([[4.0], [8.0]]))
        >>> fbn.discard_step(model)
        >>> fbn.collect(model)["0"].count
        0
    """
    layers = federated_layers(model).values()
    states = [layer.step_is_open() for layer in layers]
    for layer, is_open in zip(layers, states, strict=True):
        # A layer that the last step did not run was closed by the optimizer before.
        if is_open is not False or True not in states:
            layer.discard_step()
        layer.close_step()


def check_statistics(shared: Mapping[str, Running], channels: Mapping[str, int] | None = None) -> None:
    """Raise a ValueError that names the layer and the field if any statistics are not usable.

    Args:
        shared: what a server or a client was given.
        channels: how many channels each layer must have.
    """
    try:
        fine = _look_fine(shared, channels)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        fine = False
    if not fine:  # then one of them is odd, or on another device: what it is takes longer
        for name, running in shared.items():
            check_running(name, running, None if channels is None else channels[name])


def _look_fine(shared: Mapping[str, Running], channels: Mapping[str, int] | None) -> bool:
    """`check_running` for all layers in one go; False if in doubt."""
    if not shared or not all(type(running) is Running for running in shared.values()):
        return False
    means, variances, tracked, momentum, eps = zip(*shared.values(), strict=True)
    tensors = (*means, *variances)
    sizes = [mean.shape for mean in means] if channels is None else [(channels[name],) for name in shared]
    if not (
        {t.dtype for t in tensors}.issubset(DTYPES)
        and {t.layout for t in tensors} == {torch.strided}
        and [t.shape for t in tensors] == sizes * 2
        and all(len(size) == 1 for size in sizes)
        and all(type(steps) is int and 0 <= steps < 2**63 for steps in tracked)
        and not any(settings_problem(*settings) for settings in set(zip(momentum, eps, strict=True)))
    ):
        return False
    with torch.no_grad():
        mean, var = side_by_side(means), side_by_side(variances)
        # A sum is finite only if all of its terms are; a minimum that is not a number is not >= 0.
        fine = (mean.sum() + var.sum()).isfinite() & (not var.numel() or var.min() >= 0)
    return bool(fine)


def is_ordinary(value: object) -> bool:
    """Whether this is a plain tensor of floating-point values that can be read."""
    return (
        isinstance(value, Tensor)
        and value.dtype in DTYPES
        and value.layout == torch.strided
        and not (value.is_meta or value.is_nested)
    )


def check_running(name: str, running: Running, channels: int | None = None) -> None:
    """Raise a ValueError that names the layer and the field if statistics are not usable."""
    if not isinstance(running, Running):
        raise ValueError(f"layer {name!r}: expected Running statistics, got {type(running).__name__}")
    for what in ("mean", "var"):
        value = getattr(running, what)
        if not is_ordinary(value) or value.dim() != 1:
            raise ValueError(f"layer {name!r}: {what} must be a floating-point tensor of shape (channels,)")
        expected = channels if channels is not None or what == "mean" else len(running.mean)
        if expected is not None and len(value) != expected:
            raise ValueError(f"layer {name!r}: {what} has {len(value)} channels, expected {expected}")
        if not bool(value.isfinite().all()):
            raise ValueError(f"layer {name!r}: {what} is not finite")
    if bool((running.var < 0).any()):
        raise ValueError(f"layer {name!r}: var is negative")
    if not isinstance(running.tracked, int) or not 0 <= running.tracked < 2**63:
        raise ValueError(f"layer {name!r}: tracked is {shown(running.tracked)}, not a count")
    problem = settings_problem(running.momentum, running.eps)
    if problem:
        raise ValueError(f"layer {name!r}: {problem}")


def _buffers(layer: FederatedBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    held = layer._buffers  # as attributes they would take several times as long
    return held["running_mean"], held["running_var"], held["num_batches_tracked"]  # pyrefly: ignore


def _alike(layers: Mapping[str, FederatedBatchNorm]) -> list[list[tuple[str, FederatedBatchNorm]]]:
    """Layers whose statistics are of one type, on one device."""

    def kind(item: tuple[str, FederatedBatchNorm]) -> tuple[torch.device, torch.dtype]:
        mean = _buffers(item[1])[0]
        return mean.device, mean.dtype

    return grouped(layers.items(), kind)


def _cast(group: list[tuple[str, FederatedBatchNorm]], shared: Mapping[str, Running]) -> Tensor:
    """Means, then variances of these layers side by side, in the type of the model."""
    dtype = _buffers(group[0][1])[0].dtype
    fields = {what: [getattr(shared[name], what) for name, _ in group] for what in ("mean", "var")}
    given = side_by_side([*fields["mean"], *fields["var"]])
    values = given.to(dtype)
    if values is not given and not bool(values.isfinite().all()):
        for i, (name, _) in enumerate(group):
            for what, tensors in fields.items():
                if not bool(tensors[i].to(dtype).isfinite().all()):
                    raise ValueError(f"layer {name!r}: {what} is too large for {dtype}")
    return values


def _gather(
    seen: list[tuple[Moments, int]], identity: int, group: "ProcessGroup", device: torch.device
) -> tuple[list[tuple[Moments, int]], int]:
    """Combine the moments of a client's processes; all of them use the first one's id."""
    sizes = [len(m.mean) for m, _ in seen]
    layers, channels = len(sizes), sum(sizes)
    head = [float(identity), *(m.count for m, _ in seen), *(refused for _, refused in seen)]
    counts = torch.tensor(head, dtype=torch.float64)
    mine = torch.cat([counts, *(m.mean for m, _ in seen), *(m.var for m, _ in seen)]).to(device)
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, mine, group=group)
    rows = torch.stack(parts).cpu()
    first, count, refused, mean, var = rows.split([1, layers, layers, channels, channels], 1)
    flat = union(count.long(), mean, var, torch.tensor(sizes))
    lost = refused.sum(0).long().tolist()
    return list(zip(split(flat, sizes), lost, strict=True)), int(first[0])
