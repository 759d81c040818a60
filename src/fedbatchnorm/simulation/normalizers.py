"""What a client normalizes with in training: its own batch, constants, both mixed, or all clients' batches.

Each is a function (x, running, clients=, weight=, bias=, keep=) -> (y, Moments (clients, c), or None), where
the clients' batches lie one after another in x. Where batches are filled up to one length, `keep` is 1 for
the samples that count.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..norm.moments import Moments, Running, normalize, with_constants
from ..norm.reduce import in_transform, over_channels, statistics_dtype


def with_own_batch(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalize each client's batch by its own mean and variance, as BatchNorm does (Algorithm 1).

    The gradient flows through both. All clients at once are one BatchNorm with n c channels.

    Args:
        x: (clients * batch, c, ...), the clients' batches one after another.
        running: only its eps and type are used.
        clients: how many clients share `x`.
        weight: (c,), (clients, c) where each client has its own, or None.
        bias: (c,), (clients, c) or None.
        keep: (clients * batch,), 1 for samples that count and 0 for those that fill up a batch; None if all
            count.

    Returns:
        The normalized input, and Moments of shape (clients, c).

    Example:
        >>> x = torch.tensor([[1.0], [3.0], [50.0], [70.0]])
        >>> y, seen = with_own_batch(x, Running(torch.zeros(1), torch.ones(1)), clients=2)
        >>> y.flatten().round().tolist(), seen.var.flatten().tolist()
        ([-1.0, 1.0, -1.0, 1.0], [1.0, 100.0])
    """
    if keep is not None or torch.compiler.is_compiling() or (in_transform() and clients == 1):
        # In operations that fuse with their neighbors and map over clients: there is no buffer to write to.
        return _mixed_with_batch(x, running, None, clients, weight, bias, keep)
    channels = x.shape[1]
    mean, unbiased = (running.mean.new_zeros(clients * channels) for _ in range(2))
    if clients > 1:
        x = x.unflatten(0, (clients, -1)).movedim(0, 1).flatten(1, 2)
        weight, bias = (p if p is None or p.dim() > 1 else p.repeat(clients) for p in (weight, bias))
    weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
    # A running update with momentum 1 leaves the batch's own mean and unbiased variance.
    y = F.batch_norm(x, mean, unbiased, weight, bias, training=True, momentum=1.0, eps=running.eps)
    count = x.numel() // x.shape[1]
    if clients > 1:
        y = y.unflatten(1, (clients, channels)).movedim(1, 0).flatten(0, 1)
    var = unbiased * ((count - 1) / count)
    return y, Moments(count, mean.view(clients, channels), var.view(clients, channels))


