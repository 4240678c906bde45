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


def matmul_tile(rows: int, columns: int, operand: str, device: torch.device) -> MatmulTile:
    """Tiles of the block matrix product by operand kind ("split" or "half").

    128 x 128 keeps two operand bytes for each multiply-add small enough for the tensor cores of A100 and H100; small
    systems take 64 rows so that the grid fills the card. The three-product form stages four half-precision tiles a
    step; where shared memory is short (consumer GPUs: 99 kB) it takes fewer stages.
    """
    n = min(128, max(16, triton.next_power_of_2(columns)))
    m = 128 if rows > 16384 else 64
    k = 64
    tiles = 2 if operand == "split" else 1
    bytes_per_stage = tiles * 2 * k * (m + n)
    available = shared_memory_per_block(device.index or 0) if device.type == "cuda" else 160 * 1024
    stages = max(2, min(4, available // bytes_per_stage - 1 if operand == "half" else available // bytes_per_stage))
    if stages * bytes_per_stage > available:
        k, stages = 32, 2
    return MatmulTile(m, n, k, 8 if m * n >= 128 * 128 else 4, stages)
