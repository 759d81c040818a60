"""A round's numbers, all layers side by side, so that a merge takes a few operations for any number of
layers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..norm.flat import grouped, parts_of, side_by_side, spread
from ..norm.moments import Running, tracked_steps
from ..norm.sums import weighted_mean
from .cohort import cohort_factor, population_count
from .robust import Aggregator, Step, robust_step

_CHUNK = 2048  # channels at a time, so that n rows of them stay in the cache


class Table(NamedTuple):
    """What n clients saw, counts (n, L), means and variances (n, d), and the statistics before, m and v (d,);
    `sizes` (L,) are the layers' channels."""

    counts: Tensor
    means: Tensor
    variances: Tensor
    m: Tensor
    v: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, shared: Mapping[str, Running], rows: Tensor) -> "Table":
        """From the statistics before and `read_all`'s rows."""
        m, v = (
            side_by_side([getattr(r, k) for r in shared.values()]).cpu().double() for k in ("mean", "var")
        )
        sizes = torch.tensor([len(running.mean) for running in shared.values()], dtype=torch.int64)
        counts, means, variances = rows.split([len(sizes), len(m), len(m)], 1)
        return cls(counts, means, variances, m, v, sizes)

    def spread(self, values: Sequence[float]) -> Tensor:
        """A number for each layer, (L,), as one for each channel, (d,)."""
        return spread(torch.tensor(values, dtype=torch.float64), self.sizes, len(self.m))


class Union(NamedTuple):
    """All clients' values together: N by layer, u and s^2 (d,), and the part of s^2 between clients."""

    total: list[float]
    mean: Tensor
    var: Tensor
    between: Tensor


def union(table: Table) -> Union:
    """N = sum K_i;  u = sum K_i u_i / N;  s^2 = sum K_i (s_i^2 + (u_i - u)^2) / N, for every layer (RV).

    The order of clients does not matter to the last bit, and a client with K_i = 0 has no effect.
    """
    total = [math.fsum(column) for column in table.counts.T.tolist()]
    shares = table.counts / torch.tensor(total, dtype=torch.float64).clamp(min=1)
    layer = spread(torch.arange(len(table.sizes)), table.sizes, len(table.m))
    everywhere = bool(table.counts.all())
    alike = bool((shares == shares[:, :1]).all())  # as where clients differ in their batches alone
    parts = []
    chunks = (t.split(_CHUNK, -1) for t in (layer, table.means, table.variances))
    for chunk, means, variances in zip(*chunks, strict=True):
        share = shares[:, :1] if alike else shares.index_select(1, chunk)
        mean = weighted_mean(share, means)
        square = (means - mean).square_()
        if not everywhere:  # who is not there is no distance away
            square.masked_fill_(share == 0, 0)
        between = weighted_mean(share, square)
        parts.append((mean, weighted_mean(share, square.add_(variances)), between))
    columns = zip(*parts, strict=True) if parts else [(table.m[:0],)] * 3
    return Union(total, *map(torch.cat, columns))


def of_population(table: Table, seen: Union, cohorts: Sequence[int], population: Sequence[float]) -> Union:
    """The union's moments with the spread between clients as it would be over the population.

    var = within + factor * between; the count becomes N n/M. For M = n nothing changes, to the bit.

    Args:
        table: what the clients saw.
        seen: `union(table)`.
        cohorts: M for each layer.
        population: n for each layer; at least M.
    """
    larger = [1 < m < n for m, n in zip(cohorts, population, strict=True)]
    if not any(larger):
        return seen
    factor = cohort_factor(table.counts, torch.tensor(population, dtype=torch.float64))
    factor = torch.where(table.spread(larger) > 0, spread(factor, table.sizes, len(table.m)), 1.0)
    between = factor * seen.between
    var = seen.var + (between - seen.between)
    numbers = zip(seen.total, cohorts, population, larger, strict=True)
    total = [float(round(float(population_count(t, m, n)))) if more else t for t, m, n, more in numbers]
    return seen._replace(total=total, var=var, between=between)


