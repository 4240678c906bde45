"""Launch numbers and where kernels run. Each number stands once, here, with its reason."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True under TRITON_INTERPRET=1: the kernels then run on CPU tensors too, for the tests."""


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor go through the Triton kernels (else through :mod:`.reference`)."""
    return tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")


class EdgeTile(NamedTuple):
    """Edges per program, padded channels and warps of a kernel over edges."""

    edges: int
    channels: int
    warps: int


def edge_tile(channels: int, itemsize: int) -> EdgeTile:
    """Tiles of the edge kernels: 16 bytes a lane, one edge a warp at 128 float32 channels.

    A program of 4 warps then holds 4 edges; all 9 coefficients of an edge stay in registers, about 150 a thread. Wider
    channels take fewer edges, so the registers hold.
    """
    padded = max(16, triton.next_power_of_2(channels))
    edges = max(1, min(4, 2048 // (padded * itemsize)))
    return EdgeTile(edges, padded, 4)


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
_SMALL_TILE = MatmulTile(64, 128, 64, 4, 3)
_SMALLEST_TILE = MatmulTile(64, 64, 32, 4, 2)


def matmul_tile(rows: int, depth: int, columns: int, operand: str, device: torch.device) -> MatmulTile:
    """Tiles of the block matrix product by operand kind ("split" or "half").

    Small systems take 64 rows so that the grid fills the card.
    """
    available = shared_memory_per_block(device.index or 0) if device.type == "cuda" else 160 * 1024
    large = _SHALLOW_TILES if depth <= 128 else _SPLIT_TILES if operand == "split" else _HALF_TILES
    narrow = max(16, triton.next_power_of_2(columns))
    for tile in (*(large if rows > 16384 else ()), _SMALL_TILE, _SMALLEST_TILE):
        fitted = tile._replace(n=min(tile.n, narrow))
        bytes_per_stage = (2 if operand == "split" else 1) * 2 * fitted.k * (fitted.m + fitted.n)
        if fitted.stages * bytes_per_stage <= available:
            return fitted
    raise RuntimeError(f"device: expected at least 32 KiB of shared memory a block, got {available} bytes")
