"""A share of BatchNorm's gradient for a layer that normalizes with constants.

If statistics are constants in the backward pass, nothing holds a channel's mean and scale. Gradients push
them in every round, because the next merge undoes the effect. BatchNorm's own gradient has no such part. Here
the forward pass stays the same, and a share rho of that part is removed from the gradient:

    dx = (1/s) (g - rho [mean(g) + b mean(g b)]),   b = (x - u) / sqrt(var + eps)

with u and var those of the batch itself. rho = 0 is federated BatchNorm as published; rho = 1 leaves nothing
that moves the batch's mean or scale. In addition, a limit bounds how far the mean and deviation of a
normalized batch may be from 0 and 1.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .reduce import over_channels, statistics_dtype

GRADIENT = 0.7  # what practitioners get: docs/training.md has the measurements
_WIDTH = 2.5  # of the limit that goes with a share; measured, too
_APART = 100.0  # how much a layer may let through for what lies between clients; measured on digits
_STEADY = 0.3  # what is let through at most with several local steps (`aggregation.drift`)
_FEW_CALLS_CPU, _FEW_CALLS = 2**17, 2**22  # values up to which calls cost more than the arithmetic
_SHORT = 8  # values of a channel of one sample, up to which the kernels behind torch's BatchNorm crawl
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
Limit = float | Literal["auto"] | None


def check_share(gradient: float) -> float:
    """The share as a float; an error says what it must be."""
    if isinstance(gradient, bool) or not isinstance(gradient, (int, float)) or not 0 <= gradient <= 1:
        raise ValueError(
            f"gradient is {gradient!r}; it must be between 0 (the paper's federated BatchNorm) and 1 "
            "(BatchNorm's gradient)"
        )
    return float(gradient)


def check_limit(limit: Limit) -> Limit:
    """The limit as a float, "auto" or None; an error says what it must be."""
    if limit is None or limit == "auto":
        return limit
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 1 <= limit < math.inf:
        raise ValueError(f"limit is {limit!r}; it must be a number from 1 on, 'auto', or None for no limit")
    return float(limit)


def check_between(between: Mapping[str, float]) -> dict[str, float]:
    """Parts of layers' variances that lie between clients, by name; an error says what they must be."""
    if not isinstance(between, Mapping):
        raise ValueError(
            f"between is {type(between).__name__}; it must be layer name -> a number from 0 to 1"
        )
    for name, part in between.items():
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part <= 1:
            raise ValueError(f"between: {part!r} for layer {name!r}; it must be a number from 0 to 1")
    return {name: float(part) for name, part in between.items()}


def share_by_layer(share: float | Tensor, between: Tensor) -> Tensor:
    """Each layer's own share, from the part f of its variance that lies between clients.

    1 - min(1 - share, 100 f max(1 - share, 0.3))

    A share below 1 keeps the signal between clients (docs/training.md). In a layer where clients are alike
    there is no such signal, and nearly all of BatchNorm's gradient can be used. Where the drift has long been
    small and the share is near 0, a layer is held only if hardly anything lies between clients.

    Args:
        share: the share set by the drift; no layer uses less.
        between: (layers,), from 0 (clients' means are the same) to 1; 1 where it is not known.

    Example:
        >>> share_by_layer(0.75, torch.tensor([0.0, 0.005, 0.1, 1.0]))
        tensor([1.0000, 0.8500, 0.7500, 0.7500])
        >>> share_by_layer(0.0, torch.tensor([0.0, 0.005, 0.01]))
        tensor([1.0000, 0.5000, 0.0000])
    """
    most = 1 - share
    floor = most.clamp(min=_STEADY) if isinstance(most, Tensor) else max(most, _STEADY)
    through = (_APART * floor * between).clamp(max=most)
    return torch.where(through == most, share, 1 - through)  # not 1 - (1 - share), which is rounded


def limit_for(share: float | Tensor) -> float | Tensor:
    """The limit that goes with a share where it is "auto": 1 + 2.5 (1 - share).

    With a share of 1 every batch is brought back to the shared mean and deviation. With a share of 0, only a
    batch that is 3.5 times as wide or 5 deviations away.

    Example:
        >>> limit_for(1.0), limit_for(0.8), limit_for(0.0)
        (1.0, 1.5, 3.5)
    """
    return 1 + _WIDTH * (1 - share)