def with_frozen(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Normalize with the running statistics, and measure nothing."""
    return with_constants(x, running, weight, bias), None


def with_shared(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    gradient: float | Tensor = 0.0,
    limit: float | Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """FBN: normalize with the shared statistics as constants, and measure the input (Algorithm 2).

    `gradient` is the share of BatchNorm's gradient, and `limit` bounds how far a normalized batch may be from
    mean 0 and deviation 1. 0 and None are the paper's FBN.
    """
    if keep is None:
        held = {"gradient": gradient, "limit": limit}
        return normalize(x, running, clients=clients, weight=weight, bias=bias, **held)
    count, mean, var = _measure_kept(x.detach(), clients, keep)
    seen = Moments(count, mean.reshape(clients, -1), var.reshape(clients, -1))
    return with_constants(x, running, weight, bias, seen, gradient, limit, keep), seen


def with_blend(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    blend: float | Tensor,
) -> tuple[Tensor, Moments]:
    """Normalize with the mixture of a share of the batch and the rest of the shared statistics.

    mean (1 - a) m + a u;  variance (1 - a) v + a s^2 + a (1 - a) (m - u)^2, the law of total variance for the
    mixture. The gradient flows through the batch's part. What is measured is the batch itself.

    Example:
        >>> x = torch.tensor([[2.0], [6.0]])
        >>> y, seen = with_blend(x, Running(torch.zeros(1), torch.ones(1), eps=0.25), blend=0.5)
        >>> seen.mean.item(), seen.var.item(), [round(v, 4) for v in y.flatten().tolist()]
        (4.0, 4.0, [0.0, 1.5396])
    """
    count, u, s = _measure_kept(x, clients, keep)
    shape = (-1, *[1] * (x.dim() - 2))
    m, v = (t.detach().view(shape).to(u.dtype) for t in (running.mean, running.var))
    mean = (1 - blend) * m + blend * u
    var = (1 - blend) * v + blend * s + blend * (1 - blend) * (m - u).square()
    y = (x.unflatten(0, (clients, -1)) - mean) * (var + running.eps).rsqrt()
    seen = (t.detach().reshape(clients, -1) for t in (u, s))
    return _affine(y.flatten(0, 1), x, weight, bias), Moments(count, *seen)


def with_mixture(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    mix: Tensor,
) -> tuple[Tensor, Moments]:
    """HBN: normalize with (1 - a) shared + a batch, mean and variance alike, a = sigmoid(mix) by channel.

    The gradient flows through the batch's part and to `mix`. What is measured is the mixture.

    Example:
        >>> x = torch.tensor([[2.0], [6.0]])
        >>> y, seen = with_mixture(x, Running(torch.zeros(1), torch.ones(1)), mix=torch.zeros(1))
        >>> seen.mean.item(), seen.var.item()
        (2.0, 2.5)
    """
    return _mixed_with_batch(x, running, mix.sigmoid(), clients, weight, bias, keep)


def with_all_clients(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """FedTAN's first step: normalize by the mean and variance of all clients that `vmap` runs side by side.

    First the mean, then the mean square about it, as the layers exchange them; gradients of both are
    exchanged in the same way. The averaged gradient is that of BatchNorm on the union.
    """
    assert clients == 1
    keep = x.new_ones(len(x)) if keep is None else keep
    shape = (1, -1, *[1] * (x.dim() - 2))
    kept = keep.view(-1, *[1] * (x.dim() - 1))
    dims = [0, *range(2, x.dim())]
    count = _OverClients.apply(keep.sum()) * (x[0, 0].numel())
    values = x.to(statistics_dtype(x))
    mean = _OverClients.apply((values * kept).sum(dims)) / count
    apart = values - mean.view(shape)
    var = _OverClients.apply((apart.square() * kept).sum(dims)) / count
    y = apart * (var + running.eps).rsqrt().view(shape)
    return _affine(y, x, weight, bias), Moments(count.detach(), mean.detach()[None], var.detach()[None])


class _OverClients(torch.autograd.Function):
    """The sum over the clients that `vmap` maps over, known to each of them; alone, the value itself.

    Its gradient is the sum of all clients' gradients.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        return _OverClients.apply(*gradients)

    @staticmethod
    def vmap(info, in_dims, *args):
        if in_dims[0] is None:
            return args[0] * info.batch_size, None
        return args[0].sum(in_dims[0]), None


def _mixed_with_batch(
    x: Tensor,
    running: Running,
    share: Tensor | None,
    clients: int,
    weight: Tensor | None,
    bias: Tensor | None,
    keep: Tensor | None,
) -> tuple[Tensor, Moments]:
    """Normalize with a share of the batch's statistics and the rest of the running ones; None is all
    batch."""
    count, mean, var = _measure_kept(x, clients, keep)
    shape = (-1, *[1] * (x.dim() - 2))
    if share is not None:
        share = share.view(shape)
        mean = torch.lerp(running.mean.detach().view(shape).to(mean.dtype), mean, share.to(mean.dtype))
        var = torch.lerp(running.var.detach().view(shape).to(var.dtype), var, share.to(var.dtype))
    y = (x.unflatten(0, (clients, -1)) - mean) * (var + running.eps).rsqrt()
    seen = (t.detach().reshape(clients, -1) for t in (mean, var))
    return _affine(y.flatten(0, 1), x, weight, bias), Moments(count, *seen)


def _measure_kept(x: Tensor, clients: int, keep: Tensor | None) -> tuple[int | Tensor, Tensor, Tensor]:
    """Count, mean and biased variance of each client's samples that count, (clients, 1, c, 1, ...)."""
    parts = x.unflatten(0, (clients, -1)).to(statistics_dtype(x))
    dims = [1, *range(3, parts.dim())]
    if keep is None:
        var, mean = torch.var_mean(parts, dims, correction=0, keepdim=True)
        return x.numel() // mean.numel(), mean, var
    kept = keep.view(clients, -1, *[1] * (x.dim() - 1))
    count = kept.sum(1, keepdim=True) * x[0, 0].numel()
    mean = (parts * kept).sum(dims, keepdim=True) / count
    var = ((parts - mean).square() * kept).sum(dims, keepdim=True) / count
    return count.view(clients, 1), mean, var


def _affine(y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Times weight, plus bias, in the type of x."""
    for factor, combine_with in ((weight, torch.mul), (bias, torch.add)):
        y = y if factor is None else combine_with(y, over_channels(factor, x))
    return y.to(x.dtype)
