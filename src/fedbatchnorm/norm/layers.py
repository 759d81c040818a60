"""FederatedBatchNorm layers: torch's BatchNorm plus what the current round has seen.

A layer holds state and calls `moments`; no formula lives here. The accumulators are plain
attributes rather than buffers, so that they stay out of state_dict, keep their precision when the
model is cast, and are never broadcast by DistributedDataParallel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .flat import Flat, grouped, on_cpu, side_by_side, split, union
from .gradient import GRADIENT, Limit, limit_for
from .moments import Moments, Running, absorb, accumulator_dtype, normalize, normalize_own, settings_problem
from .reduce import in_transform
from .watch import Noted, note, touched

_STATE = ("_count", "_refused", "_seen", "_count_before", "_seen_before", "_pending")
_TENSORS = _STATE[:-1]
_MARKS = ("_noted", "_averaging", "_was_reset", "_clean")
_PENDING = 64  # passes that are kept as they came before they are added up


class FederatedBatchNorm(_BatchNorm):
    """What all federated layers share; use the 1d, 2d or 3d class, or `fedbatchnorm.convert`.

    In training the input is normalized with the running statistics as constants (Algorithm 2, line 3), and
    its moments are added to those of the round. The running statistics do not change: only the server updates
    them. In evaluation the layer is torch's own BatchNorm.

    `gradient` is the share of BatchNorm's gradient that the backward pass uses (`norm.gradient`); 0 is the
    paper's federated BatchNorm. `limit` bounds the deviation and the mean of a normalized batch; None, as in
    the paper, is no limit. Set them with `fedbatchnorm.set_gradient`.
    """

    gradient: float = GRADIENT
    limit: Limit = None
    plain: type[_BatchNorm]  # torch's class (or the user's) that the layer was made from
    _noted: Noted | None = None  # the running statistics as they were given to the layer
    _averaging = False  # whether torch's update_bn is at work: then it is a plain BatchNorm
    _was_reset = False
    _clean: int | None = None  # the version of `_refused` when the accumulators were last set to 0

    def __init__(self, *args, **kwargs):
        # The arguments are those of torch's class, which differ between versions of torch.
        super().__init__(*args, **kwargs)
        problem = layer_problem(self)
        if problem:
            raise ValueError(problem)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; the running statistics' momentum has a second meaning.

        Resetting the statistics and then setting `momentum` to None is what `torch.optim.swa_utils.update_bn`
        and Lightning's StochasticWeightAveraging do: until it is set once more, a layer in training is a
        plain BatchNorm that averages its statistics over batches. It discards what was measured in the round
        and measures nothing in the meantime, so call `collect` first.
        """
        super().__setattr__(name, value)  # pyrefly: ignore
        if name == "momentum":  # no property: torch 2.9 cannot compile one of a name that torch's class sets
            begins = value is None and "_seen" in self.__dict__ and self._starts_over()
            if begins:
                self.start_round()
            if begins or self._averaging:
                note([self])
            self._averaging = begins

    def _starts_over(self) -> bool:
        """Whether the statistics were reset, in place or by new tensors, and nothing was done since."""
        mean, var, noted = self.running_mean, self.running_var, self._noted
        if self._was_reset:
            return not self.seen()[0].count
        if noted is None or noted.mean is mean or noted.var is var:
            return False
        assert mean is not None
        assert var is not None
        return not bool(mean.any()) and bool((var == 1).all())

    def reset_running_stats(self) -> None:
        """Back to mean 0 and variance 1; what was measured is discarded, too."""
        super().reset_running_stats()
        if self.running_mean is not None:
            self.start_round()
            note([self])
            self._was_reset = True

    def reset_parameters(self) -> None:
        """As torch's; what was measured is discarded, too."""
        super().reset_parameters()
        self._was_reset = False

    def start_round(self) -> None:
        """Discard what was measured."""
        like = self.running_mean
        assert like is not None
        self._pending: list[_Pass] = []
        if "_seen" in self.__dict__ and self._seen.device == like.device:
            if self._added:
                torch._foreach_zero_(
                    self._accumulators()
                )  # in place: a compiled graph may hold these tensors
                self._note_clean()
            return
        with torch.inference_mode(False):  # tensors made inside could not be changed outside
            self._count = torch.zeros((), dtype=torch.int64, device=like.device)
            self._refused = torch.zeros((), dtype=torch.int64, device=like.device)
            shape = (2, self.num_features)
            self._seen = torch.zeros(shape, dtype=accumulator_dtype(like), device=like.device)
            self._count_before = self._count.clone()
            self._seen_before = self._seen.clone()
        self._note_clean()

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training also measure, unless activation checkpointing is recomputing."""
        if not self.training or self._averaging:
            return super().forward(input)
        self._check_input_dim(input)
        if "_is_replica" in self.__dict__:
            raise RuntimeError("DataParallel would mix up what its replicas see: use DistributedDataParallel")
        buffers = self._buffers  # as attributes they would take several times as long
        running = Running(buffers["running_mean"], buffers["running_var"], eps=self.eps)  # pyrefly: ignore
        weight, bias, gradient = self.weight, self.bias, self.gradient
        limit = limit_for(gradient) if self.limit == "auto" else self.limit
        if torch.compiler.is_compiling() or in_transform():
            y, moments = normalize(input, running, weight=weight, bias=bias, gradient=gradient, limit=limit)
            if torch.compiler.is_compiling():
                self._keep()
                self._add(moments)
            elif _is_forward():
                _Remember.apply(self, None, *moments)
            return y
        y, moments = normalize_own(input, running, weight, bias, gradient, limit)
        if _is_forward():
            self._remember(weight, moments)
        return y

    def step_is_open(self) -> bool | None:
        """Whether the optimizer has left the weight alone since the last pass; None if unknown."""
        if not self._pending or self._pending[-1].version is None:
            return None
        return self._pending[-1].version == _version(self.weight)

    def discard_step(self) -> None:
        """Drop what the last step added; see `fedbatchnorm.discard_step`."""
        if self._added and bool(self._count != self._count_before):  # it was compiled
            self._count.copy_(self._count_before)
            self._seen.copy_(self._seen_before)
        elif self._pending:
            self._settle(self._last_step())
            dropped = [p.moments._replace(count=0) for p in self._pending]
            self._add(_stack(dropped, self._seen.device))  # nothing but the count of those not finite
            self._pending.clear()

    def close_step(self) -> None:
        """From now on, nothing measured so far can be dropped."""
        self._settle(len(self._pending))
        self._keep()

    def seen(self) -> tuple[Moments, int]:
        """What the round has seen, as float64 on the CPU, and how many passes were refused."""
        return seen_by([self])[0][0]

    def _accumulators(self) -> list[Tensor]:
        return [getattr(self, name) for name in _TENSORS]

    def _remember(self, weight: Tensor | None, moments: Moments) -> None:
        """Store a pass; long lists are added up together, so that a single pass costs very little.

        A pass begins a step if the weight has changed since the last pass, or has no gradient yet, because
        the changes of some optimizers cannot be detected.
        """
        version, pending = _version(weight), self._pending
        if not pending:
            begins = True
            if self._added:
                self._keep()  # what a compiled pass added before is no longer the last step
        else:
            begins = version is None or version != pending[-1].version or weight.grad is None  # pyrefly: ignore
        pending.append(_Pass(begins, version, moments))
        if len(pending) >= _PENDING:
            self._settle(self._last_step())
        if len(pending) >= _PENDING:  # all one step: one entry for all of it
            nothing = Moments(torch.zeros_like(self._count), *torch.zeros_like(self._seen))
            step, refused = absorb(nothing, _stack([p.moments for p in pending], self._seen.device))
            self._refused.add_(refused)
            pending[:] = [_Pass(True, version, step._replace(count=int(step.count)))]

    def _last_step(self) -> int:
        """Where the last step begins in the pending passes."""
        return max(i for i, p in enumerate(self._pending) if p.begins)

    def _settle(self, passes: int) -> None:
        """Add the first pending passes to the accumulators, all at once."""
        if passes:
            self._add(_stack([p.moments for p in self._pending[:passes]], self._seen.device))
            self._keep()
            del self._pending[:passes]

    def _keep(self) -> None:
        """Remember the accumulators' state, to which dropping a compiled step returns."""
        self._count_before.copy_(self._count)
        self._seen_before.copy_(self._seen)

    def _add(self, moments: Moments) -> None:
        seen, refused = absorb(Moments(self._count, *self._seen), moments)
        self._count.copy_(torch.as_tensor(seen.count))
        self._seen.copy_(torch.stack([seen.mean, seen.var]))
        self._refused.add_(refused)

    @property
    def _added(self) -> bool:
        """Whether the accumulators may hold anything.

        Asking them would wait for the device, and compiled code may not set an attribute within a checkpoint.
        But everything that adds to them changes a tensor's version.
        """
        return self._clean is None or self._clean != self._refused._version

    def _note_clean(self) -> None:
        """The accumulators are 0."""
        self._clean = None if self._refused.is_inference() else self._refused._version

    def __getstate__(self) -> dict[str, object]:
        """All but `_clean`: a copy of a tensor has a version of its own."""
        return {name: value for name, value in super().__getstate__().items() if name != "_clean"}

    def _apply(self, fn, recurse=True):
        as_given = self.running_mean is not None and self._noted is not None and not touched({"": self})
        super()._apply(fn, recurse)
        if as_given:
            note([self])
        if self.running_mean is not None and self.running_mean.device != self._seen.device:
            if self._seen.is_meta or self.running_mean.is_meta:
                self.start_round()
            else:
                self._clean = None
                for name in _TENSORS:
                    setattr(self, name, getattr(self, name).to(self.running_mean.device))
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self.start_round()
        note([self])


