"""A linear layer with weights of its own for each group of rows, differentiable in rows and weights to any order.

    y[m] = x[m] @ w[g] + b[g]          for the group g of row m
    dx[m] = dy[m] @ w[g]^T             the product of linear.py, which reads w in place
    dw[g] = sum over the rows m of g of  x[m]^T dy[m]

Three bilinear maps, each of whose derivatives is made of the others, so they are their own double backward. Sums over
the rows of a group are taken in order by one program: gradients repeat bitwise, and a group's do not depend on others.

Precision is that of the operands (:mod:`.operand`); sums over rows take one TF32 product ("half") or three ("split"),
since a scale for each row, or range of float16 without one, does not go with a sum over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import kernel
from ._launch import outer_tile, runs_kernels
from .groups import RowGroups
from .linear import BlockWeights, block_matmul, block_weights
from .operand import KINDS, ieee_products, to_operand

# Products of a sum over rows by operand kind: TF32 keeps the bits of a half.
_PRODUCTS = {"split": "tf32x3", "half": "tf32"}


@kernel(do_not_specialize_on_alignment=["first"])
def _outer_kernel(
    x,
    g,
    first,
    out,
    K: tl.constexpr,
    N: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[group] [K, N] = x^T g over the group's rows, one tile of it."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) % (K_TILES * N_TILES)
    group = (tl.program_id(0) // (K_TILES * N_TILES)).to(tl.int64)
    o_k = i_tile // N_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    o_n = i_tile % N_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    m_k = o_k < K
    m_n = o_n < N
    last = tl.load(first + group + 1)
    sums = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for start in range(tl.load(first + group), last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        m_m = rows < last
        b_x = tl.load(x + rows[None, :] * K + o_k[:, None], mask=m_m[None, :] & m_k[:, None], other=0.0)
        b_g = tl.load(g + rows[:, None] * N + o_n[None, :], mask=m_m[:, None] & m_n[None, :], other=0.0)
        sums = tl.dot(b_x, b_g, sums, input_precision=PRODUCTS)
    at = (group * K + o_k[:, None]) * N + o_n[None, :]
    tl.store(out + at, sums, mask=m_k[:, None] & m_n[None, :])


def _outer(x: Tensor, g: Tensor, groups: RowGroups, kind: str) -> Tensor:
    """x^T g of each group: [M, K], [M, N] -> [G, K, N]."""
    if kind not in _PRODUCTS or not runs_kernels(x):
        with ieee_products():
            return reference.grouped_outer(x, g, groups.starts)
    depth, width = x.shape[1], g.shape[1]
    out = x.new_empty(groups.num_groups, depth, width)
    if out.numel():
        tile = outer_tile(groups.num_groups, depth, width, x.device)
        programs = groups.num_groups * triton.cdiv(depth, tile.m) * triton.cdiv(width, tile.n)
        _outer_kernel[(programs,)](
            x.contiguous(),
            g.contiguous(),
            groups.first,
            out,
            K=depth,
            N=width,
            PRODUCTS=_PRODUCTS[kind],
            BLOCK_M=tile.k,
            BLOCK_K=tile.m,
            BLOCK_N=tile.n,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


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
    if groups.num_rows != len(x):
        raise ValueError(f"starts: expected the {len(x)} rows of x, got {groups.num_rows}")
    dtype = torch.float64 if kind == "double" else torch.float32
    x, weights = x.to(dtype), weights.to(dtype)
    out = _Product.apply(x, weights, groups, False, block_weights([weights.detach()], None, kind))
    if bias is None:
        return out
    check_shape("bias", bias, (groups.num_groups, weights.shape[2]), x)
    return out + _Spread.apply(bias.to(dtype), groups)
