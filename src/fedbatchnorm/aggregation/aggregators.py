"""What a server makes of n clients' vectors: (n, d) -> (d,), robust against f of them.

One table, `AGGREGATORS`; every function takes (rows, f), keeps the rows' type and device, leaves them as
they are, and refuses 2f >= n. A value that is not a number counts as +infinity: a liar may send anything.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Rule = Callable[[Tensor, int], Tensor]

_SMOOTHING, _CONVERGED, _STEPS = 1e-9, 1e-10, 1000
_BLOCK, _LARGE_BLOCK = 2**17, 2**23  # values


def mean(rows: Tensor, f: int = 0) -> Tensor:
    """The plain mean, which withstands nobody: it refuses rows that are not finite.

    Example:
        >>> mean(torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
        tensor([2., 4.])
    """
    check(rows, f)
    found = rows.mean(0)
    if _may_wait(rows) and not bool(found.isfinite().all()):
        raise ValueError("mean: a row is not finite, and a plain mean cannot leave it out; use a robust rule")
    return found


def median(rows: Tensor, f: int = 0) -> Tensor:
    """The median of each coordinate, the midpoint of the two middle values for even n (Yin et al., 2018).

    Example:
        >>> median(torch.tensor([[1.0], [2.0], [4.0], [float("nan")]]), f=1)
        tensor([3.])
    """
    n = check(rows, f)
    ordered = _sorted(rows)
    low, high = ordered[(n - 1) // 2], ordered[n // 2]
    return low + (high - low) / 2 if n % 2 == 0 else low


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """The mean of each coordinate without its f smallest and f largest values (Yin et al., 2018).

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [3.0], [1e9]]), f=1)
        tensor([2.5000])
    """
    n = check(rows, f)
    return _sorted(rows)[f : n - f].mean(0)


def krum(rows: Tensor, f: int) -> Tensor:
    """The row with the nearest neighbours (Blanchard et al., 2017).

    Its score is the mean of its n - f - 1 smallest squared distances to others.
    """
    check(rows, f)
    rows = _in_order(rows)
    return rows.index_select(0, _scores(rows, f).argmin().view(1)).squeeze(0)


def multi_krum(rows: Tensor, f: int) -> Tensor:
    """The mean of the n - f rows with the best scores of Krum."""
    n = check(rows, f)
    rows = _in_order(rows)
    return rows[_scores(rows, f).argsort(stable=True)[: n - f]].mean(0)


def geometric_median(rows: Tensor, f: int = 0) -> Tensor:
    """The point with the least sum of distances to all rows, by Weiszfeld's steps, smoothed.

    Rows that are not finite are left out; more than f of them are an error.
    """
    check(rows, f)
    good = usable(rows, f)
    rows = rows if bool(good.all()) else rows[good]
    point = median(rows)
    scale = float(_lengths(rows, point).median())
    for _ in range(_STEPS if scale > 0 else 0):  # at 0 most rows are the point itself
        weights = 1 / _lengths(rows, point).clamp(min=_SMOOTHING * scale)
        moved = (weights @ rows) / weights.sum()
        step = float((moved - point).norm())
        point = moved
        if step <= _CONVERGED * scale:
            break
    return point


def centred_clipping(
    rows: Tensor, f: int = 0, *, centre: Tensor | None = None, radius: float = 100.0, steps: int = 1
) -> Tensor:
    """Move from a centre by the mean of the rows' differences, each clipped (Karimireddy et al., 2021).

    v <- v + mean_i (x_i - v) min(1, radius / |x_i - v|). Rows that are not finite count as no difference.

    Args:
        rows: (n, d).
        f: how many may lie.
        centre: (d,), where to start: 0 if not given; the last round's result is a good one.
        radius: the longest difference that counts in full.
        steps: how often.
    """
    check(rows, f)
    good = usable(rows, f)
    rows = only(rows, good)
    point = torch.zeros_like(rows[0]) if centre is None else centre.to(rows)
    for _ in range(steps):
        factor = shrink(_lengths(rows, point), radius) * good
        point = point + (factor @ rows) / len(rows) - factor.mean() * point
    return point


AGGREGATORS: dict[str, Rule] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "centred_clipping": centred_clipping,
}


def check(rows: Tensor, f: int) -> int:
    """The number of rows; an error if they are no (n, d) numbers, or f is too many of them."""
    if rows.dim() != 2 or not rows.is_floating_point() or not len(rows):
        raise ValueError(f"rows must be (n, d) floating point, got {tuple(rows.shape)} of {rows.dtype}")
    if f < 0 or 2 * f >= len(rows):
        raise ValueError(f"f is {f} of {len(rows)} clients; robust rules need 0 <= 2f < n")
    return len(rows)


def usable(rows: Tensor, f: int) -> Tensor:
    """Which rows are finite, (n,); an error if more than f are not, where the host may wait to know."""
    good = finite(rows)
    if not _may_wait(rows):
        return good
    bad = len(rows) - int(good.sum())
    if bad > f:
        raise ValueError(
            f"{bad} of {len(rows)} rows are not finite, and only f = {f} clients are expected to lie"
        )
    return good


def finite(rows: Tensor) -> Tensor:
    """Which rows hold nothing but numbers, (n,)."""
    if rows.device.type == "cpu":
        good = torch.linalg.vector_norm(rows, dim=1).isfinite()
        if bool(good.all()):  # else a length may have overflowed
            return good
    good = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for block in blocks(rows):
        good &= block.isfinite().all(1)
    return good


def only(rows: Tensor, good: Tensor) -> Tensor:
    """The rows, with 0 in place of those that are not good; on a CPU a copy only if there are any."""
    if rows.device.type == "cpu" and bool(good.all()):
        return rows
    return torch.where(good.unsqueeze(1), rows, 0)


def shrink(lengths: Tensor, radius: float | Tensor) -> Tensor:
    """The factors that bring rows of these lengths to at most `radius`, (n,)."""
    return torch.where(lengths > radius, radius / lengths, torch.ones_like(lengths))


def distances(rows: Tensor, good: Tensor | None = None) -> Tensor:
    """Squared Euclidean distances, (n, n): infinite from and to a row that is not finite.

    By matrix products, block by block, so that it takes no memory to speak of. Rows are taken about the one
    of median length: no liar, however far off, takes the digits away from the distances among the others.
    `good` says which rows are finite, where that is known.
    """
    n, good = len(rows), finite(rows) if good is None else good
    lengths = torch.stack([block.square().sum(1) for block in blocks(rows)]).sum(0)
    middle = torch.where(good, lengths, torch.inf).argsort()[(n - 1) // 2].view(1)
    products = rows.new_zeros(n, n)
    for block in blocks(rows):
        apart = torch.where(good.unsqueeze(1), block - block.index_select(0, middle), 0)
        products += apart @ apart.T
    squares = products.diagonal()
    found = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * products).clamp(min=0)
    found.fill_diagonal_(0)
    return found.masked_fill(~(good.unsqueeze(0) & good.unsqueeze(1)), torch.inf)


def blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """The rows in pieces (n, b) that stay in the cache, as views; few and large on a GPU."""
    size = _BLOCK if rows.device.type == "cpu" else _LARGE_BLOCK
    return rows.split(max(1, size // len(rows)), dim=1)


def _may_wait(rows: Tensor) -> bool:
    """Whether the host may ask for a value: not while a CUDA graph is being captured."""
    return rows.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _in_order(rows: Tensor) -> Tensor:
    """The rows in an order of their own, so that ties are not decided by who comes first."""
    return rows[rows.sum(1).nan_to_num(torch.inf).argsort()]


def _scores(rows: Tensor, f: int) -> Tensor:
    """Krum's scores, (n,): the mean of each row's n - f - 1 smallest squared distances to others."""
    n, good = len(rows), usable(rows, f)
    if n - f - 1 < 1:
        return rows.new_zeros(n)
    apart = distances(rows, good).fill_diagonal_(torch.inf)
    return apart.sort(1).values[:, : n - f - 1].mean(1)


def _sorted(rows: Tensor) -> Tensor:
    """Each coordinate in order, with what is not a number as infinity at the upper end."""
    if rows.device.type != "cpu":
        return torch.where(rows.isnan(), torch.inf, rows).sort(0).values
    # On a CPU numpy sorts a few times faster, and puts what is not a number last by itself.
    ordered = torch.from_numpy(np.sort(rows.detach().numpy(), axis=0))
    return (
        ordered.nan_to_num_(torch.inf, torch.inf, -torch.inf) if bool(ordered[-1].isnan().any()) else ordered
    )


def _lengths(rows: Tensor, point: Tensor) -> Tensor:
    """The distance of each row from a point, (n,), without their differences in memory."""
    exactly = "donot_use_mm_for_euclid_dist"
    return torch.cdist(rows, point.unsqueeze(0), compute_mode=exactly).squeeze(1)
