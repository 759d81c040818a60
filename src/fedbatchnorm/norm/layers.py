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

from .flat import Flat, grouped, side_by_side, split, union
from .gradient import GRADIENT, Limit, limit_for
from .moments import Moments, Running, absorb, accumulator_dtype, normalize, settings_problem
from .reduce import in_transform
from .watch import Noted, note, touched

_STATE = ("_count", "_refused", "_seen", "_count_before", "_seen_before", "_pending")
_TENSORS = _STATE[:-1]
_MARKS = ("_noted", "_averaging", "_was_reset")
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

    def __init__(self, *args, **kwargs):
        # The arguments are those of torch's class, which differ between versions of torch.
        super().__init__(*args, **kwargs)
        problem = layer_problem(self)
        if problem:
            raise ValueError(problem)

    @property
    def momentum(self) -> float | None:
        """The running statistics' momentum, as in BatchNorm.

        Resetting the statistics and then setting this to None is what `torch.optim.swa_utils.update_bn` and
        Lightning's StochasticWeightAveraging do: until it is set once more, a layer in training is a plain
        BatchNorm that averages its statistics over batches. It discards what was measured in the round and
        measures nothing in the meantime, so call `collect` first.
        """
        try:
            return self.__dict__["momentum"]  # where torch's class has it
        except KeyError:
            raise AttributeError("momentum") from None

    @momentum.setter
    def momentum(self, value: float | None) -> None:
        self.__dict__["momentum"] = value
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
            torch._foreach_zero_(self._accumulators())  # in place: a compiled graph may hold these tensors
            return
        with torch.inference_mode(False):  # tensors made inside could not be changed outside
            self._count = torch.zeros((), dtype=torch.int64, device=like.device)
            self._refused = torch.zeros((), dtype=torch.int64, device=like.device)
            shape = (2, self.num_features)
            self._seen = torch.zeros(shape, dtype=accumulator_dtype(like), device=like.device)
            self._count_before = self._count.clone()
            self._seen_before = self._seen.clone()

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training also measure, unless activation checkpointing is recomputing."""
        if not self.training or self._averaging:
            return super().forward(input)
        self._check_input_dim(input)
        if "_is_replica" in self.__dict__:
            raise RuntimeError("DataParallel would mix up what its replicas see: use DistributedDataParallel")
        assert self.running_mean is not None
        assert self.running_var is not None
        running = Running(self.running_mean, self.running_var, eps=self.eps)
        limit = limit_for(self.gradient) if self.limit == "auto" else self.limit
        held = {"gradient": self.gradient, "limit": limit}
        y, moments = normalize(input, running, weight=self.weight, bias=self.bias, **held)
        if torch.compiler.is_compiling():
            self._keep()
            self._add(moments)
        elif torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            if in_transform():
                _Remember.apply(self, None, *moments)
            else:
                self._remember(self._weight_version(), moments)
        return y

    def step_is_open(self) -> bool | None:
        """Whether the optimizer has left the weight alone since the last pass; None if unknown."""
        if not self._pending or self._pending[-1].version is None:
            return None
        return self._pending[-1].version == self._weight_version()

    def discard_step(self) -> None:
        """Drop what the last step added; see `fedbatchnorm.discard_step`."""
        if bool(self._count != self._count_before):  # it was compiled
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
        return seen_by([self])[0]

    def _accumulators(self) -> list[Tensor]:
        return [getattr(self, name) for name in _TENSORS]

    def _weight_version(self) -> int | None:
        """A number that changes when the optimizer steps; None if that cannot be detected."""
        weight = self.weight
        known = weight is not None and weight.requires_grad and weight.is_leaf
        return weight._version if known else None

    def _remember(self, version: int | None, moments: Moments) -> None:
        """Store a pass; long lists are added up together, so that a single pass costs very little.

        A pass begins a step if the weight has changed since the last pass, or has no gradient yet, because
        the changes of some optimizers cannot be detected.
        """
        begins = version is None or self.weight.grad is None
        if not self._pending:
            begins = True
            self._keep()  # what a compiled pass added before is no longer the last step
        self._pending.append(_Pass(begins or version != self._pending[-1].version, version, moments))
        if len(self._pending) >= _PENDING:
            self._settle(self._last_step())
        if len(self._pending) >= _PENDING:  # all one step: one entry for all of it
            nothing = Moments(torch.zeros_like(self._count), *torch.zeros_like(self._seen))
            step, refused = absorb(nothing, _stack([p.moments for p in self._pending], self._seen.device))
            self._refused.add_(refused)
            rows = Moments(int(step.count), step.mean.unsqueeze(0), step.var.unsqueeze(0))
            self._pending[:] = [_Pass(True, version, rows)]

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

    def _apply(self, fn, recurse=True):
        as_given = self.running_mean is not None and self._noted is not None and not touched({"": self})
        super()._apply(fn, recurse)
        if as_given:
            note([self])
        if self.running_mean is not None and self.running_mean.device != self._seen.device:
            if self._seen.is_meta or self.running_mean.is_meta:
                self.start_round()
            else:
                for name in _TENSORS:
                    setattr(self, name, getattr(self, name).to(self.running_mean.device))
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self.start_round()
        note([self])


def seen_by(layers: Sequence[FederatedBatchNorm]) -> list[tuple[Moments, int]]:
    """What each layer has seen in the round, float64 on the CPU, and how many passes it refused.

    Layers that saw equally many passes are taken together: the number of operations does not grow with them,
    and a device is waited for twice.
    """
    found: list[tuple[Moments, int] | None] = [None] * len(layers)
    for group in grouped(range(len(layers)), lambda i: _kind(layers[i])):
        sizes = [layers[i].num_features for i in group]
        flat = _union([layers[i] for i in group], sizes)
        for i, moments, refused in zip(group, split(flat, sizes), flat.refused.tolist(), strict=True):
            found[i] = moments, refused
    return found  # pyrefly: ignore


def start_rounds(layers: Sequence[FederatedBatchNorm]) -> None:
    """`start_round` for many layers at once."""
    for group in grouped(layers, _devices):
        if len(set(_devices(group[0]))) > 1:
            for layer in group:
                layer.start_round()
            continue
        for layer in group:
            layer._pending.clear()
        if not _untouched(group):
            for kind in zip(*(layer._accumulators() for layer in group), strict=True):
                torch._foreach_zero_(kind)


def _untouched(layers: Sequence[FederatedBatchNorm]) -> bool:
    """Whether the accumulators are known to be empty: nothing was added up and nothing was refused.

    Reading two numbers of each layer takes a CPU less than writing to all of them; elsewhere it would wait.
    """
    if layers[0]._seen.device.type != "cpu":
        return False
    return not torch.stack([number for layer in layers for number in (layer._count, layer._refused)]).any()


def _devices(layer: FederatedBatchNorm) -> tuple[torch.device, torch.device]:
    return layer._seen.device, layer._buffers["running_mean"].device  # pyrefly: ignore


def _kind(layer: FederatedBatchNorm) -> tuple:
    """What layers must have in common to be handled together."""
    return layer._seen.device, layer._seen.dtype, tuple(len(p.moments.mean) for p in layer._pending)


def _union(layers: list[FederatedBatchNorm], sizes: list[int]) -> Flat:
    """What these layers have seen, pending passes included, on the CPU."""
    like, counts, values = layers[0]._seen, [], []  # (rows, L), (2, rows, d)
    passes = range(len(layers[0]._pending))
    if not passes or not _untouched(layers):
        counts.append(torch.stack([layer._count for layer in layers]).unsqueeze(0))
        values.append(side_by_side([layer._seen for layer in layers], 1).unsqueeze(1))
    for i in passes:
        moments = [layer._pending[i].moments for layer in layers]
        both = side_by_side([m.mean for m in moments], 1), side_by_side([m.var for m in moments], 1)
        values.append(torch.stack(both).to(like))
        counts += [torch.tensor([[m.count for m in moments]] * len(moments[0].mean), device=like.device)]
    count, (mean, var) = torch.cat(counts), torch.cat(values, 1)
    refused = torch.stack([layer._refused for layer in layers])
    if len(count) == 1 and like.device.type == "cpu" and (mean.sum() + var.sum()).isfinite():
        return Flat(count[0], refused, mean[0].double(), var[0].double())  # a union of one
    flat = union(count, mean, var, torch.tensor(sizes, device=like.device))
    refused = flat.refused + refused
    numbers = torch.stack([flat.count, refused]).cpu()
    mean, var = torch.stack([flat.mean, flat.var]).detach().cpu().double()
    return Flat(numbers[0], numbers[1], mean, var)


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
    counts = torch.tensor([p.count for p in passes for _ in range(len(p.mean))], device=device)
    means, variances = side_by_side([p.mean for p in passes]), side_by_side([p.var for p in passes])
    return Moments(counts, means.to(device), variances.to(device))


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
