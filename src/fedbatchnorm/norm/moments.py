"""The mathematics of federated BatchNorm as pure functions: tensors in, tensors out.

All formulas are here. Layers keep state around them, and servers call them with what clients sent. Symbols
follow the paper: client i saw K_i values per channel, with mean u_i and biased variance s_i^2; (m, v) are the
shared running statistics and beta is the momentum.
"""

import math
import numbers
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from .gradient import Batch, hold, limited, normalize_and_hold, written_out
from .reduce import in_transform, mean_and_variance, one_client, statistics_dtype

_SHOWN, _SHOWN_BITS = 200, 256  # of a value in a message: characters of text, bits of an integer
_LARGEST = sys.float_info.max


class Moments(NamedTuple):
    """What was seen: how many values per channel, their mean and their biased variance.

    `count` is batch x height x width, not the batch alone. One client's moments have shape (c,);
    those of n clients stacked have shape (n, c), and `count` is then a number or shape (n,).
    """

    count: int | Tensor
    mean: Tensor
    var: Tensor


class Running(NamedTuple):
    """One layer's shared statistics: what every client normalizes with, and the server updates.

    `tracked` counts the steps merged so far. A `momentum` of None averages over all of them.
    """

    mean: Tensor
    var: Tensor
    tracked: int = 0
    momentum: float | None = 0.1
    eps: float = 1e-5


def measure(x: Tensor, clients: int = 1) -> Moments:
    """Measure each client's mean and biased variance (Algorithm 2, line 4).

    Args:
        x: (clients * batch, c, ...); the clients' batches lie one after another, equally long.
        clients: how many clients share `x`.

    Returns:
        Moments of shape (clients, c), in float32 or better whatever the type of `x`.

    Example:
        >>> measure(torch.tensor([[1.0], [3.0], [5.0], [5.0]]), clients=2).mean
        tensor([[2.],
                [5.]])
    """
    if x.dim() < 2:
        raise ValueError(f"input must be (batch, channels, ...), got shape {tuple(x.shape)}")
    batch, channels = x.shape[:2]
    if clients < 1 or batch % clients:
        raise ValueError(f"a batch of {batch} does not split into {clients} equal clients")
    count = batch // clients * math.prod(x.shape[2:])
    if count == 0 or channels == 0:
        zeros = x.new_zeros((clients, channels), dtype=statistics_dtype(x))
        return Moments(count, zeros, zeros.clone())
    return Moments(count, *mean_and_variance(x.detach(), clients))


