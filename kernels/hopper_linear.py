"""Block products on Hopper GPUs: the work of :mod:`.linear`'s kernel, by hand where the compiler does not get there.

One program a multiprocessor walks over the tiles. One warp copies tiles of both operands into a ring in shared memory,
through the tensor memory accelerator (TMA); two groups of four warps multiply them (wgmma), scale the sums and hand
them to the TMA again. So copies, products and stores of neighbouring tiles overlap.

A number is the same sum in the same order as from :mod:`.linear`'s kernel with tiles of the same depth, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._compile import kernel
from ._device import LEAST_UNSCALE
from ._launch import MatmulTile, cdiv, processors
from .operand import SPLIT_OF_KIND, Operand

# Newer releases of Triton have other names for these two.
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _tile(i_tile, tile_group, tile_first, tile_last, num_rows, K0, K1, K2, N0, N1, N2, GROUPED: gl.constexpr, BM, BN):
    """Group, rows, block and columns of a tile; column tiles run innermost, so that rows stay in the L2 cache."""
    T0 = gl.cdiv(N0, BN)
    T1 = gl.cdiv(N1, BN)
    columns = T0 + T1 + gl.cdiv(N2, BN)
    i_m = i_tile // columns
    i_n = i_tile % columns
    block = (i_n >= T0).to(gl.int32) + (i_n >= T0 + T1).to(gl.int32)
    i_n -= gl.where(block == 2, T0 + T1, gl.where(block == 1, T0, 0))
    depth = gl.where(block == 2, K2, gl.where(block == 1, K1, K0))
    x_first = gl.where(block == 2, K0 + K1, gl.where(block == 1, K0, 0))
    if GROUPED:
        group = gl.load(tile_group + i_m).to(gl.int32)
        first = gl.load(tile_first + i_m).to(gl.int32)
        last = gl.load(tile_last + i_m).to(gl.int32)
        depth = gl.where(first < last, depth, 0)  # an empty tile ends the schedule
    else:
        group = 0
        first = i_m * BM
        last = gl.minimum(first + BM, num_rows)
    return group, first, last, block, i_n * BN, depth, x_first


@gluon.jit
def _copy_weights(w0, w1, w2, block, at, bar, to):
    if block == 0:
        _copy_in(w0, at, bar, to)
    elif block == 1:
        _copy_in(w1, at, bar, to)
    else:
        _copy_in(w2, at, bar, to)


@gluon.jit
def _load_tiles(
    work,
    copied,
    SPLIT: gl.constexpr,
    GROUPED: gl.constexpr,
    IN_PLACE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that copies: operands of one step after another into the ring, as its places become free."""
    rings, filled, emptied, num_tiles, schedule, sizes = work
    x_high, x_low, h0, h1, h2, l0, l1, l2 = copied
    xh, xl, wh, wl = rings
    step = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, first, _, block, column, depth, x_first = _tile(i_tile, *schedule, *sizes, GROUPED, BM, BN)
        for k in range(0, depth, BK):
            place = step % STAGES
            mbarrier.wait(emptied.index(place), ((step // STAGES) & 1) ^ 1)
            bar = filled.index(place)
            mbarrier.expect(bar, SPLIT * 2 * BK * (BM + BN))
            at = [group, k, column] if IN_PLACE else [group, column, k]
            # Beyond the block's depth x is the next block's, and weights are filled up with zeros; beyond the last row
            # no result is stored.
            _copy_in(x_high, [first, x_first + k], bar, xh.index(place))
            _copy_weights(h0, h1, h2, block, at, bar, wh.index(place))
            if SPLIT == 2:
                _copy_in(x_low, [first, x_first + k], bar, xl.index(place))
                _copy_weights(l0, l1, l2, block, at, bar, wl.index(place))
            step += 1


@gluon.jit
def _operand(ring, place, IN_PLACE: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """Weights [BK, BN] in one place of the ring."""
    w = ring.index(place)
    return w.reshape([BK, BN]) if IN_PLACE else w.reshape([BN, BK]).permute((1, 0))


@gluon.jit
def _halves(x):
    """The left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _copy_result(o0, o1, o2, block, at, strip):
    if block == 0:
        _copy_out(o0, at, strip)
    elif block == 1:
        _copy_out(o1, at, strip)
    else:
        _copy_out(o2, at, strip)


@gluon.jit
def _multiply_tiles(
    work,
    scales,
    result,
    SPLIT: gl.constexpr,
    HALF: gl.constexpr,
    GROUPED: gl.constexpr,
    IN_PLACE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The warps that multiply, and store."""
    rings, filled, emptied, num_tiles, schedule, sizes = work
    x_unscale, w_unscale, w_bound, bias, num_biased = scales
    o0, o1, o2, out, out_unscale, strips = result
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    STRIP: gl.constexpr = strips.shape[2]
    xh, xl, wh, wl = rings
    _, _, _, _, N0, N1, N2 = sizes
    step = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, first, last, block, column, depth, _ = _tile(i_tile, *schedule, *sizes, GROUPED, BM, BN)
        sums = warpgroup_mma_init(gl.zeros([BM, BN], gl.float32, layout))
        for k in range(0, depth, BK):
            place = step % STAGES
            mbarrier.wait(filled.index(place), (step // STAGES) & 1)
            w = _operand(wh, place, IN_PLACE, BN, BK)
            sums = warpgroup_mma(xh.index(place), w, sums, is_async=True)
            if SPLIT == 2:
                sums = warpgroup_mma(xl.index(place), w, sums, is_async=True)
                w = _operand(wl, place, IN_PLACE, BN, BK)
                sums = warpgroup_mma(xh.index(place), w, sums, is_async=True)
            # Products of this step go on; those of the one before are done, and its place is free. One thread says so
            # for all, after a barrier that Triton puts before an arrival (held by a test).
            sums = warpgroup_mma_init(warpgroup_mma_wait(2 * SPLIT - 1, deps=[sums]))
            mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=depth > 0)

        rows = first + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        width = gl.where(block == 2, N2, gl.where(block == 1, N1, N0))
        o_first = gl.where(block == 2, N0 + N1, gl.where(block == 1, N0, 0))
        m_m = rows < last
        m_n = columns < width
        unscale = gl.load(x_unscale + rows, mask=m_m, other=1.0)
        sums = sums * gl.expand_dims(unscale, 1)
        if GROUPED:
            sums = sums * gl.load(w_unscale + group * 3 + block)
        else:
            sums = sums * gl.expand_dims(gl.load(w_unscale + o_first + columns, mask=m_n, other=0.0), 0)
        biased = gl.where(block == 0, num_biased, 0)
        sums = sums + gl.expand_dims(gl.load(bias + columns, mask=columns < biased, other=0.0), 0)
        if HALF:
            bound = w_bound + group * 2
            least = gl.where(num_biased > 0, gl.load(bound + 1), LEAST_UNSCALE)
            unscale = gl.maximum(unscale * gl.load(bound), least)
            sums = sums * gl.expand_dims(1.0 / unscale, 1)
            gl.store(out_unscale + rows, unscale, mask=m_m & (o_first + column == 0))
        stored = sums.to(strips.dtype)
        if last - first == BM:
            parts = _halves(stored)
            if BN // STRIP == 4:
                parts = _halves(parts[0]) + _halves(parts[1])
            for i in gl.static_range(BN // STRIP):
                tma.store_wait(1)  # the strip before the last one has left
                strip = strips.index(i % 2)
                strip.store(parts[i])
                fence_async_shared()
                _copy_result(o0, o1, o2, block, [first, column + i * STRIP], strip)
        else:  # rows that follow are another group's, or there are none
            row_size = N0 + N1 + N2
            to = out + (first.to(gl.int64) * row_size + o_first)
            to += gl.expand_dims(rows - first, 1) * row_size + gl.expand_dims(columns, 0)
            gl.store(to, stored, mask=gl.expand_dims(m_m, 1) & gl.expand_dims(m_n, 0))
    tma.store_wait(0)


@kernel(
    jit=gluon.jit,
    do_not_specialize=["num_rows", "num_row_tiles", "num_biased"],
    do_not_specialize_on_alignment=["x_unscale", "bias", "out_unscale"],
)
def _hopper_linear_kernel(
    x_high,
    x_low,
    x_unscale,
    h0,
    h1,
    h2,
    l0,
    l1,
    l2,
    w_unscale,
    w_bound,
    bias,
    o0,
    o1,
    o2,
    out,
    out_unscale,
    num_rows,
    num_row_tiles,
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
    SPLIT: gl.constexpr,
    HALF: gl.constexpr,
    GROUPED: gl.constexpr,
    IN_PLACE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """x [M, K_b] times W_b for all blocks b, in tiles, `num_warps` warps for the products and one for the copies.

    h, l, o: the halves of the weights and the output of each block, as descriptors; `out` is all of the output.
    """
    xh = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], x_high.layout)
    wh = gl.allocate_shared_memory(gl.float16, [STAGES] + h0.block_shape, h0.layout)  # noqa: RUF005
    xl = xh
    wl = wh
    if SPLIT == 2:
        xl = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], x_high.layout)
        wl = gl.allocate_shared_memory(gl.float16, [STAGES] + h0.block_shape, h0.layout)  # noqa: RUF005
    strips = gl.allocate_shared_memory(o0.dtype, [2] + o0.block_shape, o0.layout)  # noqa: RUF005
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(emptied.index(i), count=1)
    fence_async_shared()
    gdc_wait()  # as in all kernels, see `_device.wait_for_previous`: nothing was read so far
    gdc_launch_dependents()
    num_tiles = num_row_tiles * (gl.cdiv(N0, BN) + gl.cdiv(N1, BN) + gl.cdiv(N2, BN))
    rings = (xh, xl, wh, wl)
    schedule = (tile_group, tile_first, tile_last)
    sizes = (num_rows, K0, K1, K2, N0, N1, N2)
    work = (rings, filled, emptied, num_tiles, schedule, sizes)
    scales = (x_unscale, w_unscale, w_bound, bias, num_biased)
    result = (o0, o1, o2, out, out_unscale, strips)
    copied = (x_high, x_low, h0, h1, h2, l0, l1, l2)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (work, scales, result, SPLIT, HALF, GROUPED, IN_PLACE, BM, BN, BK, STAGES, num_warps),
            ),
            (_load_tiles, (work, copied, SPLIT, GROUPED, IN_PLACE, BM, BN, BK, STAGES)),
        ],
        [1],
        [24],
    )