def limited(
    mean: Tensor, var: Tensor, seen_mean: Tensor, seen_var: Tensor, eps: float, limit: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The mean and variance that each client normalizes with under a limit.

    v' + eps = max(v + eps, (s^2 + eps) / L^2), so that no deviation is larger than L; then m' is the mean
    nearest to m with |u - m'| <= 2 (L - 1) sqrt(v' + eps).

    Args:
        mean: (c,), the shared statistics.
        var: (c,).
        seen_mean: (clients, c), of each client's batch.
        seen_var: (clients, c).
        eps: added to variances.
        limit: L, from 1 on.

    Returns:
        Mean and variance, (clients, c), or (c,) for a single client.

    Example:
        >>> shared, seen = torch.zeros(1), torch.tensor([[9.0]])
        >>> mean, var = limited(shared, shared + 1, seen, torch.tensor([[16.0]]), 0.0, 2.0)
        >>> mean.item(), var.item()  # 9 is brought to 2 deviations of 2 from the mean, and 4 to twice 2
        (5.0, 4.0)
    """
    var = torch.maximum(var, ((seen_var + eps) / limit**2 - eps).to(var.dtype))
    away = (2 * (limit - 1) * (var + eps).sqrt()).to(mean.dtype)
    seen_mean = seen_mean.to(mean.dtype)
    mean = torch.minimum(torch.maximum(mean, seen_mean - away), seen_mean + away)
    return (mean[0], var[0]) if len(mean) == 1 else (mean, var)


class Batch(NamedTuple):
    """What the gradient needs to know about the batches it is taken on.

    mean, var: (clients, c), of each client's values, biased.
    eps: added to var.
    keep: (clients * batch,), 1 for samples that count, where batches are filled up; else None.
    """

    mean: Tensor
    var: Tensor
    eps: float
    keep: Tensor | None = None


def hold(x: Tensor, batch: Batch, share: float | Tensor) -> Tensor:
    """The input itself, but for its gradient: h becomes h - share [mean(h) + b mean(h b)] for each client.

    Args:
        x: (clients * batch, c, ...), the clients' batches one after another.
        batch: their moments, as constants.
        share: rho, from 0 to 1.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], requires_grad=True)
        >>> batch = Batch(torch.tensor([[2.0]]), torch.tensor([[1.0]]), 0.0)
        >>> (hold(x, batch, 0.5) * torch.tensor([[4.0], [2.0]])).sum().backward()
        >>> x.grad.flatten().tolist()  # mean 3, slope -1
        [2.0, 1.0]
    """
    return _Hold.apply(x, batch.mean, batch.var, batch.keep, batch.eps, share)  # pyrefly: ignore


def normalize_and_hold(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch_mean: Tensor,
    batch_var: Tensor,
    eps: float,
    share: float | Tensor,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias with `hold` before it, for one client.

    It is done in torch's kernels, or written out where it is compiled.

    Args:
        x: (batch, c, ...).
        mean: (c,), the shared statistics, as constants.
        var: (c,).
        weight: (c,) or None.
        bias: (c,) or None.
        batch_mean: (c,), of x.
        batch_var: (c,).
        eps: added to variances.
        share: rho.
    """
    how = _WrittenOut if torch.compiler.is_compiling() else _NormalizeAndHold
    return how.apply(x, mean, var, weight, bias, batch_mean, batch_var, eps, share)  # pyrefly: ignore


