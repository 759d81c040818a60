"""`fused` on a CUDA GPU, in Triton.

Memory is read as (rows, channels), channels_last: a program takes a block of channels and a run of one
client's rows, tile after tile. Each program writes one row of partial sums, and a second, small kernel adds
them up. There are no atomics, so the same input gives the same bits.
"""

# ruff: noqa: N803, N806 - what a kernel is compiled for is in capitals, as everybody writes it in Triton

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

# Chosen by measuring on an H200. A thread loads 16 bytes at a time, and this many values before the first is
# used.
_WARPS = 4
_VALUES = 16
_LARGEST_BLOCK = 128  # channels of one program
_FORWARD_PROGRAMS = 132 * 4  # about how many to start: as many as an H200's 132 processors run at once
_BACKWARD_PROGRAMS = 132 * 4
_MOST_PARTIALS = 256  # per client and channel in the forward pass: what `_combine` adds up in one go
_COMBINED_CHANNELS = 8  # channels of one program of `_combine`
_ADDED_ROWS, _ADDED_COLUMNS = 256, 8  # of a tile of `_add_up`


class Tiles(NamedTuple):
    """How the work is divided: a tile is `unroll * rows` rows of `block` channels."""

    unroll: int  # rows of a tile that are one thread's
    rows: int  # rows of a tile that lie beside one another, over threads
    block: int  # channels of a tile
    blocks: int  # how many blocks the channels make
    run: int  # rows of one program, whole tiles
    runs: int  # how many runs the rows make, none of them empty

    def even(self, rows: int) -> bool:
        """Whether tiles fill the rows of a group."""
        return rows % (self.unroll * self.rows) == 0