@functools.cache
def _shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.float16 if dtype == torch.float16 else gl.float32)


def _descriptor(tensor: Tensor, *box: int) -> TensorDescriptor:
    """What the TMA needs to copy boxes of a tensor."""
    layout = _shared_layout(box, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box), layout)


def _of_blocks(parts: list[TensorDescriptor]) -> list[TensorDescriptor]:
    """Three, one for each block; blocks that are not there are never asked for."""
    return parts + parts[-1:] * (3 - len(parts))


def hopper_matmul(
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
        shapes: (K_b, N_b) of each block, multiples of 8.
        bias, bound: as for the kernel of :mod:`.linear`.
        row_tiles: group, first and last row + 1 of the tiles of rows; None for weights that all rows share.
    """
    stored = w.high.shape[0]

    def weights(halves: Tensor | None) -> Sequence[TensorDescriptor | None]:
        if halves is None:
            return (None, None, None)
        blocks = []
        for flat, (depth, width) in zip(halves.split([k * n for k, n in shapes], dim=1), shapes, strict=True):
            size, box = ((depth, width), (tile.k, tile.n)) if in_place else ((width, depth), (tile.n, tile.k))
            blocks.append(_descriptor(flat.view(stored, *size), 1, *box))
        return _of_blocks(blocks)

    strip = 128 // out.high.element_size()
    results = [_descriptor(part, tile.m, strip) for part in out.high.split([n for _, n in shapes], dim=1)]
    (k0, n0), (k1, n1), (k2, n2) = [*shapes, (0, 0), (0, 0)][:3]
    num_rows = x.high.shape[0]
    num_row_tiles = cdiv(num_rows, tile.m) if row_tiles is None else row_tiles.shape[1]
    num_tiles = num_row_tiles * sum(cdiv(n, tile.n) for _, n in shapes)
    _hopper_linear_kernel[(min(num_tiles, processors(x.high.device)),)](
        _descriptor(x.high, tile.m, tile.k),
        None if x.low is None else _descriptor(x.low, tile.m, tile.k),
        x.unscale,
        *weights(w.high),
        *weights(w.low),
        w.unscale,
        bound,
        w.unscale if bias is None else bias,
        *_of_blocks(results),
        out.high,
        out.unscale,
        num_rows,
        num_row_tiles,
        *((None, None, None) if row_tiles is None else row_tiles),
        0 if bias is None else n0,
        *(k0, k1, k2),
        *(n0, n1, n2),
        SPLIT=SPLIT_OF_KIND[x.kind],
        HALF=out.kind == "half",
        GROUPED=row_tiles is not None,
        IN_PLACE=in_place,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
