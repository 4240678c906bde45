"""Linear layers over consecutive column blocks, as one launch in a named precision.

Formula (:func:`.reference.block_linear`): ``y[:, block b] = x[:, block b] @ W_b (+ bias on the first block)``.
An SO(2) linear has three blocks, |m| = 0, 1, 2, in one launch; an ordinary linear has one. Gradients with respect to x
are the same kernel on the transposed weights, stored beside them, so both directions cost the same.

Weights may come in groups: each of G systems, say, has merged weights of its own. Rows then lie in consecutive groups,
a group begins a tile of its own, and one launch works through all of them; a group's results do not depend on others.
Such weights are stored once: the products with their transposes read them in place.

Precision is that of the operands (:mod:`.operand`). The kernel takes half-precision operands; products of many rows
have one of their own on Hopper GPUs (:mod:`.hopper_linear`). IEEE float32 and float64 go to the vendor's library, which
is the fastest there, and so do products of many rows in halves, results too, that add no bias and share their weights.
Torch's switches for products do not act on any of these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import choices, kernel
from ._device import LEAST_UNSCALE, wait_for_previous
from ._launch import MatmulTile, cdiv, hopper_tile, library_multiplies, matmul_tile, product_sizes, runs_kernels
from .groups import RowGroups
from .operand import (
    HALF_TOP,
    SPLIT_OF_KIND,
    Operand,
    empty_operand,
    float32_sums,
    ieee_products,
    plain_operand,
    rows_in_halves,
    to_operand,
)

WEIGHT_TOP = 2.0**15
"""Bound on sums of absolute weights stored as halves: half of the largest half, so that no entry overflows, while
entries 2^29 times smaller are still normal halves."""


@kernel(
    do_not_specialize=["num_rows", "num_biased"],
    do_not_specialize_on_alignment=["x_unscale", "bias", "out_unscale"],
)
def _block_linear_kernel(
    x_high,
    x_low,
    x_unscale,
    w_high,
    w_low,
    w_unscale,
    w_bound,
    bias,
    out,
    out_unscale,
    num_rows,
    tile_group,
    tile_first,
    tile_last,
    num_biased,
    K0,
    K1,
    K2,
    N0,
    N1,
    N2,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HALF: tl.constexpr,
    GROUPED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of one block: x [M, K_b] times W_b, whose transpose [N_b, K_b] is stored row by row.

    The bias is that of the first block's first `num_biased` columns. IN_PLACE: W_b [K_b, N_b] itself is stored row by
    row. Sizes are no constants: layers of all shapes share what is compiled.
    """
    wait_for_previous()
    T0 = tl.cdiv(N0, BLOCK_N)
    T1 = tl.cdiv(N1, BLOCK_N)
    T2 = tl.cdiv(N2, BLOCK_N)
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
        if IN_PLACE:
            width = tl.multiple_of(width, 16)
        x_first = tl.multiple_of(x_first, 16)
        w_first = tl.multiple_of(w_first, 16)
    i_n = i_tile - tl.where(in_2, T0 + T1, tl.where(in_1, T0, 0))
    if GROUPED:
        first = tl.load(tile_first + i_m)
        last = tl.load(tile_last + i_m)
        group = tl.load(tile_group + i_m)
        w_high += group * (K0 * N0 + K1 * N1 + K2 * N2)
        if SPLIT == 2:
            w_low += group * (K0 * N0 + K1 * N1 + K2 * N2)
        w_unscale += group * 3 + in_1.to(tl.int32) + in_2.to(tl.int32)
        if HALF:
            w_bound += group * 2
    else:
        first = i_m.to(tl.int64) * BLOCK_M
        last = first + tl.minimum(num_rows - first, BLOCK_M)
    # From here on offsets within the tile fit 32 bits.
    x_high += first * (K0 + K1 + K2) + x_first
    if SPLIT == 2:
        x_low += first * (K0 + K1 + K2) + x_first
    x_unscale += first
    rows = tl.arange(0, BLOCK_M)
    m_m = rows < last - first
    columns = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = columns < width
    o_k = tl.arange(0, BLOCK_K)
    x_offset = rows[:, None] * (K0 + K1 + K2) + o_k[None, :]
    w_step = 1
    w_offset = w_first + columns[None, :] * depth + o_k[:, None]
    if IN_PLACE:
        w_step = width
        w_offset = w_first + columns[None, :] + o_k[:, None] * width
    steps = depth
    if GROUPED:
        steps = tl.where(first < last, depth, 0)  # an empty tile ends the schedule
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, steps, BLOCK_K):
        if EVEN_K:
            x_mask = m_m[:, None]
            w_mask = m_n[None, :]
        else:
            x_mask = m_m[:, None] & (o_k[None, :] < depth - k)
            w_mask = m_n[None, :] & (o_k[:, None] < depth - k)
        xh = tl.load(x_high + x_offset + k, mask=x_mask, other=0.0)
        wh = tl.load(w_high + w_offset + k * w_step, mask=w_mask, other=0.0)
        sums = tl.dot(xh, wh, sums)
        if SPLIT == 2:
            xl = tl.load(x_low + x_offset + k, mask=x_mask, other=0.0)
            wl = tl.load(w_low + w_offset + k * w_step, mask=w_mask, other=0.0)
            sums = tl.dot(xl, wh, sums)
            sums = tl.dot(xh, wl, sums)
    unscale = tl.load(x_unscale + rows, mask=m_m, other=1.0)
    sums *= unscale[:, None]
    if GROUPED:
        sums *= tl.load(w_unscale)
    else:
        sums *= tl.load(w_unscale + o_first + columns, mask=m_n, other=0.0)[None, :]
    biased = tl.where(in_1, 0, num_biased)
    sums += tl.load(bias + columns, mask=columns < biased, other=0.0)[None, :]
    out += first * (N0 + N1 + N2) + o_first
    o_offset = rows[:, None] * (N0 + N1 + N2) + columns[None, :]
    if HALF:
        # No maximum over the row is needed: the scale follows from a bound on what the weights can make of it.
        least = tl.where(num_biased > 0, tl.load(w_bound + 1), LEAST_UNSCALE)
        unscale = tl.maximum(unscale * tl.load(w_bound), least)
        sums *= (1.0 / unscale)[:, None]
        if i_tile == 0:
            tl.store(out_unscale + first + rows, unscale, mask=m_m)
    tl.store(out + o_offset, sums.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a block linear, stored for products in both directions.

    Attributes:
        shapes: (K_b, N_b) of each block, one to three of them.
        matrices: the weights as they came, [K_b, N_b], or [G, K_b, N_b] for groups of rows.
        bias: [N_0] or None, the same for all groups.
        num_groups: G; None for weights that all rows share.
        forward, backward: operands of all W_b^T and of all W_b, with a scale for each of their rows; None where the
            library multiplies ``matrices``. Of weights in groups ``forward`` alone, a row for each group and a scale
            for each of its blocks [G, 3].
        forward_bound, backward_bound: for kind "half", powers of two [2] (times groups): how much larger than a row's
            largest entry a product can be, and the bias, where it is added, in units of HALF_TOP.
    """

    kind: str
    shapes: tuple[tuple[int, int], ...]
    matrices: tuple[Tensor, ...]
    bias: Tensor | None
    num_groups: int | None = None
    forward: Operand | None = None
    backward: Operand | None = None
    forward_bound: Tensor | None = None
    backward_bound: Tensor | None = None


def block_weights(matrices: list[Tensor], bias: Tensor | None, kind: str) -> BlockWeights:
    """Store weights [K_b, N_b], or [G, K_b, N_b], and a bias of the first block for products of the given kind."""
    dtype = torch.float64 if kind == "double" else torch.float32
    shapes = tuple((m.shape[-2], m.shape[-1]) for m in matrices)
    kept = tuple(m.to(dtype) for m in matrices)
    bias = None if bias is None else bias.to(dtype).contiguous()
    num_groups = kept[0].shape[0] if kept[0].dim() == 3 else None
    if kind in ("double", "single") or not runs_kernels(kept[0]):
        return BlockWeights(kind, shapes, kept, bias, num_groups)
    grouped = [m if m.dim() == 3 else m[None] for m in kept]
    forward, backward = [m.mT for m in grouped], grouped
    bounds = [_bound(rows, b) for rows, b in ((forward, bias), (backward, None))] if kind == "half" else [None, None]
    if num_groups is not None:
        return BlockWeights(kind, shapes, kept, bias, num_groups, _in_groups(forward, kind), None, *bounds)
    stored = [
        _join([rows_in_halves(m[0], kind) for m in rows]) if bound is None else _in_bounded_halves(rows, bound)
        for rows, bound in zip((forward, backward), bounds, strict=True)
    ]
    return BlockWeights(kind, shapes, kept, bias, None, *stored, *bounds)


def _bound(rows: list[Tensor], bias: Tensor | None) -> Tensor:
    """Powers of two at or above the largest sum of absolute weights of an output, and the bias over HALF_TOP.

    `rows` [G, N_b, K_b] hold the weights of one output each; the result is [G, 2].
    """
    growth = torch.stack([m.abs().sum(dim=2).amax(dim=1) for m in rows]).amax(dim=0)
    shift = torch.zeros_like(growth)
    if bias is not None and bias.numel():
        shift += bias.abs().amax() / HALF_TOP
    bounds = torch.stack([growth, shift], dim=1).clamp(min=LEAST_UNSCALE.value / 2)
    return torch.ldexp(torch.ones_like(bounds), torch.frexp(bounds).exponent)


def _in_bounded_halves(rows: list[Tensor], bound: Tensor) -> Operand:
    """Rows [1, N_b, K_b] of all blocks one after another as halves, all with the scale that `bound` [1, 2] gives.

    A sum of their sizes along any row is WEIGHT_TOP at most, so the library can scale products by a constant.
    """
    unscale = bound[0, :1] / WEIGHT_TOP
    high = torch.cat([m.flatten() for m in rows]) / unscale
    return Operand("half", high.half()[None], None, unscale.expand(1, sum(m.shape[1] for m in rows)).contiguous())


def _join(parts: list[Operand]) -> Operand:
    """Lay the operands of blocks one after another."""

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(p, name) for p in parts]
        return None if tensors[0] is None else torch.cat([t.flatten() for t in tensors])[None]

    return Operand(parts[0].kind, joined("high"), joined("low"), joined("unscale"))


def _in_groups(blocks: list[Tensor], kind: str) -> Operand:
    """Blocks [G, N_b, K_b] one after another for each group, each with one scale in its group.

    A scale for all of a block, and not for a row of it, serves products in both directions. It costs nothing: halves
    keep all their bits down to 2^-13 of the largest entry (two halves) or 2^-26.
    """
    parts = [rows_in_halves(block.flatten(1), kind) for block in blocks]
    unscale = torch.nn.functional.pad(torch.cat([p.unscale for p in parts], dim=1), (0, 3 - len(parts)))
    low = torch.cat([p.low for p in parts], dim=1) if kind == "split" else None
    return Operand(kind, torch.cat([p.high for p in parts], dim=1), low, unscale)


def _library_matmul(x: Operand, weights: BlockWeights, transposed: bool, bias: Tensor | None, groups) -> Tensor:
    """The products through the vendor's library, group by group."""
    matrices = [m.mT for m in weights.matrices] if transposed else list(weights.matrices)
    dense = x.dense()
    with ieee_products():
        if groups is None:
            return reference.block_linear(dense, matrices, bias)
        parts = [
            reference.block_linear(dense[first:end], [m[g] for m in matrices], bias)
            for g, (first, end) in enumerate(itertools.pairwise(groups.starts))
        ]
        return torch.cat(parts)


def _matmul(
    x: Operand,
    w: Operand,
    shapes: Sequence[tuple[int, int]],
    out: Operand,
    tile: MatmulTile,
    bias: Tensor | None,
    bound: Tensor | None,
    row_tiles: Tensor | None,
    in_place: bool,
) -> None:
    """Launch the kernel: multiply x [M, sum K_b], and fill `out` [M, sum N_b].

    Args:
        w: the operand of all W_b^T or, with `in_place`, of all W_b, of each group a row.
        shapes: (K_b, N_b) of each block.
        bias, bound: as for the kernel.
        row_tiles: group, first and last row + 1 of the tiles of rows; None for weights that all rows share.
    """
    (k0, n0), (k1, n1), (k2, n2) = [*shapes, (0, 0), (0, 0)][:3]
    num_rows = x.high.shape[0]
    num_row_tiles = cdiv(num_rows, tile.m) if row_tiles is None else row_tiles.shape[1]
    _block_linear_kernel[(num_row_tiles * sum(cdiv(n, tile.n) for _, n in shapes),)](
        x.high,
        x.low,
        x.unscale,
        w.high,
        w.low,
        w.unscale,
        bound,
        w.unscale if bias is None else bias,
        out.high,
        out.unscale,
        num_rows,
        *((None, None, None) if row_tiles is None else row_tiles),
        0 if bias is None else n0,
        *(k0, k1, k2),
        *(n0, n1, n2),
        ALIGNED=all(size % 16 == 0 for size in (k0, k1, k2, *((n0, n1, n2) if in_place else ()))),
        EVEN_K=all(k % tile.k == 0 for k in (k0, k1, k2)),
        SPLIT=SPLIT_OF_KIND[x.kind],
        HALF=out.kind == "half",
        GROUPED=row_tiles is not None,
        IN_PLACE=in_place,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _library_halves(x: Operand, w: Operand, shapes: Sequence[tuple[int, int]], out: Operand, bound: Tensor) -> None:
    """Multiply halves x [M, sum K_b] through the vendor's library, and fill `out` [M, sum N_b], halves too."""
    depths, widths = zip(*shapes, strict=True)
    matrices = w.high[0].split([k * n for k, n in shapes])
    with ieee_products(), float32_sums():
        for x_b, flat, out_b in zip(x.high.split(depths, 1), matrices, out.high.split(widths, 1), strict=True):
            w_b = flat.view(out_b.shape[1], x_b.shape[1]).mT
            torch.addmm(out_b, x_b, w_b, beta=0, alpha=1 / WEIGHT_TOP, out=out_b)
    torch.mul(x.unscale, bound[0, 0], out=out.unscale)


class _Way(NamedTuple):
    """A way to multiply: on Hopper's own units or not, in these tiles; without any, by the vendor's library."""

    on_hopper: bool
    tile: MatmulTile | None


def _way(
    kind: str,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    by_library: bool,
    grouped: bool,
    rows: int,
    rows_a_group: int | None,
) -> _Way:
    """How to multiply so many rows by blocks of these shapes; `by_library` allows that way."""
    if by_library and library_multiplies(rows, shapes, device):
        return _Way(False, None)
    tile = hopper_tile(rows, shapes, kind, device, rows_a_group if grouped else None)
    if tile is not None:
        return _Way(True, tile)
    depth, width = (max(sizes) for sizes in zip(*shapes, strict=True))
    return _Way(False, matmul_tile(rows, depth, width, kind, device, rows_a_group))


def block_matmul(
    x: Operand,
    weights: BlockWeights,
    transposed: bool = False,
    biased: bool = True,
    half: bool = False,
    groups: RowGroups | None = None,
) -> Operand:
    """Multiply an operand [M, sum K_b] by the weights, or an output gradient [M, sum N_b] by their transposes.

    Args:
        half: store the result as halves; for weights of kind "half".
        groups: the groups that the rows lie in. With weights that all rows share they only see to it that the result of
            a row does not depend on other rows.

    Returns:
        [M, sum N_b] (with the bias, if ``biased``), or [M, sum K_b] for ``transposed``; kind "double" for "double",
        else "single", or "half" where ``half`` asks for it.
    """
    assert x.bias is None  # products add none to what they read
    bias = weights.bias if biased and not transposed else None
    grouped = weights.num_groups is not None
    if grouped and groups is None:
        raise ValueError(f"groups: expected {weights.num_groups} groups of rows, got none")
    in_place = grouped and transposed
    if weights.forward is None:
        out = plain_operand(_library_matmul(x, weights, transposed, bias, groups if grouped else None))
        return to_operand(out.high, "half") if half else out
    shapes = [(n, k) for k, n in weights.shapes] if transposed else list(weights.shapes)
    w = weights.backward if transposed and not grouped else weights.forward
    bound = weights.backward_bound if transposed else weights.forward_bound
    rows, columns = x.high.shape[0], sum(n for _, n in shapes)
    out = empty_operand(rows, columns, "half" if half else "single", x.high.device)
    if rows == 0:
        return out

    by_library = half and bias is None and groups is None
    way_for = functools.partial(_way, x.kind, shapes, x.high.device, by_library, grouped)
    rows_a_group = None if groups is None else rows // max(1, groups.num_groups)
    others = itertools.starmap(way_for, product_sizes(groups is not None))
    for on_hopper, tile in choices(way_for(rows, rows_a_group), others):
        if tile is None:
            assert bound is not None  # as of all weights of kind "half"
            _library_halves(x, w, shapes, out, bound)
            continue
        if on_hopper:
            from .hopper_linear import hopper_matmul as multiply  # Gluon is young: nothing else should depend on it
        else:
            multiply = _matmul
        row_tiles = groups.tiles(tile.m) if grouped else None
        multiply(x, w, shapes, out, tile, bias, bound, row_tiles, in_place)
    return out


class _BlockLinear(torch.autograd.Function):
    """A linear map or its transpose; the gradient of each is the other, so derivatives of any order are these two."""

    @staticmethod
    def forward(ctx, x, weights, transposed, biased, groups):
        ctx.weights, ctx.transposed, ctx.groups = weights, transposed, groups
        return block_matmul(to_operand(x, weights.kind), weights, transposed, biased, groups=groups).high

    @staticmethod
    def backward(ctx, grad):
        return _BlockLinear.apply(grad, ctx.weights, not ctx.transposed, False, ctx.groups), None, None, None, None


def block_linear(x: Tensor, weights: BlockWeights, groups: RowGroups | None = None) -> Tensor:
    """Multiply consecutive column blocks of x by frozen weights; differentiable in x to any order.

    Args:
        x: [..., sum of K_b], any floating-point type.
        weights: from :func:`block_weights`.
        groups: the groups of rows that weights [G, K_b, N_b] belong to; x is then [M, sum of K_b].

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
    if weights.num_groups is not None and (groups is None or groups.num_groups != weights.num_groups):
        found = "none" if groups is None else f"{groups.num_groups}"
        raise ValueError(f"groups: expected {weights.num_groups} groups of rows, got {found}")
    if groups is not None and groups.num_rows != x.numel() // max(depth, 1):
        raise ValueError(f"groups: expected the {x.numel() // max(depth, 1)} rows of x, got {groups.num_rows}")
    out = _BlockLinear.apply(x.reshape(-1, depth), weights, False, True, groups)
    return out.view(*x.shape[:-1], out.shape[1])