def held(
    h: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    keep: Tensor | None,
    eps: float,
    share: float | Tensor,
) -> Tensor:
    """h - share [mean(h) + b mean(h b)], written out; the means are over each client's samples that count."""
    clients, dtype = len(mean), statistics_dtype(x)
    parts, values = (t.to(dtype).unflatten(0, (clients, -1)) for t in (h, x))
    over = [1, *range(3, parts.dim())]
    mean, var = (t.to(dtype).view(clients, 1, -1, *[1] * (parts.dim() - 3)) for t in (mean, var))
    b = (values - mean) * (var + eps).rsqrt()
    if keep is None:
        level, slope = parts.mean(over, keepdim=True), (parts * b).mean(over, keepdim=True)
        return (parts - share * (level + b * slope)).flatten(0, 1).to(h.dtype)
    kept = keep.to(dtype).view(clients, -1, *[1] * (x.dim() - 1))
    count = kept.sum(1, keepdim=True) * x[0, 0].numel()
    level, slope = ((t * kept).sum(over, keepdim=True) / count for t in (parts, parts * b))
    return (parts - share * kept * (level + b * slope)).flatten(0, 1).to(h.dtype)


class _Hold(torch.autograd.Function):
    """`hold`; maps over clients with `vmap`, and compiles, for it is written in torch's operations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, mean, var, keep, eps, share):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, mean, var, keep, ctx.eps, ctx.share = inputs
        ctx.save_for_backward(x, mean, var, keep)

    @staticmethod
    def backward(ctx, *gradients):
        x, mean, var, keep = ctx.saved_tensors
        return held(gradients[0], x, mean, var, keep, ctx.eps, ctx.share), None, None, None, None, None


class _NormalizeAndHold(torch.autograd.Function):
    """One client's layer in torch's own kernels: its backward pass costs what BatchNorm's does."""

    @staticmethod
    def forward(ctx, x, mean, var, weight, bias, batch_mean, batch_var, eps, share):
        # No `setup_context`: it binds arguments by the signature, which takes longer than a small layer.
        ctx.eps, ctx.share = eps, share
        ctx.save_for_backward(x, mean, var, weight, batch_mean, batch_var)
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, True)

    @staticmethod
    def backward(ctx, *gradients):
        like, *constants = ctx.saved_tensors
        g, x = gradients[0], like
        if torch.is_grad_enabled():  # to be differentiated once more
            return _written_out(ctx, g, x, *constants)
        if _has_short_planes(like):
            x, g = _side_by_side(x), _side_by_side(g)
        few = _FEW_CALLS_CPU if x.device.type == "cpu" else _FEW_CALLS
        dx, for_weight, for_bias = (_in_few_calls if x.numel() <= few else _in_few_passes)(
            ctx, g, x, *constants
        )
        if x is not like and dx is not None:
            dx = _as_planes(dx, like)
        return dx, None, None, for_weight, for_bias, None, None, None, None