def part_between(table: Table, seen: Union) -> Tensor:
    """The part of the variance that lies between clients, (L,): the mean over channels of B / s^2."""
    part = seen.between / seen.var.clamp(min=1e-30)
    layer = spread(torch.arange(len(table.sizes)), table.sizes, len(table.m))
    return torch.zeros(len(table.sizes), dtype=part.dtype).index_add_(0, layer, part) / table.sizes.clamp(
        min=1
    )


def exact_step(table: Table, seen: Union, beta: Sequence[float]) -> tuple[Tensor, Tensor]:
    """m <- (1 - beta) m + beta u;  v <- (1 - beta) v + beta N/(N-1) s^2, (d,) each (Algorithm 1, lines 5, 6).

    A single value (N = 1) has no unbiased variance: v stays.
    """
    b = table.spread(beta)
    unbiased = [b * (n / (n - 1)) if n > 1 else 0.0 for b, n in zip(beta, seen.total, strict=True)]
    several = table.spread([n > 1 for n in seen.total]) > 0
    mean = (1 - b) * table.m + b * seen.mean
    return mean, torch.where(several, (1 - b) * table.v + table.spread(unbiased) * seen.var, table.v)


def robust_steps(
    table: Table,
    shared: Mapping[str, Running],
    total: Sequence[float],
    beta: Sequence[float],
    population: Sequence[float],
    merged: Sequence[bool],
    aggregator: Aggregator,
) -> tuple[Tensor, Tensor]:
    """The robust step, once for all layers that the same clients have seen: (m', v'), (d,) each."""
    there = table.counts > 0
    mean, var = table.m.clone(), table.v.clone()
    floor = table.spread([running.eps for running in shared.values()])
    patterns = [bytes(column) for column in there.T.tolist()]
    for group in grouped([i for i, taken in enumerate(merged) if taken], lambda i: patterns[i]):
        rows = there[:, group[0]].nonzero().squeeze(1)
        clients, of_all = len(rows), population[group[0]]
        scaled = [float(population_count(n, clients, of_all)) if clients > 1 else n for n in total]
        step = Step(table.m, table.v, table.spread(beta), table.spread(scaled), floor)
        chosen = torch.zeros(len(table.sizes), dtype=torch.bool)
        chosen[group] = True
        columns = spread(chosen, table.sizes, len(table.m)).nonzero().squeeze(1)
        of_group = Step(*(values[columns] for values in step))
        means, variances = (t[rows][:, columns] for t in (table.means, table.variances))
        new_mean, new_var = robust_step(of_group, means, variances, aggregator, of_all)
        # A single value has no variance: there the old one stays.
        several = table.spread([n > 1 for n in total])[columns] > 0
        mean[columns], var[columns] = new_mean, torch.where(several, new_var, table.v[columns])
    return mean, var


def next_statistics(
    shared: Mapping[str, Running], merged: Sequence[bool], mean: Tensor, var: Tensor, steps: float
) -> dict[str, Running]:
    """Each layer's next statistics in the type and on the device of those before; others stay as they are."""
    sizes = [len(running.mean) for running in shared.values()]
    means = _like(mean, [running.mean for running in shared.values()], sizes)
    variances = _like(var, [running.var for running in shared.values()], sizes)
    layers = zip(shared.items(), merged, means, variances, strict=True)
    further = tracked_steps(steps)
    return {
        name: old._replace(mean=m, var=v, tracked=old.tracked + further) if taken else old
        for (name, old), taken, m, v in layers
    }


def _like(values: Tensor, like: Sequence[Tensor], sizes: list[int]) -> Sequence[Tensor]:
    if len({(t.dtype, t.device) for t in like}) == 1:
        return parts_of(values.to(like[0]), sizes)
    return [part.to(t) for part, t in zip(parts_of(values, sizes), like, strict=True)]
