"""`convolution` on a CUDA GPU, in Triton: 3 x 3 convolutions of clients that have weights of their own.

A library convolves one client after another, or as groups of channels; neither fills a GPU as one product
does. Here a client is an axis of the grid. Images are read as (pixels, channels), channels_last, and a
convolution is the product of a block of pixels and a block of channels, added up over nine taps: no patches
are written. Tiles were chosen by measuring on an H200.
"""

# ruff: noqa: E741, N803 - what a kernel is compiled for is in capitals, as everybody writes it in Triton

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

_PIXELS = 128  # of a tile of `_convolve`
_ADDED = 512  # values of one program of `_add_up`


@triton.jit
def _convolve(
    x, w, y, rows, step_client, STEP_O: tl.constexpr, STEP_TAP: tl.constexpr, STEP_C: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, FLIP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A block of a client's pixels by a block of output channels; the sum goes over taps and channels.

    x: (clients, rows, C), a row a pixel; w: (clients, O, 9, C) by its strides, with taps in reverse for the
    gradient of the input (FLIP); y: (clients, rows, O).
    """
    blocks: tl.constexpr = O // BN
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    o = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row, column = m // W % H, m % W
    x_here = x + client * rows * C + (m[:, None] * C + k[None, :])
    w_here = w + client * step_client + (o[None, :] * STEP_O + k[:, None] * STEP_C)
    total = tl.zeros((BM, BN), tl.float32)
    parts: tl.constexpr = C // BK
    for i in range(9 * parts):
        tap, first = i // parts, i % parts * BK
        down, right = tap // 3 - 1, tap % 3 - 1
        there = (
            (row + down >= 0) & (row + down < H) & (column + right >= 0) & (column + right < W) & (m < rows)
        )
        a = tl.load(x_here + ((down * W + right) * C + first), mask=there[:, None], other=0.0)
        at = 8 - tap if FLIP else tap
        b = tl.load(w_here + (at * STEP_TAP + first * STEP_C))
        total = tl.dot(a, b, total, input_precision="tf32")
    place = client * rows * O + (m[:, None] * O + o[None, :])
    tl.store(y + place, total.to(y.dtype.element_ty), mask=(m < rows)[:, None])


@triton.jit
def _correlate(
    g, x, partials, rows, run,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of three taps of the weights, beside one another, over a run of a client's pixels.

    g: (clients, rows, O); x: (clients, rows, C); partials: (runs, clients, O, 9, C).
    """
    part, number, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = C // BN
    down = part % 3 - 1
    c = part // 3 % blocks * BN + tl.arange(0, BN)
    o = part // 3 // blocks * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    g_here = g + client * rows * O + o[None, :]
    x_here = x + client * rows * C + (down * W * C + c[None, :])
    left = tl.zeros((BM, BN), tl.float32)
    middle = tl.zeros((BM, BN), tl.float32)
    right = tl.zeros((BM, BN), tl.float32)
    end = tl.minimum(rows, (number + 1) * run)
    for first in range(number * run, end, BK):
        m = first + k
        row, column = m // W % H + down, m % W
        inside = m < end
        there = inside & (row >= 0) & (row < H)
        a = tl.trans(tl.load(g_here + m[:, None] * O, mask=inside[:, None], other=0.0))
        at = x_here + m[:, None] * C
        b = tl.load(at - C, mask=(there & (column > 0))[:, None], other=0.0)
        left = tl.dot(a, b, left, input_precision="tf32")
        b = tl.load(at, mask=there[:, None], other=0.0)
        middle = tl.dot(a, b, middle, input_precision="tf32")
        b = tl.load(at + C, mask=(there & (column < W - 1))[:, None], other=0.0)
        right = tl.dot(a, b, right, input_precision="tf32")
    dtype = partials.dtype.element_ty
    here = partials + (number * tl.num_programs(2) + client) * (O * 9 * C)
    here += o[:, None] * (9 * C) + (down + 1) * (3 * C) + c[None, :]
    tl.store(here, left.to(dtype))
    tl.store(here + C, middle.to(dtype))
    tl.store(here + 2 * C, right.to(dtype))


@triton.jit
def _add_up(partials, out, size, runs, BLOCK: tl.constexpr):
    """The sum over the runs: (runs, size) -> (size,)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(runs):
        total += tl.load(partials + place, mask=place < size, other=0.0)
        partials += size
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


# --------------------------------------------------------------------------------------------------------
# Launches. Images are channels_last, (clients * batch, channels, h, w); channels are multiples of 16.


def forward(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Fill y (clients * batch, O, h, w) with x convolved with weight (clients, O, C, 3, 3)."""
    w = weight.permute(0, 1, 3, 4, 2)
    w = w if w[0].is_contiguous() else w.contiguous()  # rows of a matrix of all clients' weights need no copy
    _product(x, w.flatten(2, 3), y, False)


def input_gradient(g: Tensor, weight: Tensor, dx: Tensor) -> None:
    """Fill dx (clients * batch, C, h, w) from g (clients * batch, O, h, w) and the weights."""
    if g.dtype == torch.float32:  # the tensor cores want float32 with the summed axis last
        w = weight.permute(0, 2, 3, 4, 1).contiguous()  # (clients, C, 3, 3, O)
    else:
        w = weight.permute(0, 1, 3, 4, 2).contiguous().permute(0, 4, 2, 3, 1)
    _product(g, w.flatten(2, 3), dx, True)


def _product(x: Tensor, w: Tensor, y: Tensor, flip: bool) -> None:
    """Convolve x with w (clients, O, 9, C), of any strides, into y; `flip` turns the taps round."""
    clients, o, _, c = w.shape
    height, width = x.shape[2:]
    rows = x.shape[0] // clients * height * width
    columns, depth = factor(o, 128), factor(c, 128 // x.itemsize)  # 128 bytes of a row at a time
    with torch.cuda.device_of(x):
        _convolve[triton.cdiv(rows, _PIXELS) * (o // columns), clients](
            x, w, y, rows, *w.stride(), height, width, c, o, flip, _PIXELS, columns, depth,
            num_warps=8 if columns == 128 else 4, num_stages=3,
        )  # fmt: skip


def weight_gradient(g: Tensor, x: Tensor, dw: Tensor) -> None:
    """Fill dw (clients, O, 3, 3, C) from g (clients * batch, O, h, w) and x (clients * batch, C, h, w)."""
    clients, o, _, _, c = dw.shape
    height, width = x.shape[2:]
    rows = x.shape[0] // clients * height * width
    bm, bn, bk = factor(o, 64), factor(c, 64), 128 // x.itemsize
    # float32 comes with the wrong axis last for the newest instructions, which are for four warps: two make
    # Triton take the ones before.
    warps, programs = (2, 396) if x.dtype == torch.float32 else (4, 264)
    parts = 3 * (o // bm) * (c // bn)
    run = triton.cdiv(triton.cdiv(rows, max(1, programs // (parts * clients))), bk) * bk
    runs = triton.cdiv(rows, run)
    partials = dw if runs == 1 else dw.new_empty((runs, *dw.shape), dtype=torch.float32)
    with torch.cuda.device_of(x):
        _correlate[parts, runs, clients](
            g, x, partials, rows, run, height, width, c, o, bm, bn, bk, num_warps=warps, num_stages=3
        )
    if runs > 1:
        add_up(partials, dw)


def add_up(partials: Tensor, out: Tensor) -> None:
    """Fill out with the sum of partials (runs, *out.shape), added up in float32."""
    with torch.cuda.device_of(out):
        _add_up[triton.cdiv(out.numel(), _ADDED),](
            partials, out, out.numel(), len(partials), BLOCK=_ADDED, num_warps=4
        )


def factor(channels: int, most: int) -> int:
    """The largest power of two that divides the channels, up to `most`.

    Example:
        >>> factor(192, 128), factor(48, 128), factor(512, 128)
        (64, 16, 128)
    """
    return min(channels & -channels, most)
