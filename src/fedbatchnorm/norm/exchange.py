"""Between a model and the messages: read and load its statistics, collect what it has seen."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .convert import federated_layers
from .messages import Update, new_id, same_layers
from .moments import Moments, Running, combine, settings_problem
from .reduce import statistics_dtype
from .watch import note, refuse_averaging, warn_of_changes

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
    shared = {}
    for name, layer in federated_layers(model).items():
        mean, var, tracked = _buffers(layer)
        dtype = statistics_dtype(mean)
        mean, var = (t.detach().to("cpu", dtype, copy=True) for t in (mean, var))
        shared[name] = Running(mean, var, int(tracked), layer.momentum, layer.eps)
    return shared


def load_statistics(model: nn.Module, shared: Mapping[str, Running]) -> None:
    """Load shared statistics into a converted model; moments not yet collected are discarded.

    Everything is checked first: on an error the model is as it was. The momentum is the server's
    alone and is not loaded.

    Args:
        model: a converted model.
        shared: what `statistics` or `merge` returned, for the same layers.
    """
    layers = federated_layers(model)
    refuse_averaging(layers)
    same_layers(shared, layers)
    for name, layer in layers.items():
        check_running(name, shared[name], layer.num_features)
        dtype = _buffers(layer)[0].dtype
        for what in ("mean", "var"):
            if not bool(getattr(shared[name], what).to(dtype).isfinite().all()):
                raise ValueError(f"layer {name!r}: {what} is too large for {dtype}")
        if shared[name].eps != layer.eps:
            raise ValueError(
                f"layer {name!r}: eps is {layer.eps} in the model and {shared[name].eps} in the "
                "statistics; build the model the same way everywhere"
            )
    with torch.no_grad():
        for name, layer in layers.items():
            mean, var, tracked = _buffers(layer)
            mean.copy_(shared[name].mean)
            var.copy_(shared[name].var)
            tracked.fill_(shared[name].tracked)
            layer.start_round()
    note(layers.values())


def collect(model: nn.Module, *, group: "ProcessGroup | None" = None) -> Update:
    """Take what the model has seen since the last collect, and start anew.

    A warning names layers whose running statistics are no longer those that were loaded, as when a module
    calls `F.batch_norm` with a layer's buffers instead of the layer: what it normalized was not measured.
    (With `training=False` that cannot be noticed.) Layers that `convert` was told to skip are left out. So is
    what `torch.optim.swa_utils.update_bn` ran, which also resets what was seen before: collect before it.

    Args:
        model: a converted model.
        group: of a client that trains on several devices (DistributedDataParallel): the moments of
            all its processes are brought together, and each gets the same update.

    Returns:
        An `Update`: {layer name: Moments(count, mean, var)}. A layer in evaluation has count 0.

    Example:
        >>> import fedbatchnorm as fbn
        >>> model = fbn.convert(nn.Sequential(nn.BatchNorm1d(1)))
        >>> y = model(torch.tensor([[4.0], [8.0]]))
        >>> fbn.collect(model)["0"]
        Moments(count=2, mean=tensor([6.], dtype=torch.float64), var=tensor([4.], dtype=torch.float64))
    """
    layers = federated_layers(model)
    refuse_averaging(layers)
    warn_of_changes(layers)
    seen = {name: layer.seen() for name, layer in layers.items()}
    moments = {name: m for name, (m, _) in seen.items()}
    skipped = {name: refused for name, (_, refused) in seen.items()}
    identity = new_id()
    if group is not None:
        device = next((layer._seen.device for layer in layers.values()), torch.device("cpu"))
        moments, skipped, identity = _gather(moments, skipped, identity, group, device)
    for layer in layers.values():
        layer.start_round()
    skipped = {name: times for name, times in skipped.items() if times}
    current = sum(int(_buffers(layer)[2]) for layer in layers.values())
    return Update(moments, round=current, skipped=skipped, id=identity)


def discard_step(model: nn.Module) -> None:
    """Drop what the last step added, as when a loss scaler finds an overflow and skips it.

    A step is all passes since the optimiser changed the layer's weight or its gradient was cleared,
    so micro-batches of gradient accumulation go together, and layers that the step did not run keep
    what they have. Where that cannot be seen (no trainable weight, torch.compile), and for a layer
    called several times before the first gradient, it is the last pass.

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
        # A layer that the last step did not run was closed by the optimiser before.
        if is_open is not False or True not in states:
            layer.discard_step()
        layer.close_step()


def check_running(name: str, running: Running, channels: int | None = None) -> None:
    """Raise a ValueError that names the layer and the field if statistics are not usable."""
    if not isinstance(running, Running):
        raise ValueError(f"layer {name!r}: expected Running statistics, got {type(running).__name__}")
    for what in ("mean", "var"):
        value = getattr(running, what)
        expected = channels if channels is not None or what == "mean" else len(running.mean)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 1:
            raise ValueError(f"layer {name!r}: {what} must be a floating-point tensor of shape (channels,)")
        if expected is not None and len(value) != expected:
            raise ValueError(f"layer {name!r}: {what} has {len(value)} channels, expected {expected}")
        if not bool(value.isfinite().all()):
            raise ValueError(f"layer {name!r}: {what} is not finite")
    if bool((running.var < 0).any()):
        raise ValueError(f"layer {name!r}: var is negative")
    if not isinstance(running.tracked, int) or not 0 <= running.tracked < 2**63:
        raise ValueError(f"layer {name!r}: tracked is {running.tracked!r}, not a count")
    problem = settings_problem(running.momentum, running.eps)
    if problem:
        raise ValueError(f"layer {name!r}: {problem}")


def _buffers(layer) -> tuple[Tensor, Tensor, Tensor]:
    return layer.running_mean, layer.running_var, layer.num_batches_tracked


def _gather(moments, skipped, identity, group, device):
    """Combine the moments of a client's processes; all of them take the first one's id."""
    names = list(moments)
    flat = [torch.tensor([float(identity)], dtype=torch.float64)]
    for name in names:
        count, mean, var = moments[name]
        flat += [torch.tensor([count, skipped[name]], dtype=torch.float64), mean, var]
    mine = torch.cat(flat).to(device)
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, mine, group=group)
    rows = torch.stack(parts).cpu()
    merged, lost, at = {}, {}, 1
    for name in names:
        c = len(moments[name].mean)
        count, mean, var = rows[:, at], rows[:, at + 2 : at + 2 + c], rows[:, at + 2 + c : at + 2 + 2 * c]
        union = combine(Moments(count.long(), mean, var))
        merged[name] = Moments(int(union.count), union.mean, union.var)
        lost[name] = int(rows[:, at + 1].sum())
        at += 2 + 2 * c
    return merged, lost, int(rows[0, 0])
