"""Mixing steps, which a server may apply to n clients' vectors before it aggregates them: (n, d) -> (m, d).

One table, `MIXING`; every function takes (rows, f), keeps type and device, and leaves the rows as they are.
"""

import torch
from torch import Tensor

from ..norm.moments import accumulator_dtype
from .aggregators import (
    Rule,
    as_numbers,
    blocks,
    check,
    check_radius,
    distances,
    finite,
    only,
    own_order,
    shrink,
    usable,
)


def nearest_neighbors(rows: Tensor, f: int) -> Tensor:
    """Each row becomes the mean of the n - f rows nearest to it, itself included (Allouah et al., 2023).

    A matrix of weights (n, n) times the rows, block by block: beyond its result it needs no more memory than
    that matrix and a block. A row that is not finite is not a neighbor of any other, and becomes the mean of
    the others. More than f such rows are an error.

    Example:
        >>> nearest_neighbors(torch.tensor([[0.0], [2.0], [100.0]]), f=1)
        tensor([[ 1.],
                [ 1.],
                [51.]])
    """
    n, rows = check(rows, f), rows.detach()
    good, order = usable(rows, f), own_order(rows)
    nearest = order[distances(rows, good)[:, order].argsort(dim=1, stable=True)[:, : n - f]]
    weights = rows.new_zeros(n, n).scatter_(1, nearest, 1 / (n - f))
    weights = torch.where(good.unsqueeze(1), weights, good.to(rows.dtype) / good.sum())
    mixed = torch.empty_like(rows)
    for block, into in zip(blocks(rows), blocks(mixed), strict=True):
        torch.matmul(weights, only(block, good), out=into)
    return mixed


def bucketing(rows: Tensor, f: int = 0, *, size: int = 2, generator: torch.Generator) -> Tensor:
    """Means of random groups of `size` rows, (ceil(n / size), d) (Karimireddy et al., 2022)."""
    n = check(rows, f)
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    order = torch.randperm(n, generator=generator, device=generator.device).to(rows.device)
    return as_numbers(torch.stack([group.mean(0) for group in rows[order].split(size)]))


def clipping(rows: Tensor, f: int = 0, *, radius: float = 2.0) -> Tensor:
    """Rows longer than `radius` are scaled to that length; those whose length is not finite become 0."""
    check(rows, f)
    check_radius(radius)
    rows = only(rows, finite(rows))
    return _scaled(rows, shrink(_lengths(rows), radius))


def adaptive_clipping(rows: Tensor, f: int) -> Tensor:
    """ARC: the floor(2 f (n - f) / n) longest rows become as long as the next (Allouah et al., 2025)."""
    n = check(rows, f)
    good = usable(rows, f)
    rows = only(rows, good)
    norms = _lengths(rows)
    ranked = torch.where(good, norms, torch.inf).sort(descending=True).values
    radius = ranked[int(2 * f / n * (n - f))]
    return _scaled(rows, shrink(norms, radius))


def _lengths(rows: Tensor) -> Tensor:
    """(n,), in float64 if the device has it, so that squares of large float32 values do not overflow."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=accumulator_dtype(rows))


def _scaled(rows: Tensor, factors: Tensor) -> Tensor:
    return rows * factors.to(rows.dtype).unsqueeze(1)


MIXING: dict[str, Rule] = {"nnm": nearest_neighbors, "arc": adaptive_clipping, "clipping": clipping}