def _is_forward() -> bool:
    """Whether no backward pass is at work, as where activation checkpointing computes anew."""
    return torch._C._current_graph_task_id() == -1


def _version(weight: Tensor | None) -> int | None:
    """A number that changes when the optimizer steps; None where nothing tells."""
    if weight is None or not weight.requires_grad or not weight.is_leaf:
        return None
    return weight._version


def seen_by(
    layers: Sequence[FederatedBatchNorm], beside: Sequence[Tensor] = ()
) -> tuple[list[tuple[Moments, int]], list[Tensor]]:
    """What each layer has seen in the round, float64 on the CPU, and how many passes it refused.

    Layers that saw equally many passes are taken together: the number of operations does not grow with them,
    and a device is waited for once.

    Args:
        layers: any.
        beside: what else is to be read from the device; it comes back on the CPU.
    """
    groups = grouped(range(len(layers)), lambda i: _kind(layers[i]))
    held = [_gathered([layers[i] for i in group]) for group in groups]
    values = iter(on_cpu([*(t for tensors in held for t in tensors), *beside]))
    found: list[tuple[Moments, int] | None] = [None] * len(layers)
    for group, tensors in zip(groups, held, strict=True):
        members = [layers[i] for i in group]
        sizes = [layer.num_features for layer in members]
        flat = _union(members, sizes, [next(values) for _ in tensors])
        for i, moments, refused in zip(group, split(flat, sizes), flat.refused.tolist(), strict=True):
            found[i] = moments, refused
    return found, list(values)  # pyrefly: ignore


