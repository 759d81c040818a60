"""`linear` on a CUDA GPU, in Triton: products of clients' few samples with their many weights.

One kernel multiplies (m, k) by (k, n) for every client, whatever the strides. The weights are read once, or
written once, as float32; a product in bfloat16 rounds them on the way.
"""

# ruff: noqa: N803 - what a kernel is compiled for is in capitals, as everybody writes it in Triton

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

from .conv_kernels import add_up, factor

_PROGRAMS = 264  # that a GPU has enough with: two for each multiprocessor of an H200


@triton.jit
def _multiply(
    a, b, out, m, n, k, run, a_client, a_m, a_k, b_client, b_k, b_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A block of a client's product, of a run of the sum; factors are rounded to the type of a.

    a: (clients, m, k) and b: (clients, k, n), by their strides; out: (runs, clients, m, n).
    """
    blocks = tl.cdiv(n, BN)
    number, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    a_here = a + client * a_client + row[:, None] * a_m
    b_here = b + client * b_client + column[None, :] * b_n
    total = tl.zeros((BM, BN), tl.float32)
    end = tl.minimum(k, (number + 1) * run)
    for first in range(number * run, end, BK):
        at = first + tl.arange(0, BK)
        left = tl.load(a_here + at[None, :] * a_k, mask=(row < m)[:, None] & (at < end)[None, :], other=0.0)
        right = tl.load(
            b_here + at[:, None] * b_k, mask=(at < end)[:, None] & (column < n)[None, :], other=0.0
        )
        total = tl.dot(left, right.to(left.dtype), total, input_precision="tf32")
    here = out + (number * tl.num_programs(2) + client) * m * n + (row[:, None] * n + column[None, :])
    tl.store(here, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


# --------------------------------------------------------------------------------------------------------
# Launches. weight is (clients, O, I), with I last in memory; the rest is contiguous.


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """(clients, batch, I) -> (clients, batch, O); the long sum over I in pieces."""
    (clients, batch, inside), outside = x.shape, weight.shape[1]
    columns, depth = factor(outside, 64), 128 // x.itemsize
    pieces = max(1, _PROGRAMS // (clients * (outside // columns)))
    run = triton.cdiv(triton.cdiv(inside, pieces), depth) * depth
    pieces = triton.cdiv(inside, run)
    y = x.new_empty(clients, batch, outside)
    partials = y if pieces == 1 else x.new_empty(pieces, *y.shape, dtype=torch.float32)
    _launch(x, weight.mT, partials, run, columns, depth, warps=4)
    if pieces > 1:
        add_up(partials, y)
    return y


def input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    """(clients, batch, O) -> (clients, batch, I)."""
    dx = g.new_empty(*g.shape[:2], weight.shape[2])
    _launch(g, weight, dx, g.shape[2], 64, factor(g.shape[2], 64), _warps(g))
    return dx


def weight_gradient(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """(clients, batch, O) and (clients, batch, I) -> (clients, O, I)."""
    dw = torch.empty(len(g), g.shape[2], x.shape[2], dtype=dtype, device=g.device)
    _launch(g.mT, x, dw, g.shape[1], 64, 32, _warps(g))
    return dw


def _warps(x: Tensor) -> int:
    return 2 if x.dtype == torch.float32 else 4  # see conv_kernels: two take the older instructions


def _launch(a: Tensor, b: Tensor, out: Tensor, run: int, columns: int, depth: int, warps: int) -> None:
    clients, m, k = a.shape
    n, rows = b.shape[2], min(64, max(16, triton.next_power_of_2(m)))
    grid = triton.cdiv(m, rows) * triton.cdiv(n, columns), triton.cdiv(k, run), clients
    with torch.cuda.device_of(a):
        _multiply[grid](
            a,
            b,
            out,
            m,
            n,
            k,
            run,
            *a.stride(),
            *b.stride(),
            rows,
            columns,
            depth,
            num_warps=warps,
            num_stages=3,
        )
