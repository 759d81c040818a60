"""Mean and variance per client and channel: as fast as the device allows, and exact.

This is the only place that reads whole activations, so it is written for speed, by device and layout.
"""

import math

import torch
from torch import Tensor

# The quick ways of `_quick` add up in float32. Sums of squares lose 1 + mean^2/variance of their
# relative precision, sums over rows at worst half an epsilon a row: short sums keep both small. A plane is
# what one channel of one sample has; short planes are better added up across samples.
_PLANES_LIMIT, _LARGEST_PLANE, _SMALLEST_PLANE = 4.0, 16384, 17
_ROWS_TOLERANCE, _LONGEST_COLUMN = 1e-4, 4096
_GROUPS, _FEW_ROWS = 32, 1024
_SMALL = 2**14  # values of a client, up to which calls cost more than the arithmetic
_EPSILON = torch.finfo(torch.float32).eps


def mean_and_variance(x: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each client's values, (clients, c), in float32 or better.

    Args:
        x: (clients * batch, c, ...), not empty, without gradient.
        clients: how many clients share `x`, one after another.
    """
    if torch.compiler.is_compiling():
        return in_one_go(x, clients)
    return _Reduce.apply(x, clients) if in_transform() else _Reduce.forward(x, clients)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The type statistics of `x` are measured in: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def over_channels(values: Tensor, x: Tensor) -> Tensor:
    """One value a channel, (c,), or one a client and channel, (clients, c), to go with x (n, c, ...).

    Example:
        >>> x = torch.zeros(4, 3, 2, 2)
        >>> over_channels(torch.ones(3), x).shape, over_channels(torch.ones(2, 3), x).shape
        (torch.Size([3, 1, 1]), torch.Size([4, 3, 1, 1]))
    """
    ones = [1] * (x.dim() - 2)
    if values.dim() == 1:
        return values.view(-1, *ones)
    each = x.shape[0] // len(values)
    return values[:, None].expand(-1, each, -1).reshape(x.shape[0], -1, *ones)


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is at work; asked to spare its cost."""
    return torch._C._are_functorch_transforms_active()


class _Reduce(torch.autograd.Function):
    """The eager way, by device; under vmap the mapped axis becomes a client axis."""

    @staticmethod
    def forward(x: Tensor, clients: int) -> tuple[Tensor, Tensor]:
        if clients == 1 and x.device.type in ("cpu", "cuda"):
            mean, var = one_client(x)
            return mean.unsqueeze(0), var.unsqueeze(0)
        if x.device.type == "cpu" and x.numel() <= clients * _SMALL:
            return _in_float64(x, clients)
        if x.device.type == "cpu":
            means, variances = zip(*map(one_client, x.chunk(clients)), strict=True)
            return torch.stack(means), torch.stack(variances)
        return in_one_go(x, clients)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx, *grads):
        return None, None

    @staticmethod
    def jvp(ctx, *tangents):
        return None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        x, clients = args[0].movedim(in_dims[0], 0), args[1]
        folded = _Reduce.apply(x.flatten(0, 1), info.batch_size * clients)
        return tuple(t.unflatten(0, (info.batch_size, clients)) for t in folded), (0, 0)


