"""How a server aggregates n clients' vectors: (n, d) -> (d,), robust against f Byzantine clients.

One table, `AGGREGATORS`; every function takes (rows, f), keeps the rows' type and device, leaves them as
they are, and refuses 2f >= n. NaN counts as +infinity, because a Byzantine client may send anything.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Rule = Callable[[Tensor, int], Tensor]

_SMOOTHING, _CONVERGED, _STEPS = 1e-9, 1e-10, 1000
_CLOSE = 1e-3  # squared distances below this share of those from a common point lose digits
_GOLDEN = (5**0.5 - 1) / 2  # its multiples' fractions are all different
_BLOCK, _LARGE_BLOCK = 2**17, 2**23  # values


def mean(rows: Tensor, f: int = 0) -> Tensor:
    """The plain mean, which is not robust; it refuses rows that are not finite.

    Example:
        >>> mean(torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
        tensor([2., 4.])
    """
    check(rows, f)
    found = rows.mean(0)
    if _may_wait(rows) and not bool(found.isfinite().all()):
        raise ValueError("mean: the result is not finite; a plain mean leaves no row out: use a robust rule")
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
    if n % 2:
        return low
    return as_numbers(torch.where(low == high, low, low + (high - low) / 2))


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """The mean of each coordinate without its f smallest and f largest values (Yin et al., 2018).

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [3.0], [1e9]]), f=1)
        tensor([2.5000])
    """
    n = check(rows, f)
    return as_numbers(_sorted(rows)[f : n - f].mean(0))


def krum(rows: Tensor, f: int) -> Tensor:
    """The row with the nearest neighbors (Blanchard et al., 2017).

    Its score is the mean of its n - f - 1 smallest squared distances to others.
    """
    check(rows, f)
    return rows.index_select(0, _best(rows, f, 1)).squeeze(0)


def multi_krum(rows: Tensor, f: int) -> Tensor:
    """The mean of the n - f rows with the best scores of Krum."""
    n = check(rows, f)
    return rows[_best(rows, f, n - f)].mean(0)


def geometric_median(rows: Tensor, f: int = 0) -> Tensor:
    """The point with the least sum of distances to all rows, by the steps of Weiszfeld, Vardi and Zhang.

    T is the mean of the rows weighted by 1 / distance. Where the point is a row itself, that row pulls back
    with the strength 1 against the pull |R| of the others: y <- T + min(1, 1 / |R|) (y - T).
    Rows that are not finite are left out; more than f of them are an error.
    """
    check(rows, f)
    good = usable(rows, f)
    rows = rows if bool(good.all()) else rows[good]
    size = rows.abs().max()
    if not 0 < float(size) < torch.finfo(rows.dtype).max ** 0.5 / rows.shape[1]:
        # Squares would overflow; with nothing but zeros there is nothing to do.
        return geometric_median(rows / size) * size if float(size) else rows[0].clone()
    point = median(rows)
    scale = float(_lengths(rows, point).median())
    for _ in range(_STEPS if scale > 0 else 0):  # at 0 most rows are the point itself
        lengths = _lengths(rows, point)
        here = lengths <= _SMOOTHING * scale
        weights = torch.where(here, 0, 1 / lengths)
        towards = (weights @ rows) / weights.sum()
        pull = weights.sum() * (towards - point).norm()
        moved = towards + (here.sum() / pull).nan_to_num(0.0).clamp(max=1) * (point - towards)
        step = float((moved - point).norm())
        point = moved
        if step <= _CONVERGED * scale:
            break
    return point


def centred_clipping(
    rows: Tensor, f: int = 0, *, center: Tensor | None = None, radius: float = 100.0, steps: int = 1
) -> Tensor:
    """Move from a center by the mean of the rows' differences, each clipped (Karimireddy et al., 2021).

    v <- v + mean_i (x_i - v) min(1, radius / |x_i - v|). Rows that are not finite count as no difference.

    Args:
        rows: (n, d).
        f: how many may be Byzantine.
        center: (d,), where to start: 0 if not given; the last round's result is a good one.
        radius: the longest difference that counts in full.
        steps: how often.
    """
    check(rows, f)
    check_radius(radius)
    good = usable(rows, f)
    rows = only(rows, good)
    point = torch.zeros_like(rows[0]) if center is None else center.to(rows)
    if _may_wait(rows) and not bool(point.isfinite().all()):
        raise ValueError("center has a value that is not finite")
    for _ in range(steps):
        factor = shrink(_lengths(rows, point), radius) * good
        point = point + (factor @ rows) / len(rows) - factor.mean() * point
    return point


geometric_median.needs_host = True  # pyrefly: ignore  (it stops when it has converged)

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
    """The number of rows; an error if they are not (n, d) numbers, or if f is too large."""
    if rows.dim() != 2 or rows.dtype not in (torch.float32, torch.float64) or not len(rows):
        raise ValueError(
            f"rows must be (n, d) in float32 or float64, got {tuple(rows.shape)} of {rows.dtype}"
        )
    if not isinstance(f, int):
        raise ValueError(f"f is {f!r}; it must be a whole number")
    if f < 0 or 2 * f >= len(rows):
        raise ValueError(f"f is {f} of {len(rows)} clients; robust rules need 0 <= 2f < n")
    return len(rows)


def usable(rows: Tensor, f: int) -> Tensor:
    """Which rows are finite, (n,). If the host may wait for the answer, an error if more than f are not."""
    good = finite(rows)
    if not _may_wait(rows):
        return good
    bad = len(rows) - int(good.sum())
    if bad > f:
        raise ValueError(
            f"{bad} of {len(rows)} rows are not finite, and only f = {f} clients are expected to be Byzantine"
        )
    return good


def finite(rows: Tensor) -> Tensor:
    """Which rows contain only finite numbers, (n,)."""
    if rows.device.type == "cpu":
        good = torch.linalg.vector_norm(rows, dim=1).isfinite()
        if bool(good.all()):  # else a length may have overflowed
            return good
    good = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for block in blocks(rows):
        good &= block.isfinite().all(1)
    return good


def check_radius(radius: float) -> None:
    """An error if this is not a usable length."""
    if not radius > 0:
        raise ValueError(f"radius is {radius}; it must be positive")


def as_numbers(result: Tensor) -> Tensor:
    """The result, with infinity in place of NaN, which appears if more than f rows have NaN."""
    return torch.where(result.isnan(), torch.inf, result)


def only(rows: Tensor, good: Tensor) -> Tensor:
    """The rows, with 0 in place of those that are not usable; on a CPU a copy only if there are any."""
    if rows.device.type == "cpu" and bool(good.all()):
        return rows
    return torch.where(good.unsqueeze(1), rows, 0)


def shrink(lengths: Tensor, radius: float | Tensor) -> Tensor:
    """The factors that bring rows of these lengths to at most `radius`, (n,)."""
    return torch.where(lengths > radius, radius / lengths, torch.ones_like(lengths))


def distances(rows: Tensor, good: Tensor | None = None) -> Tensor:
    """Squared Euclidean distances, (n, n): infinite from and to a row that is not finite.

    By matrix products, block by block, so that it takes little memory. Rows are measured from one of them:
    first from the one of median length; then, if that is far from most others compared with their distances
    from each other, from one close to those. So no Byzantine client can spoil the precision of the distances
    between the others. `good` says which rows are finite, where that is known.
    """
    n, good = len(rows), finite(rows) if good is None else good
    lengths = torch.stack([block.square().sum(1) for block in blocks(rows)]).sum(0)
    about = torch.where(good, lengths, torch.inf).argsort()[(n - 1) // 2].view(1)
    found, squares = _distances_about(rows, good, about)
    typical = found.sort(1).values[:, n // 2]
    about = typical.argmin().view(1)
    doubtful = (typical < _CLOSE * squares).index_select(0, about)
    if rows.device.type != "cpu" or bool(doubtful):
        found, _ = _distances_about(rows, good, about)
    return found


def _distances_about(rows: Tensor, good: Tensor, about: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances (n, n), computed about one row, and the rows' squared distances from it, (n,)."""
    products = rows.new_zeros(len(rows), len(rows))
    for block in blocks(rows):
        apart = torch.where(good.unsqueeze(1), block - block.index_select(0, about), 0)
        products += apart @ apart.T
    squares = products.diagonal()
    found = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * products).clamp(min=0)
    found.fill_diagonal_(0)
    known = good.unsqueeze(0) & good.unsqueeze(1) & ~found.isnan()  # squares of huge numbers overflow
    return torch.where(known, found, torch.inf), squares


def blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """The rows in pieces (n, b) that stay in the cache, as views; few and large on a GPU."""
    size = _BLOCK if rows.device.type == "cpu" else _LARGE_BLOCK
    return rows.split(max(1, size // len(rows)), dim=1)


def _may_wait(rows: Tensor) -> bool:
    """Whether the host may read a value: not while a CUDA graph is being captured."""
    return rows.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def own_order(rows: Tensor) -> Tensor:
    """An order of the rows by their content, (n,), so that ties do not depend on the order of clients."""
    keys, start = rows.new_zeros(len(rows)), 0
    for block in blocks(rows):
        places = torch.arange(start + 1, start + 1 + block.shape[1], device=rows.device, dtype=rows.dtype)
        keys += block @ (places * _GOLDEN).frac_()
        start += block.shape[1]
    return keys.nan_to_num(torch.inf).argsort()


def _best(rows: Tensor, f: int, count: int) -> Tensor:
    """Which rows have the best of Krum's scores: the mean of the n - f - 1 smallest squared distances."""
    n, good, order = len(rows), usable(rows, f), own_order(rows)
    if n - f - 1 < 1:
        return order[:count]
    apart = distances(rows, good).fill_diagonal_(torch.inf)
    scores = apart.sort(1).values[:, : n - f - 1].mean(1)
    return order[scores[order].argsort(stable=True)[:count]]


def _sorted(rows: Tensor) -> Tensor:
    """Each coordinate sorted, with NaN as infinity at the upper end."""
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
