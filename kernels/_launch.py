"""Launch numbers that several kernels share, each with its reason, and where kernels run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True under TRITON_INTERPRET=1: the kernels then run on CPU tensors too, for the tests."""


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor go through the Triton kernels (else through :mod:`.reference`)."""
    return tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's own goes through the machinery of its compiler, and launches are many."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


class EdgeTile(NamedTuple):
    """Edges per program, padded channels and warps of a kernel over edges."""

    edges: int
    channels: int
    warps: int


@functools.cache
def edge_tile(channels: int, itemsize: int, edges: int = 4, warps: int = 4) -> EdgeTile:
    """Tiles of the edge kernels: 16 bytes a lane, one edge a warp at 128 float32 channels.

    A program of 4 warps then holds 4 edges; all 9 coefficients of an edge stay in registers, about 150 a thread. Wider
    channels take fewer edges and more warps, so the registers hold. `edges` and `warps` are those at 128 float32
    channels.
    """
    padded = max(16, next_power_of_2(channels))
    warps_an_edge = max(1, padded * itemsize // 512)
    return EdgeTile(max(1, edges // warps_an_edge), padded, max(warps, warps_an_edge))


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the CPU, where kernels are interpreted."""
    return _processors(device.index or 0) if device.type == "cuda" else 1


@functools.cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def few_atoms(num_atoms: int, device: torch.device) -> bool:
    """Whether programs of one atom each leave much of the card idle, so that each should be wide."""
    return device.type != "cuda" or num_atoms < 4 * processors(device)