def _in_float64(x: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per client and channel, (clients, c): a few calls in all, for small inputs."""
    dtype, x = statistics_dtype(x), x.double().unflatten(0, (clients, -1))
    dims = [1, *range(3, x.dim())]
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square_().mean(dims)
    return mean.view_as(var).to(dtype), var.to(dtype)


def in_one_go(x: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per client and channel in a single reduction, (clients, c) each."""
    x = x.to(statistics_dtype(x)).unflatten(0, (clients, -1))
    dims = [1, *range(3, x.dim())]
    if x.device.type != "cpu":
        var, mean = torch.var_mean(x, dims, correction=0)
        return mean, var
    # Compiled for a CPU, var_mean loses digits to a large mean. One pass about the first sample's mean
    # does not: that is never further off than sqrt(batch) standard deviations.
    first = x[:, :1].mean(dims, keepdim=True)
    rest = x - first
    shift = rest.mean(dims)
    return first.view_as(shift) + shift, (rest.square().mean(dims) - shift.square()).clamp(min=0)


def one_client(x: Tensor) -> tuple[Tensor, Tensor]:
    """One client's mean and biased variance, (c,), in the fastest way that is exact enough.

    A quick way comes first; it is trusted in a channel while mean^2 / variance is so small that its
    rounding cannot show. Otherwise it is taken once more about the mean that it has found, and what is still
    doubtful is measured in two passes, added up in float64.
    """
    x = x.to(statistics_dtype(x))
    if x.dtype == torch.float64 or x.device.type != "cpu" or _is_small(x):
        return _two_passes(x)
    mean, var, limit = _quick(x)
    margin = torch.addcmul(var, mean, mean, value=-1 / limit)
    if not margin.min().item() < 0:
        return mean, var
    if limit == _PLANES_LIMIT:  # about what was found for the mean, nothing cancels but in constant channels
        about, (mean, var, _) = mean, _quick(x - over_channels(mean, x))
        margin = torch.addcmul(var, mean, mean, value=-1 / limit)
        mean += about
    doubtful = margin < 0
    if bool(doubtful.any()):
        # A channel's values side by side: there the kernel adds up in float64.
        rest = x[:, doubtful].movedim(1, 0).flatten(1).unsqueeze(0).contiguous()
        mean[doubtful], var[doubtful] = _two_passes(rest)
    return mean, var


def _is_small(x: Tensor) -> bool:
    """Whether one call that adds up in float64, value by value, is faster than several quick ones."""
    return x.numel() <= 2 * _SMALL and x.is_contiguous() and x.numel() > x.shape[0] * x.shape[1]


def _two_passes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel behind torch's own BatchNorm: mean, then variance about it."""
    return torch.ops.aten.batch_norm_update_stats.default(x, None, None, 0.0)


def _quick(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean, variance, and the mean^2 / variance up to which they are good, for float32 on a CPU."""
    channels = x.shape[1]
    count = x.numel() // channels
    plane = count // len(x)
    if plane == 1 or not x.is_contiguous():  # channels lie side by side
        return _by_columns(
            x if x.dim() == 2 else x.permute(0, *range(2, x.dim()), 1).reshape(count, channels)
        )
    if plane > _LARGEST_PLANE:
        return *_two_passes(x), math.inf
    if plane < _SMALLEST_PLANE:  # each place of a channel's is a column, and they are brought together after
        mean, var, _ = _by_columns(x.view(len(x), channels * plane))
        mean, between = _two_passes(mean.view(1, channels, plane))
        return mean, var.view(channels, plane).mean(1).add_(between), _PLANES_LIMIT
    # Sums and norms of each sample's channel run at the speed of memory; the rest is float64.
    planes = x.flatten(2)
    mean = planes.sum(-1).sum(0, dtype=torch.float64) / count
    square = torch.linalg.vector_norm(planes, dim=-1).square().sum(0, dtype=torch.float64) / count
    return mean.float(), torch.addcmul(square, mean, mean, value=-1).float(), _PLANES_LIMIT


def _by_columns(rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """`_quick` for the columns of rows (k, c)."""
    # The kernel adds up row after row in float32. Taken as (k/32, 32 c) the same memory has 32 times
    # fewer rows to add up, and the groups are brought together after.
    count, columns = rows.shape
    if count <= _FEW_ROWS:
        return *_two_passes(rows), _rows_limit(count)
    groups = max(_GROUPS, count // _LONGEST_COLUMN)
    each, left = divmod(count, groups)
    rows, tail = rows.split([count - left, left]) if left else (rows, None)
    mean, var = _two_passes(rows.reshape(each, groups * columns))
    mean, between = _two_passes(mean.view(groups, columns))
    within, _ = _two_passes(var.view(groups, columns))
    var = within.add_(between)
    if tail is not None:  # by Chan's formula for two
        share, (tail_mean, tail_var) = left / count, _two_passes(tail)
        apart = tail_mean - mean
        mean = mean + share * apart
        var = (1 - share) * var + share * tail_var + share * (1 - share) * apart.square()
    return mean, var, _rows_limit(each)


def _rows_limit(rows: int) -> float:
    """The mean^2 / variance up to which rows that were added up in float32 are good."""
    return _ROWS_TOLERANCE / (rows * _EPSILON / 2) ** 2
