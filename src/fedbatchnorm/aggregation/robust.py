"""The server's step if clients may be Byzantine: everything that they send goes through a robust rule."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..norm.moments import Moments, Running, accumulator_dtype, tracked_steps
from .cohort import cohort_factor

Aggregator = Callable[[Tensor], Any]  # (n, d) float64 -> (d,)


def robust_update(
    means: Tensor,
    variances: Tensor,
    *,
    beta: Tensor,
    total: Tensor,
    aggregator: Aggregator,
    factor: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Aggregate clients' running rows so that a minority of Byzantine clients cannot control the result.

    m' = A(m_i);  v' = A(v_i) + factor N / ((N - 1) beta) A((m_i - m')^2). All three go through A: with a
    plain mean on the third, one Byzantine client would control the variance. With A the mean and equal
    counts this is Algorithm 2, lines 9 and 10.

    Args:
        means: (n, d), rows m_i = (1 - beta) m + beta u_i.
        variances: (n, d), rows v_i = (1 - beta) v + beta N/(N-1) s_i^2.
        beta: (d,), the round's momentum.
        total: (d,), N, the number of values that all clients saw; at least 2.
        aggregator: (n, d) -> (d,).
        factor: a number or (d,), `cohort_factor` if the clients are a sample of a larger population.

    Returns:
        (m', v'), each (d,).
    """
    mean = aggregator(means)
    between = aggregator((means - mean).square())
    return mean, aggregator(variances) + factor * total / ((total - 1) * beta) * between


class Rows(NamedTuple):
    """What a robust server works on: the clients' running rows (n, d), layers side by side, and (d,) each
    the round's momentum, the number of values behind the variances, and the least variance allowed."""

    means: Tensor
    variances: Tensor
    beta: Tensor
    total: Tensor
    floor: Tensor


def running_rows(
    running: Sequence[Running], seen: Sequence[Moments], beta: Sequence[float], total: Sequence[float]
) -> Rows:
    """m_i = (1 - beta) m + beta u_i and v_i = (1 - beta) v + beta N/(N-1) s_i^2, all layers concatenated.

    Args:
        running: each layer's statistics before the round.
        seen: each layer's moments, (n, c).
        beta: each layer's momentum for the round.
        total: each layer's N; a single value counts as two, since one has no variance.
    """
    exact = accumulator_dtype(running[0].mean)
    m, v = (torch.cat([getattr(r, k).to(exact) for r in running]) for k in ("mean", "var"))
    means, variances = (torch.cat([getattr(s, k).to(exact) for s in seen], dim=1) for k in ("mean", "var"))
    b, n, floor = (
        torch.cat([torch.full_like(r.mean, x, dtype=exact) for r, x in zip(running, xs, strict=True)])
        for xs in (beta, total, [r.eps for r in running])
    )
    return rows_of(Step(m, v, b, n, floor), means, variances)


class Step(NamedTuple):
    """What a server knows before it looks at rows, layers side by side, (d,) each: the statistics, the
    round's momentum, the number of values behind the variances, and the least variance allowed."""

    mean: Tensor
    var: Tensor
    beta: Tensor
    total: Tensor
    floor: Tensor


def rows_of(step: Step, means: Tensor, variances: Tensor) -> Rows:
    """`running_rows` for layers that are side by side already: u_i and s_i^2 of shape (n, d)."""
    m, v, b, n, floor = step
    n = n.clamp(min=2.0)
    return Rows((1 - b) * m + b * means, (1 - b) * v + b * n / (n - 1) * variances, b, n, floor)


def split_layers(running: Sequence[Running], mean: Tensor, var: Tensor, steps: float = 1) -> list[Running]:
    """Split the next statistics of all layers, side by side, by layer."""
    sizes = [len(r.mean) for r in running]
    parts = zip(running, mean.split(sizes), var.split(sizes), strict=True)
    return [r._replace(mean=m, var=v, tracked=r.tracked + tracked_steps(steps)) for r, m, v in parts]


def robust_step(
    step: Step, means: Tensor, variances: Tensor, aggregator: Aggregator, population: float
) -> tuple[Tensor, Tensor]:
    """The robust step for layers that were seen by the same clients: (m', v'), each (d,).

    Args:
        step: the layers side by side.
        means: (n, d), u_i.
        variances: (n, d), s_i^2.
        aggregator: (n, d) -> (d,).
        population: how many clients there are.
    """
    if not means.shape[1]:  # layers without channels
        return step.mean, step.var
    rows = rows_of(step, means, variances)
    # The rule weighs all rows alike, so the factor is that of equal counts.
    factor = cohort_factor(torch.ones(len(means)), population)
    aggregate = partial(_aggregate, aggregator)
    mean, var = robust_update(
        rows.means, rows.variances, beta=rows.beta, total=rows.total, aggregator=aggregate, factor=factor
    )
    return mean, torch.maximum(var, rows.floor)


def _aggregate(aggregator: Aggregator, rows: Tensor) -> Tensor:
    result = aggregator(rows.clone())
    if result is None:
        raise ValueError("aggregator: returned None in place of a result; the statistics are unchanged")
    try:
        result = torch.as_tensor(result, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"aggregator: returned a {type(result).__name__}, not numbers") from error
    if result.shape != rows.shape[1:]:
        raise ValueError(
            f"aggregator: returned shape {tuple(result.shape)} for rows of shape {tuple(rows.shape)}, "
            f"expected {tuple(rows.shape[1:])}"
        )
    if not bool((result.abs() <= torch.finfo(torch.float32).max).all()):
        raise ValueError("aggregator: returned a value that is not finite; the statistics are unchanged")
    return result