class MatmulTile(NamedTuple):
    """Rows, columns and depth of a matrix product's tile, its warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@functools.cache
def shared_memory_per_block(device_index: int) -> int:
    """Shared memory one program may use on this GPU, in bytes."""
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin


# Tiles in order of preference: the first whose stages fit the shared memory is taken. Measured on an H200 for UMA-S's
# shapes; consumer GPUs (99 KiB) reach the last ones. A product in three parts stages four tiles of halves a step.
_SPLIT_TILES = (MatmulTile(256, 128, 32, 8, 4), MatmulTile(128, 128, 64, 8, 2), MatmulTile(128, 128, 32, 8, 3))
_HALF_TILES = (MatmulTile(128, 256, 64, 8, 4), MatmulTile(128, 128, 64, 8, 4), MatmulTile(128, 128, 64, 8, 3))
# A shallow product is bound by what it writes: wide tiles read its rows once.
_SHALLOW_TILES = (MatmulTile(128, 256, 32, 8, 3), MatmulTile(128, 128, 32, 8, 3))
# Few rows: smaller tiles fill the card. The last ones are the last resort for many rows too.
_SMALL_SPLIT_TILES = (MatmulTile(128, 128, 64, 8, 3), MatmulTile(64, 128, 32, 4, 4), MatmulTile(64, 64, 32, 4, 2))
_SMALL_HALF_TILES = (MatmulTile(64, 128, 64, 4, 3), MatmulTile(64, 64, 32, 4, 2))
_SMALL_SHALLOW_TILES = (MatmulTile(64, 128, 32, 4, 4), MatmulTile(64, 64, 32, 4, 2))


# Products of more rows than these have other tiles: higher ones no longer leave an H200's multiprocessors idle (of 128
# rows and columns, 2048 rows of UMA-S have a tile or more for each, 16384 eight or more). So have rows in groups of
# three times one of these heights, which are those of the tables.
_FEW_ROWS, _MANY_ROWS = 2047, 16384
_HEIGHTS = (64, 128, 256)


def product_sizes(in_groups: bool) -> Iterator[tuple[int, int | None]]:
    """Numbers of rows, and rows a group (else None): products of these sizes take every tile that any size takes."""
    rows_a_group = (1, *(3 * height for height in _HEIGHTS)) if in_groups else (None,)
    return itertools.product((1, _FEW_ROWS + 1, _MANY_ROWS + 1), rows_a_group)


def matmul_tile(
    rows: int, depth: int, columns: int, operand: str, device: torch.device, rows_a_group: int | None = None
) -> MatmulTile:
    """Tiles of the block matrix product by operand kind ("split" or "half").

    `rows_a_group`: rows are in groups of about so many, and results must not depend on other groups. A result depends
    on the depth of a tile alone, which orders its sum, so that is fixed. Each group begins a tile of its own, and half
    of the last one stays empty on average: high tiles, which are a fifth faster, pay from three of them on.
    """
    available = shared_memory_per_block(device.index or 0) if device.type == "cuda" else 160 * 1024
    if depth <= 128:
        large, small = _SHALLOW_TILES, _SMALL_SHALLOW_TILES
    elif operand == "split":
        large, small = _SPLIT_TILES, _SMALL_SPLIT_TILES
    else:
        large, small = _HALF_TILES, _SMALL_HALF_TILES
    choice = (*(large if rows > _MANY_ROWS else ()), *small)
    if rows_a_group is not None:
        low, last = small[-2:]
        choice = (*(t for t in choice if t.k == low.k and 3 * t.m <= rows_a_group), low, last)
    narrow = max(16, next_power_of_2(columns))
    for tile in choice:
        fitted = tile._replace(n=min(tile.n, narrow))
        bytes_per_stage = (2 if operand == "split" else 1) * 2 * fitted.k * (fitted.m + fitted.n)
        if fitted.stages * bytes_per_stage <= available:
            return fitted
    raise RuntimeError(f"device: expected at least 32 KiB of shared memory a block, got {available} bytes")


@functools.cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) == (9, 0)


# High tiles read least from the second-level cache, which bounds these products; low ones fill the card with few rows.
# The depth of a split product's tile orders its sums and is that of groups above. Warps are those that multiply.
_HOPPER_TILES = {
    "split": (MatmulTile(256, 128, 32, 8, 3), MatmulTile(128, 128, 32, 8, 4)),
    "half": (MatmulTile(256, 128, 64, 8, 3), MatmulTile(128, 128, 64, 8, 5)),
}


def hopper_tile(
    rows: int, shapes: Sequence[tuple[int, int]], operand: str, device: torch.device, rows_a_group: int | None = None
) -> MatmulTile | None:
    """Tile of the block matrix product on Hopper's own units; None where :func:`matmul_tile` is to be used.

    `shapes`: (K_b, N_b) of the blocks; rows in memory must begin at multiples of 16 bytes, and columns of at least one
    block fill a tile. `rows_a_group`: as for :func:`matmul_tile`.
    """
    if device.type != "cuda" or not _is_hopper(device.index or 0):
        return None
    if any(size % 8 for shape in shapes for size in shape) or max(n for _, n in shapes) < 128:
        return None
    high, low = _HOPPER_TILES[operand]
    # A launch takes the host longer, which small systems that are not recorded would wait for.
    if rows > _MANY_ROWS and (rows_a_group is None or rows_a_group >= 3 * high.m):
        return high
    return low if rows > _FEW_ROWS and (rows_a_group is None or rows_a_group >= 3 * low.m) else None


def library_multiplies(rows: int, shapes: Sequence[tuple[int, int]], device: torch.device) -> bool:
    """Whether the vendor's library is the fastest for halves without a bias: it takes a launch for each block.

    It was on an H200 (`benchmarks/NOTES.md`); other GPUs were not measured. `shapes`: (K_b, N_b) of the blocks, all of
    which must be multiples of 8.
    """
    return device.type == "cuda" and rows > _MANY_ROWS and not any(size % 8 for shape in shapes for size in shape)


def outer_tile(depth: int, width: int, operand: str, device: torch.device) -> MatmulTile:
    """Tiles of the sums x^T g over rows, [depth, width]: rows and columns of the result, `k` rows of x a step."""
    m, n = (min(128, max(16, next_power_of_2(size))) for size in (depth, width))
    available = shared_memory_per_block(device.index or 0) if device.type == "cuda" else 160 * 1024
    bytes_per_stage = (2 if operand == "split" else 1) * 2 * 32 * (m + n)
    return MatmulTile(m, n, 32, 8 if m * n > 64 * 64 else 4, min(4, available // bytes_per_stage))


def in_chunks(programs: int, device: torch.device) -> bool:
    """Whether so many programs, one for all rows of a group, leave the card idle: then chunks of rows are summed."""
    return programs < 4 * processors(device)
