"""Linear layers over consecutive column blocks, as one kernel in a named precision.

Formula (:func:`.reference.block_linear`): ``y[:, block b] = x[:, block b] @ W_b (+ bias on the first block)``.
An SO(2) linear has three blocks, |m| = 0, 1, 2, in one launch; an ordinary linear has one. Gradients with respect to x
are the same kernel on the transposed weights, stored beside them, so both directions cost the same.

Precision is that of the operands (:mod:`.operand`). The kernel takes half-precision operands; IEEE float32 and float64
go to the vendor's library, which is the fastest there. Torch's TF32 switches do not act on any of these products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._launch import matmul_tile, runs_kernels
from .operand import SPLIT_OF_KIND, Operand, ieee_products, to_operand


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_unscale"])
def _block_linear_kernel(
    x_high,
    x_low,
    x_unscale,
    w_high,
    w_low,
    w_unscale,
    bias,
    out,
    num_rows,
    K0: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of one block: x [M, K_b] times W_b, whose transpose [N_b, K_b] is stored row by row."""
    T0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    T2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    # Column tiles run innermost, so that a tile of rows is read from memory once and then from the L2 cache.
    i_tile = tl.program_id(0) % (T0 + T1 + T2)
    i_m = tl.program_id(0) // (T0 + T1 + T2)
    in_1 = i_tile >= T0
    in_2 = i_tile >= T0 + T1
    depth = tl.where(in_2, K2, tl.where(in_1, K1, K0))
    width = tl.where(in_2, N2, tl.where(in_1, N1, N0))
    x_first = tl.where(in_2, K0 + K1, tl.where(in_1, K0, 0))
    o_first = tl.where(in_2, N0 + N1, tl.where(in_1, N0, 0))
    w_first = tl.where(in_2, K0 * N0 + K1 * N1, tl.where(in_1, K0 * N0, 0))
    if ALIGNED:
        depth = tl.multiple_of(depth, 16)
        x_first = tl.multiple_of(x_first, 16)
        w_first = tl.multiple_of(w_first, 16)
    i_n = i_tile - tl.where(in_2, T0 + T1, tl.where(in_1, T0, 0))
    rows = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = rows < num_rows
    m_n = columns < width
    o_k = tl.arange(0, BLOCK_K)
    x_offset = rows[:, None] * (K0 + K1 + K2) + x_first + o_k[None, :]
    w_offset = w_first + columns[None, :] * depth + o_k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN_K:
            x_mask = m_m[:, None]
            w_mask = m_n[None, :]
        else:
            x_mask = m_m[:, None] & (o_k[None, :] < depth - k)
            w_mask = m_n[None, :] & (o_k[:, None] < depth - k)
        xh = tl.load(x_high + x_offset + k, mask=x_mask, other=0.0)
        wh = tl.load(w_high + w_offset + k, mask=w_mask, other=0.0)
        sums = tl.dot(xh, wh, sums)
        if SPLIT == 2:
            xl = tl.load(x_low + x_offset + k, mask=x_mask, other=0.0)
            wl = tl.load(w_low + w_offset + k, mask=w_mask, other=0.0)
            sums = tl.dot(xl, wh, sums)
            sums = tl.dot(xh, wl, sums)
    sums *= tl.load(x_unscale + rows, mask=m_m, other=0.0)[:, None]
    sums *= tl.load(w_unscale + o_first + columns, mask=m_n, other=0.0)[None, :]
    if BIAS:
        biased = tl.where(in_1, 0, width)  # the first block alone
        sums += tl.load(bias + columns, mask=columns < biased, other=0.0)[None, :]
    o_offset = rows[:, None] * (N0 + N1 + N2) + o_first + columns[None, :]
    tl.store(out + o_offset, sums, mask=m_m[:, None] & m_n[None, :])


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a block linear, stored for products in both directions.

    Attributes:
        shapes: (K_b, N_b) of each block, one to three of them.
        matrices: the weights as they came, [K_b, N_b].
        bias: [N_0] or None.
        forward, backward: flat operands of all W_b^T and of all W_b; None where the library multiplies ``matrices``.
    """

    kind: str
    shapes: tuple[tuple[int, int], ...]
    matrices: tuple[Tensor, ...]
    bias: Tensor | None
    forward: Operand | None
    backward: Operand | None


def block_weights(matrices: list[Tensor], bias: Tensor | None, kind: str) -> BlockWeights:
    """Store weights [K_b, N_b] (and a bias of the first block) for products of the given kind."""
    dtype = torch.float64 if kind == "double" else torch.float32
    shapes = tuple((m.shape[0], m.shape[1]) for m in matrices)
    kept = tuple(m.to(dtype) for m in matrices)
    bias = None if bias is None else bias.to(dtype).contiguous()
    if kind in ("double", "single") or not runs_kernels(kept[0]):
        return BlockWeights(kind, shapes, kept, bias, None, None)
    forward = _join([to_operand(m.T, kind) for m in matrices])
    return BlockWeights(kind, shapes, kept, bias, forward, _join([to_operand(m, kind) for m in matrices]))


def _join(parts: list[Operand]) -> Operand:
    """Lay operands one after another in flat storage."""

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(p, name) for p in parts]
        return None if tensors[0] is None else torch.cat([t.flatten() for t in tensors])

    return Operand(parts[0].kind, joined("high"), joined("low"), joined("unscale"))


def block_matmul(x: Operand, weights: BlockWeights, transposed: bool = False, biased: bool = True) -> Tensor:
    """Multiply an operand [M, sum K_b] by the weights, or an output gradient [M, sum N_b] by their transposes.

    Returns:
        [M, sum N_b] (with the bias, if ``biased``), or [M, sum K_b] for ``transposed``; float64 for "double", else
        float32.
    """
    bias = weights.bias if biased and not transposed else None
    if weights.forward is None:
        matrices = [m.T for m in weights.matrices] if transposed else list(weights.matrices)
        with ieee_products():
            return reference.block_linear(x.dense(), matrices, bias)
    shapes = [(n, k) for k, n in weights.shapes] if transposed else list(weights.shapes)
    w = weights.backward if transposed else weights.forward
    rows, columns = x.high.shape[0], sum(n for _, n in shapes)
    out = torch.empty(rows, columns, dtype=torch.float32, device=x.high.device)
    if rows == 0:
        return out
    (k0, n0), (k1, n1), (k2, n2) = shapes + [(0, 0)] * (3 - len(shapes))
    tile = matmul_tile(rows, max(n for _, n in shapes), x.kind, out.device)
    tiles = sum(triton.cdiv(n, tile.n) for _, n in shapes)
    _block_linear_kernel[(triton.cdiv(rows, tile.m) * tiles,)](
        x.high,
        x.low,
        x.unscale,
        w.high,
        w.low,
        w.unscale,
        bias,
        out,
        rows,
        K0=k0,
        K1=k1,
        K2=k2,
        N0=n0,
        N1=n1,
        N2=n2,
        ALIGNED=all(k % 16 == 0 for k in (k0, k1, k2)),
        EVEN_K=all(k % tile.k == 0 for k in (k0, k1, k2)),
        SPLIT=SPLIT_OF_KIND[x.kind],
        BIAS=bias is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


class _BlockLinear(torch.autograd.Function):
    """A linear map or its transpose; the gradient of each is the other, so derivatives of any order are these two."""

    @staticmethod
    def forward(ctx, x, weights, transposed, biased):
        ctx.weights, ctx.transposed = weights, transposed
        return block_matmul(to_operand(x, weights.kind), weights, transposed, biased)

    @staticmethod
    def backward(ctx, grad):
        return _BlockLinear.apply(grad, ctx.weights, not ctx.transposed, False), None, None, None


def block_linear(x: Tensor, weights: BlockWeights) -> Tensor:
    """Multiply consecutive column blocks of x by frozen weights; differentiable in x to any order.

    Args:
        x: [..., sum of K_b], any floating-point type.
        weights: from :func:`block_weights`.

    Returns:
        [..., sum of N_b], float64 for weights of kind "double", else float32.

    Raises:
        ValueError, TypeError: the last dimension or the device does not fit.
    """
    depth = sum(k for k, _ in weights.shapes)
    check_shape("x", x, (*(None,) * max(x.dim() - 1, 0), depth))
    if x.device != weights.matrices[0].device:
        raise ValueError(f"x: expected device {weights.matrices[0].device}, got {x.device}")
    x = x.to(weights.matrices[0].dtype)
    out = _BlockLinear.apply(x.reshape(-1, depth), weights, False, True)
    return out.view(*x.shape[:-1], out.shape[1])