def choose_tiles(
    rows: int, channels: int, dtype: torch.dtype, *, groups: int, programs: int, most: int
) -> Tiles:
    """Divide `groups` times `rows` rows so that about `programs` programs start.

    Args:
        rows: rows of one group, at least one; a run of rows stays within its group.
        channels: at least one.
        dtype: the input's; 16 bytes of it go to each thread.
        groups: the clients in the forward pass, one in the backward pass.
        programs: how many programs to aim for.
        most: how many runs a group may have.

    Example:
        >>> choose_tiles(51200, 64, torch.bfloat16, groups=10, programs=528, most=256)
        Tiles(unroll=2, rows=16, block=64, blocks=1, run=992, runs=52)
    """
    block = min(triton.next_power_of_2(channels), _LARGEST_BLOCK)
    blocks = triton.cdiv(channels, block)
    at_once = _WARPS * 32 * 16 // dtype.itemsize  # values that all threads load together
    beside = max(1, at_once // block)
    unroll = max(1, _VALUES * dtype.itemsize // 16)
    tiles = triton.cdiv(rows, unroll * beside)
    runs = min(most, triton.cdiv(programs, groups * blocks))
    run = triton.cdiv(tiles, runs) * unroll * beside
    return Tiles(unroll, beside, block, blocks, run, triton.cdiv(rows, run))


# --------------------------------------------------------------------------------------------------------
# Kernels. A tile has shape (ROWS, UNROLL, BLOCK), and Triton gives a thread all of the middle axis: the loops
# add up over it without talking to other threads, and the threads' sums meet once at the end. (Where axes
# are equally contiguous, Triton spreads threads over the first of them; hence this order. With the first two
# axes the other way round the results are the same, but sums in the loops go from thread to thread.)


@triton.jit
def _per_channel(pointer, channel, inside, default: tl.constexpr, dtype: tl.constexpr):
    """Load one value per channel, or take a default where there is no such vector."""
    if pointer is None:
        values = tl.full(channel.shape, default, dtype)
    else:
        values = tl.load(pointer + channel, mask=inside, other=default).to(dtype)
    return values


@triton.jit
def _relu(u):
    """What is not above zero becomes zero; NaN stays, as in torch."""
    return tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _left(row, count, EVEN: tl.constexpr):
    """Which rows of a tile exist; if tiles fill the rows, all do, and this is known when compiling."""
    return (row >= 0) if EVEN else (row < count)


@triton.jit
def _row_in_tile(UNROLL: tl.constexpr, ROWS: tl.constexpr):
    """Number the rows of a tile, (ROWS, UNROLL, 1)."""
    return tl.arange(0, ROWS)[:, None, None] + tl.arange(0, UNROLL)[None, :, None] * ROWS


@triton.jit
def _forward(
    z_pointer, out_pointer, partials, shift_pointer, mean_pointer, var_pointer, weight_pointer, bias_pointer,
    rows, run,
    EPS: tl.constexpr, CHANNELS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    UNROLL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    OWN: tl.constexpr, OWN_STATISTICS: tl.constexpr,
):  # fmt: skip
    """Write `out` for a run of one client's rows, and the mean and sum of squares about it of their x.

    Values are added up about a pivot, the mean of the run's first tile, so a large mean costs no digits:
    with k tiles the run's mean is at most sqrt(k - 1) of its standard deviations from the pivot, whatever
    the data, since the first tile is itself a k-th of them.
    """
    dtype = partials.dtype.element_ty
    TILE: tl.constexpr = UNROLL * ROWS
    number, client = tl.program_id(1), tl.program_id(2)

    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    inside = (channel < CHANNELS) | (CHANNELS % BLOCK == 0)  # known when compiling where it is always so
    own, shared = channel + client.to(tl.int64) * OWN, channel + client.to(tl.int64) * OWN_STATISTICS
    shift = _per_channel(shift_pointer, own, inside, 0.0, dtype)
    mean = _per_channel(mean_pointer, shared, inside, 0.0, dtype)
    var = _per_channel(var_pointer, shared, inside, 1.0, dtype)
    scale = tl.rsqrt(var + EPS) * _per_channel(weight_pointer, own, inside, 1.0, dtype)
    bias = _per_channel(bias_pointer, own, inside, 0.0, dtype)

    row = _row_in_tile(UNROLL, ROWS)
    within = row * CHANNELS + channel
    here = (client.to(tl.int64) * rows + number.to(tl.int64) * run) * CHANNELS
    count = tl.minimum(run, rows - number * run)

    z = tl.load(z_pointer + here + within, mask=_left(row, count, EVEN) & inside, other=0.0)
    x = z.to(dtype) + shift
    if BEFORE:
        x = _relu(x)
    if not EVEN:
        x = tl.where(row < count, x, 0.0)
    pivot = tl.sum(tl.sum(x, 1), 0) / tl.minimum(count, TILE)
    pivot = pivot[None, None, :]

    total = tl.zeros((ROWS, BLOCK), dtype)
    squares = tl.zeros((ROWS, BLOCK), dtype)
    left = count
    for _ in range(0, tl.cdiv(count, TILE)):
        ahead = here + TILE * CHANNELS  # the next tile is on its way while this one is worked on
        following = tl.load(
            z_pointer + ahead + within,
            mask=((row < left - TILE) if not EVEN else (left > TILE)) & inside,
            other=0.0,
        )
        x = z.to(dtype) + shift
        if BEFORE:
            x = _relu(x)
        y = (x - mean) * scale + bias
        if AFTER:
            y = _relu(y)
        out = y.to(out_pointer.dtype.element_ty)
        tl.store(out_pointer + here + within, out, mask=_left(row, left, EVEN) & inside)
        apart = x - pivot
        if not EVEN:
            apart = tl.where(row < left, apart, 0.0)
        total += tl.sum(apart, 1)
        squares += tl.sum(apart * apart, 1)
        z = following
        here = ahead
        left -= TILE

    total_apart = tl.sum(total, 0)[None, None, :]
    offset = total_apart / count
    about_mean = _relu(tl.sum(squares, 0)[None, None, :] - total_apart * offset)  # rounding may go below zero
    place = (client * tl.num_programs(1) + number) * (2 * CHANNELS) + channel
    tl.store(partials + place, pivot + offset, mask=inside)
    tl.store(partials + place + CHANNELS, about_mean, mask=inside)


@triton.jit
def _combine(
    partials, mean_pointer, var_pointer, rows, run, runs,
    CHANNELS: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine a client's runs by the law of total variance, in float64."""
    client = tl.program_id(1)
    number = tl.arange(0, RUNS)[:, None]
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (number < runs) & (channel < CHANNELS)
    place = (client * runs + number) * (2 * CHANNELS) + channel
    means = tl.load(partials + place, mask=mask, other=0.0).to(tl.float64)
    squares = tl.load(partials + place + CHANNELS, mask=mask, other=0.0).to(tl.float64)
    counts = tl.where(number < runs, tl.minimum(run, rows - number * run), 0).to(tl.float64)

    mean = (tl.sum(counts * means, 0) / rows)[None, :]
    apart = means - mean
    var = (tl.sum(squares + counts * apart * apart, 0) / rows)[None, :]
    dtype = mean_pointer.dtype.element_ty
    place = client * CHANNELS + channel
    tl.store(mean_pointer + place, mean.to(dtype), mask=channel < CHANNELS)
    tl.store(var_pointer + place, var.to(dtype), mask=channel < CHANNELS)


@triton.jit
def _gradient_sums(
    grad_pointer, z_pointer, partials,
    shift_pointer, mean_pointer, var_pointer, weight_pointer, bias_pointer, seen_pointer,
    rows, run,
    EPS: tl.constexpr, CHANNELS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    UNROLL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    OWN: tl.constexpr, OWN_STATISTICS: tl.constexpr,
):  # fmt: skip
    """For a run of one client's rows: the sums of the gradient g, and of g (x - u), u the client's mean."""
    dtype = partials.dtype.element_ty
    TILE: tl.constexpr = UNROLL * ROWS
    number, client = tl.program_id(1), tl.program_id(2)

    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    inside = (channel < CHANNELS) | (CHANNELS % BLOCK == 0)
    own, shared = channel + client.to(tl.int64) * OWN, channel + client.to(tl.int64) * OWN_STATISTICS
    shift = _per_channel(shift_pointer, own, inside, 0.0, dtype)
    mean = _per_channel(mean_pointer, shared, inside, 0.0, dtype)
    rstd = tl.rsqrt(_per_channel(var_pointer, shared, inside, 1.0, dtype) + EPS)
    scale = rstd * _per_channel(weight_pointer, own, inside, 1.0, dtype)
    bias = _per_channel(bias_pointer, own, inside, 0.0, dtype)
    center = tl.load(seen_pointer + client * CHANNELS + channel, mask=inside, other=0.0).to(dtype)

    row = _row_in_tile(UNROLL, ROWS)
    within = row * CHANNELS + channel
    here = (client.to(tl.int64) * rows + number.to(tl.int64) * run) * CHANNELS
    left = tl.minimum(run, rows - number * run)
    level = tl.zeros((ROWS, BLOCK), dtype)
    slope = tl.zeros((ROWS, BLOCK), dtype)
    for _ in range(0, tl.cdiv(left, TILE)):
        mask = _left(row, left, EVEN) & inside
        gradient = tl.load(grad_pointer + here + within, mask=mask, other=0.0).to(dtype)
        x = tl.load(z_pointer + here + within, mask=mask, other=0.0).to(dtype) + shift
        if BEFORE:
            x = _relu(x)
        if AFTER:
            gradient = tl.where((x - mean) * scale + bias <= 0, 0.0, gradient)
        level += tl.sum(gradient, 1)
        slope += tl.sum(gradient * (x - center), 1)
        here += TILE * CHANNELS
        left -= TILE

    place = (client * tl.num_programs(1) + number) * (2 * CHANNELS) + channel
    tl.store(partials + place, tl.sum(level, 0)[None, None, :], mask=inside)
    tl.store(partials + place + CHANNELS, tl.sum(slope, 0)[None, None, :], mask=inside)


@triton.jit
def _held_part(
    partials, held_pointer, seen_var_pointer, share_pointer, rows, runs,
    EPS: tl.constexpr, CHANNELS: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each client's gradient loses: P + Q (x - u), with P = share mean(g).

    Q = share mean(g b) / sqrt(var + eps). The two are written to (clients, 2, c).
    """
    client = tl.program_id(1)
    share = tl.load(share_pointer).to(tl.float64)
    number = tl.arange(0, RUNS)[:, None]
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < CHANNELS
    mask = (number < runs) & inside
    place = (client * runs + number) * (2 * CHANNELS) + channel
    level = tl.sum(tl.load(partials + place, mask=mask, other=0.0).to(tl.float64), 0)[None, :]
    slope = tl.sum(tl.load(partials + place + CHANNELS, mask=mask, other=0.0).to(tl.float64), 0)[None, :]
    var = tl.load(seen_var_pointer + client * CHANNELS + channel, mask=inside, other=1.0).to(tl.float64)
    dtype = held_pointer.dtype.element_ty
    place = client * (2 * CHANNELS) + channel
    tl.store(held_pointer + place, (share * level / rows).to(dtype), mask=inside)
    tl.store(held_pointer + place + CHANNELS, (share * slope / rows / (var + EPS)).to(dtype), mask=inside)


@triton.jit
def _backward(
    grad_pointer, z_pointer, out_pointer, partials,
    shift_pointer, mean_pointer, var_pointer, weight_pointer, bias_pointer, seen_pointer, held_pointer,
    rows, run,
    EPS: tl.constexpr, CHANNELS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    UNROLL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    OWN: tl.constexpr, OWN_STATISTICS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of z for a run of rows, and their sums for shift, weight and bias.

    With `held_pointer` the rows are those of one client, and its gradient loses P + Q (x - u). So they are
    where clients have vectors of their own (OWN, OWN_STATISTICS).
    """
    dtype = partials.dtype.element_ty
    TILE: tl.constexpr = UNROLL * ROWS
    number, client = tl.program_id(1), tl.program_id(2)

    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    inside = (channel < CHANNELS) | (CHANNELS % BLOCK == 0)  # known when compiling where it is always so
    own, shared = channel + client.to(tl.int64) * OWN, channel + client.to(tl.int64) * OWN_STATISTICS
    shift = _per_channel(shift_pointer, own, inside, 0.0, dtype)
    mean = _per_channel(mean_pointer, shared, inside, 0.0, dtype)
    rstd = tl.rsqrt(_per_channel(var_pointer, shared, inside, 1.0, dtype) + EPS)
    scale = rstd * _per_channel(weight_pointer, own, inside, 1.0, dtype)
    bias = _per_channel(bias_pointer, own, inside, 0.0, dtype)
    if held_pointer is not None:
        center = tl.load(seen_pointer + client * CHANNELS + channel, mask=inside, other=0.0).to(dtype)
        level = tl.load(held_pointer + client * (2 * CHANNELS) + channel, mask=inside, other=0.0)
        slope = tl.load(held_pointer + client * (2 * CHANNELS) + CHANNELS + channel, mask=inside, other=0.0)

    row = _row_in_tile(UNROLL, ROWS)
    within = row * CHANNELS + channel
    here = (client.to(tl.int64) * rows + number.to(tl.int64) * run) * CHANNELS
    left = tl.minimum(run, rows - number * run)
    for_shift = tl.zeros((ROWS, BLOCK), dtype)
    for_weight = tl.zeros((ROWS, BLOCK), dtype)
    for_bias = tl.zeros((ROWS, BLOCK), dtype)
    for _ in range(0, tl.cdiv(left, TILE)):
        mask = _left(row, left, EVEN) & inside
        # Beyond the end the gradient is zero, and so is all that is added up.
        gradient = tl.load(grad_pointer + here + within, mask=mask, other=0.0).to(dtype)
        u = tl.load(z_pointer + here + within, mask=mask, other=0.0).to(dtype) + shift
        x = u
        if BEFORE:
            x = _relu(u)
        centered = x - mean
        if AFTER:
            gradient = tl.where(centered * scale + bias <= 0, 0.0, gradient)
        for_bias += tl.sum(gradient, 1)
        for_weight += tl.sum(gradient * centered, 1)
        if held_pointer is not None:
            gradient -= level + slope * (x - center)  # pyrefly: ignore
            if not EVEN:
                gradient = tl.where(row < left, gradient, 0.0)
        gradient *= scale
        if BEFORE:
            gradient = tl.where(u <= 0, 0.0, gradient)
        for_shift += tl.sum(gradient, 1)
        tl.store(out_pointer + here + within, gradient.to(out_pointer.dtype.element_ty), mask=mask)
        here += TILE * CHANNELS
        left -= TILE

    place = (client * tl.num_programs(1) + number) * (3 * CHANNELS) + channel
    tl.store(partials + place, tl.sum(for_shift, 0)[None, None, :], mask=inside)
    tl.store(partials + place + CHANNELS, tl.sum(for_weight, 0)[None, None, :] * rstd, mask=inside)
    tl.store(partials + place + 2 * CHANNELS, tl.sum(for_bias, 0)[None, None, :], mask=inside)


@triton.jit
def _add_up(partials, sums, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the rows of matrices that have many rows and few columns."""
    partials += tl.program_id(1) * rows * columns
    sums += tl.program_id(1) * columns
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), partials.dtype.element_ty)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < columns)
        total += tl.load(partials + row * columns + column, mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0)[None, :], mask=column < columns)


# --------------------------------------------------------------------------------------------------------
# Launches. Inputs are in the layout that the kernels read: channels_last, or (rows, channels).


def forward(
    z: Tensor, vectors: Sequence[Tensor | None], outputs: tuple[Tensor, Tensor, Tensor],
    *, eps: float, clients: int, before: bool, after: bool,
) -> None:  # fmt: skip
    """Fill `outputs`: the normalized z, and each client's mean and variance."""
    out, mean, var = outputs
    channels = z.shape[1]
    rows = z.numel() // channels // clients
    tiles = choose_tiles(
        rows, channels, z.dtype, groups=clients, programs=_FORWARD_PROGRAMS, most=_MOST_PARTIALS
    )
    partials = mean.new_empty((clients, tiles.runs, 2, channels))
    with torch.cuda.device_of(z):
        _forward[tiles.blocks, tiles.runs, clients](
            z, out, partials, *vectors, rows, tiles.run,
            EPS=eps, CHANNELS=channels, BEFORE=before, AFTER=after,
            UNROLL=tiles.unroll, ROWS=tiles.rows, BLOCK=tiles.block, EVEN=tiles.even(rows), num_warps=_WARPS,
            **_whose(vectors),
        )  # fmt: skip
        _combine[triton.cdiv(channels, _COMBINED_CHANNELS), clients](
            partials, mean, var, rows, tiles.run, tiles.runs,
            CHANNELS=channels, RUNS=triton.next_power_of_2(tiles.runs), BLOCK=_COMBINED_CHANNELS,
        )  # fmt: skip


def backward(
    gradient: Tensor, z: Tensor, vectors: Sequence[Tensor | None], seen: tuple[Tensor, ...] | None,
    outputs: tuple[Tensor, Tensor], *, eps: float, before: bool, after: bool,
) -> None:  # fmt: skip
    """Fill `outputs`: the gradient of z, and those of shift, weight and bias as the rows of (3, c).

    `seen` is each client's mean and variance, (clients, c), and the share of BatchNorm's gradient to take.
    Where clients have vectors of their own, the rows are those of (clients, 3, c).
    """
    out, sums = outputs
    alone = len(sums) if sums.dim() == 3 else 1  # how many sums there are
    clients = alone if seen is None else len(seen[0])
    channels = z.shape[1]
    rows = z.numel() // channels // clients
    most = _BACKWARD_PROGRAMS
    tiles = choose_tiles(rows, channels, z.dtype, groups=clients, programs=most, most=most)
    grid = tiles.blocks, tiles.runs, clients
    settings = {
        "EPS": eps, "CHANNELS": channels, "BEFORE": before, "AFTER": after, "UNROLL": tiles.unroll,
        "ROWS": tiles.rows, "BLOCK": tiles.block, "EVEN": tiles.even(rows), "num_warps": _WARPS,
        **_whose(vectors),
    }  # fmt: skip
    partials = sums.new_empty((clients * tiles.runs, 3, channels))
    mean = held = None
    with torch.cuda.device_of(z):
        if seen is not None:
            mean, var, share = (t.contiguous() for t in seen)
            held = sums.new_empty((clients, 2, channels))
            own = sums.new_empty((clients, tiles.runs, 2, channels))
            _gradient_sums[grid](gradient, z, own, *vectors, mean, rows, tiles.run, **settings)
            _held_part[triton.cdiv(channels, _COMBINED_CHANNELS), clients](
                own, held, var, share, rows, tiles.runs,
                EPS=eps, CHANNELS=channels, RUNS=triton.next_power_of_2(tiles.runs), BLOCK=_COMBINED_CHANNELS,
            )  # fmt: skip
        _backward[grid](gradient, z, out, partials, *vectors, mean, held, rows, tiles.run, **settings)
        _add_up[triton.cdiv(3 * channels, _ADDED_COLUMNS), alone](
            partials, sums, len(partials) // alone, 3 * channels, ROWS=_ADDED_ROWS, BLOCK=_ADDED_COLUMNS
        )


def _whose(vectors: Sequence[Tensor | None]) -> dict[str, int]:
    """How far apart in memory the clients' parameters lie, and their statistics; 0 where they share them."""
    shift, mean, _, weight, bias = vectors
    own = [v.stride(0) for v in (shift, weight, bias) if v is not None and v.dim() == 2]
    statistics = mean.stride(0) if mean is not None and mean.dim() == 2 else 0
    return {"OWN": max(own, default=0), "OWN_STATISTICS": statistics}