def _in_few_calls(
    ctx, g, x, mean, var, weight, u, batch_var
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, where calls cost more than the arithmetic.

    With h = g weight / s they are those of the shared normalization, but for x: (1 - rho) h, and rho times
    BatchNorm's own gradient of h for a weight of the batch's deviation.
    """
    needed, share = ctx.needs_input_grad, ctx.share
    mask = [needed[0], needed[3], needed[4]]
    h, *others = _batch_norm_backward(g, x, weight, mean, var, None, None, False, ctx.eps, mask)
    if needed[0]:
        deviation = (batch_var + ctx.eps).sqrt_()
        own, _, _ = _batch_norm_backward(
            h, x, deviation, None, None, u, deviation.reciprocal(), True, ctx.eps, [True, False, False]
        )
        h.lerp_(own, share.to(h.dtype) if isinstance(share, Tensor) else share)
    return h, *others  # pyrefly: ignore


def _in_few_passes(
    ctx, g, x, mean, var, weight, u, batch_var
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, where going over the values costs more than calls.

    With A = weight / s that of x is A (1 - rho) g + A rho (g - mean(g) - b mean(g b)), and the last part
    is BatchNorm's own gradient for a weight of A rho sqrt(var + eps) with the batch's var. It is also
    A g - A rho (mean(g) + b mean(g b)), and there the last part is the batch normalized by itself.
    """
    wanted, share, shape = ctx.needs_input_grad[0], ctx.share, (-1, *[1] * (x.dim() - 2))
    rstd, deviation = (var + ctx.eps).rsqrt_(), (batch_var + ctx.eps).sqrt_()
    factor = rstd if weight is None else rstd * weight
    # Where channels lie side by side, one kernel for all of it takes longer than two others.
    one_go = wanted and x.is_contiguous() and x.dim() > 2
    scale = (factor * deviation).mul_(share) if one_go else None
    dx, slope, level = _batch_norm_backward(
        g, x, scale, None, None, u, deviation.reciprocal(), True, ctx.eps, [one_go, True, True]
    )
    if one_go and isinstance(share, Tensor):
        dx.addcmul_(g, ((1 - share) * factor).to(g.dtype).view(shape))
    elif one_go and share != 1:
        dx.addcmul_(g, factor.to(g.dtype).view(shape), value=1 - share)
    elif wanted and not one_go:
        part = factor * (-share / (x.numel() // x.shape[1]))
        dx = torch.batch_norm(x, part * slope, part * level, u, batch_var, False, 0.0, ctx.eps, True)
        dx.addcmul_(g, factor.to(g.dtype).view(shape))
    # The sum of g times the shared normalization, from that of g times the batch's own.
    for_weight = None
    if weight is not None:
        for_weight = (u - mean).mul_(level).addcmul_(slope, deviation).mul_(rstd)
    return dx, for_weight, level if ctx.needs_input_grad[4] else None


def _has_short_planes(x: Tensor) -> bool:
    """Whether channels have a few values in a row, on a CPU: the kernels behind torch's BatchNorm take ten
    times as long for those as for channels that lie side by side."""
    shape = x.shape
    return len(shape) > 2 and 1 < shape[2:].numel() < _SHORT and x.device.type == "cpu" and x.is_contiguous()


def _side_by_side(x: Tensor) -> Tensor:
    """(n, c, ...) to (n places, c)."""
    return x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])


def _as_planes(rows: Tensor, like: Tensor) -> Tensor:
    """What `_side_by_side` was made from."""
    return rows.view(len(like), -1, like.shape[1]).transpose(1, 2).reshape(like.shape)


def _written_out(ctx, g, x, mean, var, weight, u, batch_var) -> tuple[Tensor | None, ...]:
    """The gradients of `_NormalizeAndHold` in operations that a compiler fuses and autograd differentiates.

    Two sums of each channel are enough, sum(g) and sum(g (x - u)): compiled, that is one pass for both.
    """
    shape, over, dtype = (-1, *[1] * (x.dim() - 2)), [0, *range(2, x.dim())], statistics_dtype(x)
    rstd, own = (var.to(dtype) + ctx.eps).rsqrt(), (batch_var + ctx.eps).rsqrt()
    factor = rstd if weight is None else rstd * weight
    values, away = g.to(dtype), x.to(dtype) - u.view(shape)
    level, moment = values.sum(over), (values * away).sum(over)
    part = -ctx.share / (x.numel() // x.shape[1])
    held = values + (part * level).view(shape) + away * (part * moment * own.square()).view(shape)
    dx = (factor.view(shape) * held).to(g.dtype)
    for_weight = None if weight is None else ((moment + (u - mean) * level) * rstd).to(weight.dtype)
    for_bias = level.to(g.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[4] else None
    return dx, None, None, for_weight, for_bias, None, None, None, None


class _WrittenOut(torch.autograd.Function):
    """`normalize_and_hold` for a compiler, around the shared normalization as it writes it out."""

    @staticmethod
    def forward(ctx, x, mean, var, weight, bias, batch_mean, batch_var, eps, share):
        ctx.eps, ctx.share = eps, share
        ctx.save_for_backward(x, mean, var, weight, batch_mean, batch_var)
        return written_out(x, mean, var, weight, bias, eps)

    @staticmethod
    def backward(ctx, *gradients):
        return _written_out(ctx, gradients[0], *ctx.saved_tensors)


def written_out(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The shared normalization in operations that a compiler fuses with their neighbors.

    Vectors are (c,) or (clients, c).
    """
    scale = (var.to(statistics_dtype(x)) + eps).rsqrt()
    y = (x - over_channels(mean, x)) * over_channels(scale if weight is None else scale * weight, x)
    return (y if bias is None else y + over_channels(bias, x)).to(x.dtype)
