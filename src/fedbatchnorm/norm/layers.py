"""FederatedBatchNorm layers: torch's BatchNorm plus what the current round has seen.

A layer holds state and calls `moments`; no formula lives here. The accumulators are plain
attributes rather than buffers, so that they stay out of state_dict, keep their precision when the
model is cast, and are never broadcast by DistributedDataParallel.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .moments import Moments, Running, _accumulator_dtype, absorb, normalise

_STATE = ("_count", "_refused", "_seen", "_count_before", "_seen_before", "_step")


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
        if "_seen" in self.__dict__ and self._seen.device == like.device:
            for name in _STATE[:-1]:
                getattr(self, name).zero_()  # in place: a compiled graph may hold these tensors
            self._step = None
            return
        self._count = torch.zeros((), dtype=torch.int64, device=like.device)
        self._refused = torch.zeros((), dtype=torch.int64, device=like.device)
        self._seen = torch.zeros((2, self.num_features), dtype=_accumulator_dtype(like), device=like.device)
        self._count_before = self._count.clone()
        self._seen_before = self._seen.clone()
        self._step: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training also measure, unless activation checkpointing is recomputing."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        running = Running(self.running_mean, self.running_var, eps=self.eps)
        y, seen = normalise(input, running, weight=self.weight, bias=self.bias)
        if torch.compiler.is_compiling():
            _absorb_in_place(self, True, *seen)
        elif torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            step = _version(self.weight)
            _Absorb.apply(self, step is None or step != self._step, *seen)
            self._step = step
        return y

    def discard_step(self) -> None:
        """Drop what the last step added; see `fedbatchnorm.discard_step`."""
        self._count.copy_(self._count_before)
        self._seen.copy_(self._seen_before)
        self._step = None

    def seen(self) -> tuple[Moments, int]:
        """What the round has seen, as float64 on the CPU, and how many passes were refused."""
        seen = self._seen.detach().cpu().double()
        return Moments(int(self._count), seen[0].clone(), seen[1].clone()), int(self._refused)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.running_mean is not None and self.running_mean.device != self._seen.device:
            if self._seen.is_meta or self.running_mean.is_meta:
                self.start_round()
            else:
                for name in _STATE[:-1]:
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


def _absorb_in_place(
    layer: FederatedBatchNorm, new_step: bool, count: int, mean: Tensor, var: Tensor
) -> None:
    """Add moments to what the layer has seen, keeping what was there before the step began."""
    if new_step:
        layer._count_before.copy_(layer._count)
        layer._seen_before.copy_(layer._seen)
    (total, *merged), refused = absorb(Moments(layer._count, *layer._seen), Moments(count, mean, var))
    layer._count.copy_(total)
    layer._seen.copy_(torch.stack(merged))
    layer._refused.add_(refused)


class _Absorb(torch.autograd.Function):
    """`_absorb_in_place` below all function transforms; rows that vmap maps over are all added."""

    @staticmethod
    def forward(layer, new_step, count, mean, var):
        _absorb_in_place(layer, new_step, count, mean, var)
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
        return _Absorb.apply(*args[:3], *rows), None