def start_rounds(layers: Sequence[FederatedBatchNorm]) -> None:
    """`start_round` for many layers at once."""
    for group in grouped(layers, _devices):
        if len(set(_devices(group[0]))) > 1:
            for layer in group:
                layer.start_round()
            continue
        for layer in group:
            layer._pending.clear()
        added = [layer for layer in group if layer._added]
        if added:
            for kind in zip(*(layer._accumulators() for layer in added), strict=True):
                torch._foreach_zero_(kind)
            for layer in added:
                layer._note_clean()


def _devices(layer: FederatedBatchNorm) -> tuple[torch.device, torch.device]:
    return layer._seen.device, layer._buffers["running_mean"].device  # pyrefly: ignore


def _kind(layer: FederatedBatchNorm) -> tuple:
    """What layers must have in common to be handled together."""
    return (
        layer._seen.device,
        layer._seen.dtype,
        layer._added,
        *[p.moments.mean.shape[:-1] for p in layer._pending],
    )


def _gathered(layers: list[FederatedBatchNorm]) -> list[Tensor]:
    """What is to be read of layers of one kind: count and refused of each with what was added up, if anything
    may have been, and for every pending pass the means, then the variances of all, (d,) or (n, d) each."""
    held = []
    if layers[0]._added or not layers[0]._pending:
        numbers = torch.stack([n for layer in layers for n in (layer._count, layer._refused)])
        held += [numbers, side_by_side([layer._seen for layer in layers], 1)]
    for moments in zip(*([p.moments for p in layer._pending] for layer in layers), strict=True):
        held.append(side_by_side([*(m.mean for m in moments), *(m.var for m in moments)], -1))
    return held


