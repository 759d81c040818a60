"""What is shared after a round: how clients' statistics become the next ones.

Two kinds of statistics travel. Moments of what a client saw, over all its steps, are merged by the law of
total variance. Running statistics, which a client updates at every step as BatchNorm does, are averaged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..aggregation.cohort import cohort_factor, population_count
from ..aggregation.statistics import split_layers
from ..norm.moments import Moments, Running, accumulator_dtype, update_running

Share = Callable[[Running, Moments], Running]


def merge_exactly(running: Running, seen: Moments) -> Running:
    """The total-variance merge: BatchNorm's update on the union of all batches (Algorithm 2).

    Here all clients have seen equally many values, and so within + between are plain means over clients.
    """
    means, variances = (t.to(accumulator_dtype(t)) for t in (seen.mean, seen.var))
    between, mean = torch.var_mean(means, 0, correction=0)
    return update_running(running, Moments(len(means) * seen.count, mean, variances.mean(0) + between))


def average(running: Running, seen: Moments) -> Running:
    """Average the clients' running statistics: the variance between clients is lost.

    mean_i((1 - beta) m + beta u_i) = (1 - beta) m + beta mean_i(u_i), and so for the variances.
    """
    mean, var = (t.to(accumulator_dtype(t)).mean(0) for t in (seen.mean, seen.var))
    return update_running(running, Moments(seen.count, mean, var))


def average_rows(
    means: Tensor, variances: Tensor, *, beta: Tensor, total: Tensor, aggregator: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Running statistics through the server's rule, each on its own: `average`, with the mean replaced."""
    return aggregator(means), aggregator(variances)


def share_side_by_side(
    share: Share, layers: Mapping[str, tuple[Running, Moments]], call: Callable[..., Any]
) -> dict[str, Running]:
    """Each layer's next statistics; layers that saw equally many values take one set of operations.

    Args:
        share: how the scheme shares.
        layers: layer name -> statistics before the round, and the clients' moments (n, c).
        call: (function, *arguments) -> its result; may compile the function.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, (running, seen) in layers.items():
        alike.setdefault((seen.count, running.momentum, running.mean.dtype, seen.mean.dtype), []).append(name)
    after: dict[str, Running] = {}
    for names in alike.values():
        running, seen = zip(*(layers[name] for name in names), strict=True)
        new = split_layers(running, *call(_next_values, share, running, seen))
        after |= zip(names, new, strict=True)
    return after


def _next_values(share: Share, running: Sequence[Running], seen: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """The next means and variances of layers that saw equally many values, side by side."""
    m, v, means, variances = (
        torch.cat([getattr(x, field) for x in rows], dim=-1)
        for rows in (running, seen)
        for field in ("mean", "var")
    )
    new = share(running[0]._replace(mean=m, var=v), seen[0]._replace(mean=means, var=variances))
    return new.mean, new.var


def union_of_steps(kept: Moments, seen: Moments, beta: float) -> Moments:
    """What a client has seen so far, with one more step: Chan's formula. Nothing seen is a count of 0.

    Example:
        >>> none = Moments(torch.zeros(1), torch.zeros(1), torch.ones(1))
        >>> first = union_of_steps(none, Moments(2, torch.tensor([1.0]), torch.tensor([4.0])), 0.1)
        >>> first.mean.item(), first.var.item()
        (1.0, 4.0)
    """
    total = torch.as_tensor(kept.count + seen.count)
    weight, apart = seen.count / total.clamp(min=1), seen.mean - kept.mean
    var = (1 - weight) * kept.var + weight * seen.var + weight * (1 - weight) * apart.square()
    return Moments(total, kept.mean + weight * apart, var)


def running_over_steps(kept: Moments, seen: Moments, beta: float) -> Moments:
    """A client's running statistics after one more step: BatchNorm's own update (Algorithm 1)."""
    count = torch.as_tensor(seen.count, device=seen.var.device)
    unbiased = seen.var * (count / (count - 1).clamp(min=1))
    var = torch.where(count > 1, (1 - beta) * kept.var + beta * unbiased, kept.var)
    mean = torch.where(count > 0, (1 - beta) * kept.mean + beta * seen.mean, kept.mean)
    return Moments(kept.count + count, mean, var)


class Kept(NamedTuple):
    """What a client keeps over its local steps, and what a server makes of it.

    over_steps: (kept, seen in a step, beta) -> kept; before the first step the count is 0, and mean and
    variance
        are the running ones.
    merge: (mean (C,), var (C,), kept (M, C), shares (M,), beta, total (C,), population) -> the next mean and
        variance.
    rows: the first of these arguments, without the shares -> the rows (M, C) of running means and variances
        that a robust server forms, which Byzantine clients may attack.
    """

    over_steps: Callable[[Moments, Moments, float], Moments]
    merge: Callable[..., tuple[Tensor, Tensor]]
    rows: Callable[..., tuple[Tensor, Tensor]]


def merge_moments(
    mean: Tensor,
    var: Tensor,
    kept: Moments,
    shares: Tensor | None,
    beta: float,
    total: Tensor,
    population: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The next statistics from the moments of clients of any size: the total-variance merge, in float64.

    m <- (1 - beta) m + beta u;  v <- (1 - beta) v + beta N/(N-1) s^2, with u and s^2 those of the union.

    Args:
        mean: (C,), the statistics before the round.
        var: (C,).
        kept: counts, means and biased variances, (M, C).
        shares: not used: clients weigh by what they saw.
        beta: the momentum of the whole round.
        total: (C,), N.
        population: how many clients there are, where the spread between those of a cohort stands for that
            between all; None for no correction.

    Example:
        >>> kept = Moments(torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [0.0]]), torch.zeros(2, 1))
        >>> merge_moments(torch.zeros(1), torch.ones(1), kept, None, 1.0, torch.tensor([4.0]))
        (tensor([1.]), tensor([4.]))
    """
    weights = kept.count / torch.as_tensor(kept.count).sum(0).clamp(min=1)
    union = (weights * kept.mean).sum(0)
    between = (kept.mean - union).square()
    if population is not None:
        between = between * cohort_factor(torch.as_tensor(kept.count), population)
        total = torch.as_tensor(population_count(total, len(kept.mean), population)).round()
    spread = (weights * (kept.var + between)).sum(0)
    unbiased = total / (total - 1).clamp(min=1) * spread
    mean = torch.where(total > 0, (1 - beta) * mean + beta * union, mean)  # a layer may have seen nothing
    return mean, torch.where(total > 1, (1 - beta) * var + beta * unbiased, var)


def moment_rows(
    mean: Tensor, var: Tensor, kept: Moments, beta: float, total: Tensor
) -> tuple[Tensor, Tensor]:
    """m_i = (1 - beta) m + beta u_i and v_i = (1 - beta) v + beta N/(N-1) s_i^2 (design of the robust
    server)."""
    unbiased = total / (total - 1).clamp(min=1) * kept.var
    return (1 - beta) * mean + beta * kept.mean, (1 - beta) * var + beta * unbiased


def average_running(
    mean: Tensor,
    var: Tensor,
    kept: Moments,
    shares: Tensor,
    beta: float,
    total: Tensor,
    population: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean of the clients' running statistics: the variance between clients is lost."""
    shares = shares.to(kept.mean.dtype)
    return shares @ kept.mean, shares @ kept.var


MOMENTS = Kept(union_of_steps, merge_moments, moment_rows)
RUNNING = Kept(
    running_over_steps, average_running, lambda mean, var, kept, beta, total: (kept.mean, kept.var)
)