def normalize(
    x: Tensor,
    running: Running,
    *,
    clients: int = 1,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gradient: float | Tensor = 0.0,
    limit: float | Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalize with the shared statistics as constants, and measure the input (Algorithm 2).

    y = (x - m) / sqrt(v + eps) * weight + bias; no gradient flows through m and v (lines 3, 4). A share of
    BatchNorm's gradient can keep each client's mean and scale stable (`norm.gradient`); y does not depend on
    it. A limit bounds how far a normalized batch may be from mean 0 and deviation 1, which slows runaway
    weights.

    Args:
        x: (clients * batch, c, ...), the clients' batches one after another.
        running: the shared statistics.
        clients: how many clients share `x`; the output does not depend on it.
        weight: (c,) or None.
        bias: (c,) or None.
        gradient: the share of BatchNorm's gradient, from 0 (the paper's) to 1.
        limit: the largest standard deviation L of a client's output, before weight and bias, and its mean at
            most 2 (L - 1); None for no limit.

    Returns:
        The normalized input, and Moments of shape (clients, c).

    Example:
        >>> y, seen = normalize(torch.tensor([[4.0], [8.0]]), Running(torch.zeros(1), torch.ones(1)))
        >>> seen.count, seen.mean.item(), seen.var.item()
        (2, 6.0, 4.0)
    """
    moments = measure(x, clients)  # before `y` is written: what it reads is still in the cache
    return with_constants(x, running, weight, bias, moments, gradient, limit), moments


def normalize_own(
    x: Tensor,
    running: Running,
    weight: Tensor | None,
    bias: Tensor | None,
    gradient: float | Tensor,
    limit: float | Tensor | None,
) -> tuple[Tensor, Moments]:
    """`normalize` for one client and moments of shape (c,): what a layer does in every step.

    What a small layer costs is the number of calls, of Python as of torch: hence as few as there can be.
    """
    mean, var = running.mean, running.var
    ordinary = limit is None and x.dim() > 1 and x.numel() and x.device.type in ("cpu", "cuda")
    held = isinstance(gradient, Tensor) or gradient != 0
    if ordinary and not (held and (x.dtype != mean.dtype or not x.requires_grad)) and not mean.requires_grad:
        seen = one_client(x.detach())
        if held and torch.autograd.forward_ad._current_level < 0:
            y = normalize_and_hold(x, mean, var, weight, bias, *seen, running.eps, gradient)
        else:
            y = torch.batch_norm(x, weight, bias, mean, var, False, 0.0, running.eps, True)
        return y, Moments(x.numel() // x.shape[1], *seen)
    y, moments = normalize(x, running, weight=weight, bias=bias, gradient=gradient, limit=limit)
    return y, Moments(moments.count, moments.mean[0], moments.var[0])


def with_constants(
    x: Tensor,
    running: Running,
    weight: Tensor | None,
    bias: Tensor | None,
    seen: Moments | None = None,
    gradient: float | Tensor = 0.0,
    limit: float | Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """(x - m) / sqrt(v + eps) * weight + bias, with m and v as constants.

    With a limit, m and v are brought closer to those of a client's batch that are too far away
    (`gradient.limited`).

    Args:
        x: (clients * batch, c, ...).
        running: m, v and eps.
        weight: (c,), (clients, c) where each client has its own, or None.
        bias: (c,), (clients, c) or None.
        seen: moments of x, (clients, c), where a gradient's share or a limit is asked for.
        gradient: the share of BatchNorm's gradient.
        limit: the largest deviation of a normalized batch; None for no limit.
        keep: which samples count, where batches are filled up.
    """
    mean, var = (t.detach() if t.requires_grad else t for t in (running.mean, running.var))
    if limit is not None and x.numel():
        assert seen is not None
        mean, var = limited(mean, var, seen.mean, seen.var, running.eps, limit)
    compiling = torch.compiler.is_compiling()
    of_clients = any(v is not None and v.dim() > 1 for v in (mean, var, weight, bias))
    # The kernel does not fuse with its neighbors, and mapped over clients it takes one type alone.
    plain = compiling or of_clients or (x.dtype != mean.dtype and in_transform())
    # A share in a tensor is not asked for its value: nothing waits for the device, and graphs stay whole.
    held = (isinstance(gradient, Tensor) or gradient != 0) and x.numel() > 0
    watched = compiling or x.requires_grad or in_transform()
    forward_mode = torch.autograd.forward_ad._current_level >= 0  # what is computed, differentiated
    if held and watched and not forward_mode:
        assert seen is not None
        batch = Batch(seen.mean, seen.var, running.eps, keep)
        alone = len(seen.mean) == 1 and keep is None and not of_clients and not in_transform()
        if alone and (compiling or x.dtype == mean.dtype):
            batch_mean, batch_var = seen.mean[0], seen.var[0]
            return normalize_and_hold(
                x, mean, var, weight, bias, batch_mean, batch_var, running.eps, gradient
            )
        x = hold(x, batch, gradient)
    if plain:
        return written_out(x, mean, var, weight, bias, running.eps)
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, running.eps, True)


def combine(moments: Moments) -> Moments:
    """Moments of the union of n clients' values, by the law of total variance (equation RV).

    N = sum K_i;  u = sum K_i u_i / N;  s^2 = sum K_i (s_i^2 + (u_i - u)^2) / N, in float64.
    For two rows this is Chan's formula. The order of the rows does not matter to the last bit, and
    a row with K_i = 0 is as if it were not there.

    Args:
        moments: count (n,), mean (n, c), var (n, c).

    Returns:
        Moments with count a 0-dim int64 tensor, mean (c,), var (c,).

    Example:
        >>> rows = Moments(torch.tensor([1, 3]), torch.tensor([[0.0], [4.0]]), torch.zeros(2, 1))
        >>> union = combine(rows)
        >>> int(union.count), union.mean.item(), union.var.item()
        (4, 3.0, 3.0)
    """
    count, mean, var = moments
    assert isinstance(count, Tensor)
    mean, var = (t.to(accumulator_dtype(t)) for t in (mean, var))
    total = count.sum()
    share = (count.to(mean.dtype) / total.clamp(min=1)).unsqueeze(-1)
    center = _ordered_sum(share * mean)
    spread = _ordered_sum(share * (var + (mean - center).square()))
    return Moments(total, center, spread)


def absorb(seen: Moments, new: Moments) -> tuple[Moments, Tensor]:
    """Add a pass's moments to those seen so far; a row that is not finite is refused and counted.

    Args:
        seen: count 0-dim int64, mean (c,), var (c,).
        new: count a number or (n,), mean (n, c), var (n, c).

    Returns:
        The moments seen now, and how many rows were refused (0-dim int64).
    """
    assert isinstance(seen.count, Tensor)
    finite = (new.mean.isfinite() & new.var.isfinite()).all(-1)
    keep = finite.unsqueeze(-1)
    rows = Moments(
        torch.cat([seen.count.view(1), finite * new.count]),
        torch.cat([seen.mean.unsqueeze(0), torch.where(keep, new.mean, 0).to(seen.mean.dtype)]),
        torch.cat([seen.var.unsqueeze(0), torch.where(keep, new.var, 0).to(seen.var.dtype)]),
    )
    return combine(rows), (~finite).sum()


def round_momentum(momentum: float | None, tracked: int, steps: float = 1) -> float:
    """The weight of a whole round of `steps` steps: 1 - (1 - beta)^steps.

    A momentum of None averages over all steps: steps / (tracked + steps), torch's 1/t for one step, with
    the whole steps that the counter moves by.

    Example:
        >>> round_momentum(0.1, 7), round_momentum(None, 3), round(round_momentum(0.1, 0, 2), 3)
        (0.1, 0.25, 0.19)
    """
    if momentum is None:
        return tracked_steps(steps) / (tracked + tracked_steps(steps))
    if steps == 1 or momentum == 1:
        return momentum
    return -math.expm1(steps * math.log1p(-momentum))


def update_running(
    running: Running, seen: Moments, *, steps: float = 1, momentum: float | None = None
) -> Running:
    """BatchNorm's running update with the union's moments (Algorithm 1, lines 5 and 6).

    m <- (1 - beta) m + beta u;  v <- (1 - beta) v + beta N/(N-1) s^2, in float64, cast back.
    A single value (N = 1) has no unbiased variance: v stays.

    Args:
        running: the statistics before the round, (c,).
        seen: the union's moments, (c,), with count at least 1.
        steps: how many steps the moments cover.
        momentum: overrides the layer's own.

    Example:
        >>> seen = Moments(2, torch.tensor([6.0]), torch.tensor([4.0]))
        >>> after = update_running(Running(torch.zeros(1), torch.ones(1)), seen)
        >>> round(after.mean.item(), 6), round(after.var.item(), 6), after.tracked
        (0.6, 1.7, 1)
    """
    count = int(seen.count)
    beta = round_momentum(running.momentum if momentum is None else momentum, running.tracked, steps)
    exact = accumulator_dtype(running.mean)
    mean, var = running.mean.to(exact), running.var.to(exact)
    mean = (1 - beta) * mean + beta * seen.mean.to(exact)
    if count > 1:
        var = (1 - beta) * var + beta * (count / (count - 1)) * seen.var.to(exact)
    return running._replace(
        mean=mean.to(running.mean.dtype),
        var=var.to(running.var.dtype),
        tracked=running.tracked + tracked_steps(steps),
    )


def settings_problem(momentum: float | None, eps: float) -> str | None:
    """Why a momentum and an eps are not usable, or None."""
    if momentum is not None and not (isinstance(momentum, numbers.Real) and 0 < momentum <= 1):
        return f"momentum is {shown(momentum)}; it must be in (0, 1], or None for a plain average"
    if not (isinstance(eps, numbers.Real) and 0 < eps <= _LARGEST):
        return f"eps is {shown(eps)}; it must be a positive number"
    return None


def shown(value: object) -> str:
    """`repr` that is short and cannot fail, for messages about what others sent.

    Example:
        >>> shown(10**5000), shown("x")
        ('an integer of 16610 bits', "'x'")
    """
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # whatever an object of theirs does, the message is about it
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def tracked_steps(steps: float) -> int:
    """How far the integer counter moves in a round: whole steps, at least one."""
    return max(1, round(steps))


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """float64, except where the device has none."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _ordered_sum(terms: Tensor) -> Tensor:
    """Sum over clients, independent of their order; two terms commute without sorting."""
    return terms.sum(0) if terms.shape[0] <= 2 else terms.sort(0).values.sum(0)