def _union(layers: list[FederatedBatchNorm], sizes: list[int], held: list[Tensor]) -> Flat:
    """What these layers have seen, pending passes included, from what was gathered, on the CPU."""
    counts, values, refused = [], [], torch.zeros(len(layers), dtype=torch.int64)  # (rows, L), (2, rows, d)
    passes = len(layers[0]._pending)
    if len(held) > passes:
        numbers, seen, *held = held
        count, refused = numbers.view(-1, 2).unbind(1)
        counts.append(count.unsqueeze(0))
        values.append(seen.double().unsqueeze(1))
    for i, both in enumerate(held):
        values.append(both.detach().double().view(-1, 2, sum(sizes)).transpose(0, 1))
        rows = values[-1].shape[1]
        counts.append(torch.tensor([[layer._pending[i].moments.count for layer in layers]] * rows))
    count, (mean, var) = torch.cat(counts), torch.cat(values, 1)
    if len(count) == 1 and (mean.sum() + var.sum()).isfinite():
        return Flat(count[0], refused, mean[0], var[0])  # a union of one
    flat = union(count, mean, var, torch.tensor(sizes))
    return flat._replace(refused=flat.refused + refused)


class FederatedBatchNorm1d(FederatedBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` with statistics shared by a federation.

    Example:
        >>> layer = FederatedBatchNorm1d(3)
        >>> y = layer(torch.randn(8, 3))
        >>> int(layer.running_mean.abs().sum()), layer.seen()[0].count
        (0, 8)
    """

    plain = nn.BatchNorm1d


class FederatedBatchNorm2d(FederatedBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` with statistics shared by a federation."""

    plain = nn.BatchNorm2d


class FederatedBatchNorm3d(FederatedBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` with statistics shared by a federation."""

    plain = nn.BatchNorm3d


class FederatedSyncBatchNorm(FederatedBatchNorm, nn.SyncBatchNorm):
    """What `torch.nn.SyncBatchNorm` becomes: any number of dimensions, nothing synchronized.

    A client with several GPUs combines its moments in `collect(model, group=...)`.
    """

    plain = nn.SyncBatchNorm


def layer_problem(layer: _BatchNorm) -> str | None:
    """Why a layer's settings cannot be federated, or None."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return "track_running_stats is False, so there are no statistics to share; build it with True"
    if layer.num_batches_tracked is None:
        return "num_batches_tracked is None, so the server's counter cannot be stored; build the layer again"
    return settings_problem(layer.momentum, layer.eps)


class _Pass(NamedTuple):
    """One forward pass, waiting to be added up: whether it begins a step, and what it saw."""

    begins: bool
    version: int | None
    moments: Moments


def _stack(passes: list[Moments], device: torch.device) -> Moments:
    """Rows of passes, each of which has moments of shape (c,) or, mapped over clients, (n, c)."""
    means, variances = ([torch.atleast_2d(p[i]) for p in passes] for i in (1, 2))
    rows = [p.count for p, mean in zip(passes, means, strict=True) for _ in mean]
    mean, var = side_by_side(means).to(device), side_by_side(variances).to(device)
    return Moments(torch.tensor(rows, device=device), mean, var)


class _Remember(torch.autograd.Function):
    """Keep a pass below all function transforms; rows that vmap maps over are all kept."""

    @staticmethod
    def forward(layer, version, count, mean, var):
        layer._remember(version, Moments(count, mean, var))
        return mean.new_empty(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, *grads):
        return (None,) * 5

    @staticmethod
    def jvp(ctx, *tangents):
        return None

    @staticmethod
    def vmap(info, in_dims, *args):
        rows = [t.movedim(d, 0).flatten(0, 1) for t, d in zip(args[3:], in_dims[3:], strict=True)]
        return _Remember.apply(*args[:3], *rows), None
