"""A linear layer with weights of its own for each group of rows, differentiable in rows and weights to any order.

    y[m] = x[m] @ w[g] + b[g]          for the group g of row m
    dx[m] = dy[m] @ w[g]^T             the product of linear.py, which reads w in place
    dw[g] = sum over the rows m of g of  x[m]^T dy[m]

Three bilinear maps, each of whose derivatives is made of the others, so they are their own double backward. Sums over
rows are taken in order, or over chunks of rows in order and then over chunks: gradients repeat bitwise.

Precision is that of the operands (:mod:`.operand`). Sums over rows take operands with one scale for each column: of an
entry 2^13 times smaller than the largest of its column ("split"), or 2^26 times, not all bits are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import kernel
from ._device import wait_for_previous
from ._launch import cdiv, in_chunks, outer_tile, runs_kernels
from .groups import RowGroups
from .linear import BlockWeights, block_matmul, block_weights
from .operand import KINDS, SPLIT_OF_KIND, columns_in_halves, ieee_products, to_operand

# Rows summed by one program where there are few: long enough that the sum over chunks costs little.
_CHUNK = 4096


@kernel(do_not_specialize_on_alignment=["first", "last"])
def _outer_kernel(
    x_high,
    x_low,
    x_unscale,
    g_high,
    g_low,
    g_unscale,
    first,
    last,
    out,
    K,
    N,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[part] [K, N] = x^T g over rows first[part] : last[part], one tile of it."""
    wait_for_previous()
    k_tiles = tl.cdiv(K, BLOCK_K)
    n_tiles = tl.cdiv(N, BLOCK_N)
    i_tile = tl.program_id(0) % (k_tiles * n_tiles)
    part = (tl.program_id(0) // (k_tiles * n_tiles)).to(tl.int64)
    begin = tl.load(first + part)
    count = (tl.load(last + part) - begin).to(tl.int32)
    o_m = tl.arange(0, BLOCK_M)
    o_k = i_tile // n_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    o_n = i_tile % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m_k = o_k < K
    m_n = o_n < N
    x_row = begin * K
    g_row = begin * N
    x_tile = o_m[:, None] * K + o_k[None, :]
    g_tile = o_m[:, None] * N + o_n[None, :]
    sums = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for row in range(0, count, BLOCK_M):
        m_m = (o_m < count - row)[:, None]
        xh = tl.trans(tl.load(x_high + x_row + x_tile, mask=m_m & m_k[None, :], other=0.0))
        gh = tl.load(g_high + g_row + g_tile, mask=m_m & m_n[None, :], other=0.0)
        sums = tl.dot(xh, gh, sums)
        if SPLIT == 2:
            xl = tl.trans(tl.load(x_low + x_row + x_tile, mask=m_m & m_k[None, :], other=0.0))
            gl = tl.load(g_low + g_row + g_tile, mask=m_m & m_n[None, :], other=0.0)
            sums = tl.dot(xl, gh, sums)
            sums = tl.dot(xh, gl, sums)
        x_row += BLOCK_M * K
        g_row += BLOCK_M * N
    sums *= tl.load(x_unscale + o_k, mask=m_k, other=0.0)[:, None]
    sums *= tl.load(g_unscale + o_n, mask=m_n, other=0.0)[None, :]
    at = (part * K + o_k[:, None]) * N + o_n[None, :]
    tl.store(out + at, sums, mask=m_k[:, None] & m_n[None, :])


def _outer(x: Tensor, g: Tensor, groups: RowGroups, kind: str) -> Tensor:
    """x^T g of each group: [M, K], [M, N] -> [G, K, N]."""
    if kind in ("single", "double") or not runs_kernels(x):
        with ieee_products():
            return reference.grouped_outer(x, g, groups.starts)
    (num_rows, depth), width, num_groups = x.shape, g.shape[1], groups.num_groups
    if num_rows == 0:
        return x.new_zeros(num_groups, depth, width)
    tile = outer_tile(depth, width, kind, x.device)
    tiles = cdiv(depth, tile.m) * cdiv(width, tile.n)
    chunked = in_chunks(num_groups * tiles, x.device)
    first, last = groups.tiles(_CHUNK)[1:] if chunked else (groups.first[:-1], groups.first[1:])
    out = x.new_empty(len(first), depth, width)
    _outer_kernel[(len(first) * tiles,)](
        *columns_in_halves(x.contiguous(), kind),
        *columns_in_halves(g.contiguous(), kind),
        first,
        last,
        out,
        depth,
        width,
        SPLIT=SPLIT_OF_KIND[kind],
        BLOCK_M=tile.k,
        BLOCK_K=tile.m,
        BLOCK_N=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not chunked:
        return out
    lengths = groups.tile_counts(_CHUNK)
    return torch.segment_reduce(out.flatten(1), "sum", lengths=lengths, unsafe=True).view(-1, depth, width)


class _Outer(torch.autograd.Function):
    """x, g -> x^T g of each group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, groups: RowGroups, kind: str) -> Tensor:
        ctx.save_for_backward(x, g)
        ctx.constants = (groups, kind)
        return _outer(x, g, groups, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        groups, kind = ctx.constants
        need_x, need_g, *_ = ctx.needs_input_grad
        stored = block_weights([grad.detach()], None, kind)
        grad_x = _Product.apply(g, grad, groups, True, stored) if need_x else None
        grad_g = _Product.apply(x, grad, groups, False, stored) if need_g else None
        return grad_x, grad_g, None, None


class _Product(torch.autograd.Function):
    """x, w -> x w[g], or x w[g]^T where `transposed`; `stored` holds the same w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, groups: RowGroups, transposed: bool, stored: BlockWeights) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.constants = (groups, transposed, stored)
        return block_matmul(to_operand(x, stored.kind), stored, transposed, groups=groups).high

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        groups, transposed, stored = ctx.constants
        need_x, need_w, *_ = ctx.needs_input_grad
        grad_x = _Product.apply(grad, w, groups, not transposed, stored) if need_x else None
        pair = (grad, x) if transposed else (x, grad)
        grad_w = _Outer.apply(*pair, groups, stored.kind) if need_w else None
        return grad_x, grad_w, None, None, None


class _Spread(torch.autograd.Function):
    """A row of b [G, N] for each row of its group [M, N]."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups = groups
        return b.repeat_interleave(groups.counts, dim=0, output_size=groups.num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sums.apply(grad, ctx.groups), None


class _Sums(torch.autograd.Function):
    """Sums over the rows of each group: [M, N] -> [G, N]. (torch's own derivative of `repeat_interleave` is atomic.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups = groups
        return torch.segment_reduce(x.contiguous(), "sum", lengths=groups.counts, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, ctx.groups), None


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    starts: Sequence[int] | Tensor | RowGroups,
    bias: Tensor | None = None,
    kind: str = "split",
) -> Tensor:
    """Multiply each group of rows by weights of its own; differentiable in x, weights and bias to any order.

    Args:
        x: rows [M, K], any floating-point type.
        weights: [G, K, N].
        starts: group g is rows starts[g] : starts[g + 1]; from 0 to M [G + 1], on the host, or int64 on the device of
            x, where nothing waits for them and they are not checked. `RowGroups` keeps what is made of them from call
            to call.
        bias: [G, N] or None.
        kind: "split" (float32-grade), "half" (TF32-grade), "single" (IEEE float32) or "double". The last two go
            through the vendor's library, group by group, for which starts are needed on the host.

    Returns:
        [M, N], float64 for "double", else float32.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {list(KINDS)}, got {kind!r}")
    check_shape("x", x, (None, None))
    groups = starts if isinstance(starts, RowGroups) else RowGroups(starts, x.device, len(x))
    check_shape("weights", weights, (groups.num_groups, x.shape[1], None), x)
    if not weights.numel():
        raise ValueError(f"weights: expected groups, depth and width of at least 1, got shape {list(weights.shape)}")
    if groups.num_rows != len(x):
        raise ValueError(f"starts: expected the {len(x)} rows of x, got {groups.num_rows}")
    dtype = torch.float64 if kind == "double" else torch.float32
    x, weights = x.to(dtype), weights.to(dtype)
    out = _Product.apply(x, weights, groups, False, block_weights([weights.detach()], None, kind))
    if bias is None:
        return out
    check_shape("bias", bias, (groups.num_groups, weights.shape[2]), x)
    return out + _Spread.apply(bias.to(dtype), groups)
