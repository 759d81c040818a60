"""FederatedBatchNorm layers: torch's BatchNorm plus what the current round has seen.

A layer holds state and calls `moments`; no formula lives here. The accumulators are plain
attributes rather than buffers, so that they stay out of state_dict, keep their precision when the
model is cast, and are never broadcast by DistributedDataParallel.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .moments import Moments, Running, absorb, accumulator_dtype, in_transform, normalise

_STATE = ("_count", "_refused", "_seen", "_count_before", "_seen_before", "_pending")
_TENSORS = _STATE[:-1]
_PENDING = 64  # passes that are kept as they came before they are added up


class FederatedBatchNorm(_BatchNorm):
    """What all federated layers share; use the 1d, 2d or 3d class, or `fedbatchnorm.convert`.

    In training the input is normalised with the running statistics as constants (Algorithm 2,
    line 3), its moments are added to what the round has seen, and the running statistics are left
    alone: they belong to the server. In evaluation it is torch's own BatchNorm.
    """

    plain: type[_BatchNorm]  # torch's class (or the user's) that the layer was made from

    def __init__(self, *args, **kwargs):
        # The arguments are those of torch's class, which differ between versions of torch.
        super().__init__(*args, **kwargs)
        problem = settings_problem(self)
        if problem:
            raise ValueError(problem)

    def reset_running_stats(self) -> None:
        """Back to mean 0 and variance 1; what was seen is forgotten too."""
        super().reset_running_stats()
        if self.running_mean is not None:
            self.start_round()

    def start_round(self) -> None:
        """Forget what was seen."""
        like = self.running_mean
        assert like is not None
        self._pending: list[tuple[int | None, Moments]] = []
        if "_seen" in self.__dict__ and self._seen.device == like.device:
            for name in _TENSORS:
                getattr(self, name).zero_()  # in place: a compiled graph may hold these tensors
            return
        self._count = torch.zeros((), dtype=torch.int64, device=like.device)
        self._refused = torch.zeros((), dtype=torch.int64, device=like.device)
        self._seen = torch.zeros((2, self.num_features), dtype=accumulator_dtype(like), device=like.device)
        self._count_before = self._count.clone()
        self._seen_before = self._seen.clone()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training also measure, unless activation checkpointing is recomputing."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        running = Running(self.running_mean, self.running_var, eps=self.eps)
        y, moments = normalise(input, running, weight=self.weight, bias=self.bias)
        if torch.compiler.is_compiling():
            self._keep()
            self._add(moments)
        elif torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            remember = _Remember.apply if in_transform() else _remember
            remember(self, _version(self.weight), *moments)
        return y

    def discard_step(self) -> None:
        """Drop what the last step added; see `fedbatchnorm.discard_step`."""
        if self._pending:
            self._settle(self._last_step())
            dropped = [moments._replace(count=0) for _, moments in self._pending]
            self._add(_stack(dropped))  # nothing but the count of those that are not finite
            self._pending.clear()
        else:
            self._count.copy_(self._count_before)
            self._seen.copy_(self._seen_before)

    def seen(self) -> tuple[Moments, int]:
        """What the round has seen, as float64 on the CPU, and how many passes were refused."""
        self._settle(len(self._pending))
        seen = self._seen.detach().cpu().double()
        return Moments(int(self._count), seen[0].clone(), seen[1].clone()), int(self._refused)

    def _last_step(self) -> int:
        """Where in the pending passes the last step begins."""
        first = len(self._pending) - 1
        step = self._pending[first][0]
        while step is not None and first > 0 and self._pending[first - 1][0] == step:
            first -= 1
        return first

    def _settle(self, passes: int) -> None:
        """Add the first pending passes to the accumulators, all in one go."""
        if passes:
            self._add(_stack([moments for _, moments in self._pending[:passes]]))
            self._keep()
            del self._pending[:passes]

    def _keep(self) -> None:
        """From here on, a step that was not pending can be dropped."""
        self._count_before.copy_(self._count)
        self._seen_before.copy_(self._seen)

    def _add(self, moments: Moments) -> None:
        seen, refused = absorb(Moments(self._count, *self._seen), moments)
        self._count.copy_(torch.as_tensor(seen.count))
        self._seen.copy_(torch.stack([seen.mean, seen.var]))
        self._refused.add_(refused)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.running_mean is not None and self.running_mean.device != self._seen.device:
            if self._seen.is_meta or self.running_mean.is_meta:
                self.start_round()
            else:
                self._settle(len(self._pending))
                for name in _TENSORS:
                    setattr(self, name, getattr(self, name).to(self.running_mean.device))
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self.start_round()


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
    """What `torch.nn.SyncBatchNorm` becomes: any number of dimensions, nothing synchronised.

    A client with several GPUs brings its moments together in `collect(model, group=...)`.
    """

    plain = nn.SyncBatchNorm


_CLASSES: dict[type, type[FederatedBatchNorm]] = {
    c.plain: c
    for c in (FederatedBatchNorm1d, FederatedBatchNorm2d, FederatedBatchNorm3d, FederatedSyncBatchNorm)
}


@functools.cache
def federated_class(plain: type[_BatchNorm]) -> type[FederatedBatchNorm]:
    """The federated class for a BatchNorm class; a user's subclass keeps its own methods."""
    if plain in _CLASSES:
        return _CLASSES[plain]
    members = {"plain": plain, "__module__": plain.__module__, "__reduce_ex__": _reduce_subclass}
    return type(f"Federated{plain.__name__}", (FederatedBatchNorm, plain), members)


def settings_problem(layer: _BatchNorm) -> str | None:
    """Why a layer's settings cannot be federated, or None."""
    momentum, eps = layer.momentum, layer.eps
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return "track_running_stats is False, so there are no statistics to share; build it with True"
    if momentum is not None and not 0 < momentum <= 1:
        return f"momentum is {momentum}; it must be in (0, 1], or None for a plain average"
    if not (eps > 0 and math.isfinite(eps)):
        return f"eps is {eps}; it must be a positive number"
    return None


def _reduce_subclass(self, protocol):
    """Pickle a layer whose class was made at run time: by the class that it was made from."""
    return _restore_subclass, (self.plain,), self.__dict__


def _restore_subclass(plain):
    return federated_class(plain).__new__(federated_class(plain))


def _version(weight: Tensor | None) -> int | None:
    """A number that changes when the optimiser steps; None where nothing tells."""
    return weight._version if weight is not None and weight.requires_grad else None


def _stack(passes: list[Moments]) -> Moments:
    mean, var = torch.cat([m.mean for m in passes]), torch.cat([m.var for m in passes])
    return Moments(torch.tensor([m.count for m in passes for _ in m.mean], device=mean.device), mean, var)


def _remember(layer: FederatedBatchNorm, step: int | None, *moments: Any) -> None:
    layer._pending.append((step, Moments(*moments)))
    if len(layer._pending) >= _PENDING:
        layer._settle(layer._last_step())


class _Remember(torch.autograd.Function):
    """`_remember` below all function transforms; rows that vmap maps over are all kept."""

    @staticmethod
    def forward(layer, step, count, mean, var):
        _remember(layer, step, count, mean, var)
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
