"""Corrections for client sampling: the variance of a cohort, and the number of steps of a round."""

import math
from collections.abc import Collection, Hashable, Mapping
from statistics import median

import torch
from torch import Tensor

from ..norm.moments import Moments, accumulator_dtype, shown

_MOST = 2**53  # clients or steps: up to here a float64 counts one by one
_STEPS = "a positive number, at most 2^53"


def cohort_factor(counts: Tensor, population: float | Tensor) -> Tensor:
    """The factor that turns the between-client variance of a cohort into that of the population.

    factor = (1 - q M/n) / (1 - q),  q = sum w_i^2,  w_i = K_i / sum K_j,  M clients of n.

    Clients are drawn without replacement, their means spread with variance S^2 (denominator n - 1), and
    counts say nothing about means. Then E[sum w_i (u_i - u)^2] = S^2 (1 - q), for any such weights: over the
    cohort q is what was seen, over the population sum w^2 is q M/n if counts vary there as they do here. 1/q
    is the effective number of clients; for equal counts q = 1/M, and the factor is M/(M - 1) (n - 1)/n. It is
    1, to the bit, for M = n, and if only one client was seen, which says nothing about the others.

    Args:
        counts: (M,) or (M, c), K_i of the clients in the round; 0 means that the client has seen nothing.
        population: n, the number of clients that there are; one for all channels, or (c,).

    Returns:
        () or (c,), in float64 where the device has it.

    Example:
        >>> cohort_factor(torch.tensor([5, 5]), 100).item(), cohort_factor(torch.tensor([3, 9]), 2).item()
        (1.98, 1.0)
    """
    counts = counts.to(accumulator_dtype(counts))
    share = counts / counts.sum(0).clamp(min=1)
    q = share.square().sort(0).values.sum(0)  # sorted: the order of clients must not matter
    seen = (counts > 0).sum(0).to(q.dtype)
    factor = (1 - q * (seen / population)) / (1 - q)
    return torch.where((seen > 1) & (seen < population), factor, torch.ones_like(factor))


def population_count(total: Tensor | float, cohort: Tensor | float, population: float) -> Tensor | float:
    """N n/M: the number of values that all n clients would have reported, for Bessel's N/(N - 1).

    A client's mean is itself a measurement. Its noise, s^2/K_i, is part of the between-client term and is
    scaled with it, to what a merge of all n clients would contain. That merge is what we estimate, so this is
    correct. Bessel's factor corrects for the same noise, though, once for the whole: with the cohort's own N
    beside `cohort_factor` it would be corrected twice (K = 1, M = 2, n large: a variance twice too large).
    With the population's N it is not. Where counts differ, the noise of small clients is scaled by somewhat
    more than it should be; to take it out first (analysis of variance) needs values that are independent of
    each other, which those of an image are not.
    """
    return total * (population / cohort)


def between_clients(seen: Moments, population: float | None = None) -> Tensor:
    """By channel, the part of the variance that lies between clients: B / (W + B), from 0 to 1, (c,).

    W is the mean of the clients' variances and B the variance of their means, both weighted by counts; B is
    corrected to the population's. 1 where it cannot be known: nothing was seen, or one client of several.

    Args:
        seen: count, a number, (M,) or (M, c); mean and var (M, c).
        population: n, if the M clients are some of more.

    Example:
        >>> between_clients(Moments(5, torch.tensor([[1.0], [3.0]]), torch.tensor([[3.0], [3.0]])))
        tensor([0.2500], dtype=torch.float64)
    """
    mean, var = (t.to(accumulator_dtype(t)) for t in (seen.mean, seen.var))
    count = seen.count.to(mean) if isinstance(seen.count, Tensor) else mean.new_full((1,), seen.count)
    count = (count if count.dim() == 2 else count.view(-1, 1)).expand_as(mean)
    weights = count / count.sum(0).clamp(min=1)
    within = (weights * var).sum(0)
    between = (weights * (mean - (weights * mean).sum(0)).square()).sum(0)
    known = (count > 0).sum(0) >= min(2, len(mean) if population is None else population)
    if population is not None:
        between = between * cohort_factor(count, population)
    return torch.where(known, between / (within + between).clamp(min=1e-30), 1.0)


def round_steps(
    steps: float | Mapping[Hashable, float],
    clients: Collection[Hashable],
    seen: Mapping[Hashable, int],
    robust: bool,
) -> float:
    """The local steps of a round: the number given, or one number from the used clients' own.

    That is sum K_i k_i / sum K_i, weighted like everything else in an exact merge; or, under a robust rule,
    the median, because a client may claim any number.

    Args:
        steps: a number, or client -> its steps.
        clients: all who sent something; an error names one whose steps are missing or impossible.
        seen: used client -> the number of values that it saw.
        robust: whether the server has a robust rule.

    Example:
        >>> round_steps({"a": 1, "b": 5}, "ab", {"a": 30, "b": 10}, robust=False)
        2.0
    """
    if not isinstance(steps, Mapping):
        if not _is_steps(steps):
            raise ValueError(f"steps is {shown(steps)}; it must be {_STEPS}, or client -> steps")
        return steps  # pyrefly: ignore
    for client in clients:
        if client not in steps:
            raise ValueError(f"steps: client {client!r} is missing; give the steps of everyone in updates")
        if not _is_steps(steps[client]):
            raise ValueError(f"steps of client {client!r} is {shown(steps[client])}; it must be {_STEPS}")
    if not seen:
        return 1
    if robust:
        return float(median(steps[client] for client in seen))
    return math.fsum(steps[client] * count for client, count in seen.items()) / sum(seen.values())


def check_population(population: int | None, clients: int) -> None:
    """An error if the population is impossible, or smaller than the number of clients that sent something."""
    if population is None:
        return
    whole = isinstance(population, int) and not isinstance(population, bool)
    if not whole or not 1 <= population <= _MOST:
        raise ValueError(f"population is {shown(population)}; it must be the number of all clients, or None")
    if population < clients:
        raise ValueError(
            f"population is {population}, but {clients} clients sent something; count all of them"
        )


def _is_steps(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= _MOST  # pyrefly: ignore
