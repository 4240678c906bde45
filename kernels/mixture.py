"""Mixtures of experts as weights in groups: mixed, scaled and stored as halves in one pass over the experts.

    w[g] = sum over x of  c[g, x] w_x       in float64, expert after expert, then stored for the products of linear.py

A mixture does not depend on those that are mixed beside it, bit for bit. Its halves need a scale before the first of
them is known; it follows from a bound: no entry of w[g] is larger than the sum of |c[g, x]| times the largest entry of
w_x. What that leaves unused of the range of halves they have to spare (see `linear.py`).

A block may be paired: experts are [2 N, K], W1 above W2, and stand for the real matrix of a complex product,

    x (W1 + i W2)^T   on rows [real, imaginary]:   w^T = [[W1, -W2], [W2, W1]], [2 N, 2 K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ._compile import kernel
from ._device import LEAST_UNSCALE, store_value, wait_for_previous
from ._launch import cdiv
from .linear import BlockWeights
from .operand import HALF_TOP, SPLIT_OF_KIND, Operand


# Sizes of blocks are no constants: but for pairs and kinds it is one kernel, and division is little beside the sums.
@kernel(do_not_specialize=["num_groups", "num_experts"], do_not_specialize_on_alignment=["coefficients", "scale"])
def _mix_kernel(
    experts,
    coefficients,
    scale,
    high,
    low,
    num_groups,
    num_experts,
    first,
    stride,
    R,
    K,
    PAIRED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Entries of one block [R, K] for some groups, stored from `first` on in rows of `stride` numbers."""
    wait_for_previous()
    group_tiles = tl.cdiv(num_groups, BLOCK_G)  # innermost: experts are read from memory once, then from the cache
    entry = tl.program_id(0) // group_tiles * BLOCK_E + tl.arange(0, BLOCK_E)
    group = tl.program_id(0) % group_tiles * BLOCK_G + tl.arange(0, BLOCK_G)
    m_e = entry < R * K
    m_g = group < num_groups
    sums = tl.zeros([BLOCK_G, BLOCK_E], dtype=tl.float64)
    for x in range(num_experts):  # 32-bit offsets: experts of a block take less than 8 GiB
        c = tl.load(coefficients + group * num_experts + x, mask=m_g, other=0.0)
        w = tl.load(experts + x * (R * K) + entry, mask=m_e, other=0.0)
        sums += c[:, None] * w.to(tl.float64)[None, :]
    value = sums.to(tl.float32)
    factor = tl.load(scale + group * 3, mask=m_g, other=0.0)[:, None]
    mask = m_g[:, None] & m_e[None, :]
    at = group.to(tl.int64)[:, None] * stride + first
    if PAIRED:
        row = entry // K
        second = row >= R // 2
        other = tl.where(second, row - R // 2, row + R // 2)
        store_value(high, low, at + (row * (2 * K) + entry % K)[None, :], mask, value, factor, SPLIT)
        turned = tl.where(second[None, :], -value, value)
        store_value(high, low, at + (other * (2 * K) + K + entry % K)[None, :], mask, turned, factor, SPLIT)
    else:
        store_value(high, low, at + entry[None, :], mask, value, factor, SPLIT)


@dataclass(frozen=True)
class ExpertBlocks:
    """Experts of a block linear, one to three blocks, on a device.

    Attributes:
        weights: experts [X, R_b, K_b] of each block, float32; a product takes its rows to R_b numbers.
        paired: which of them are W1 and W2 of a complex product.
        shapes: (inputs, outputs) of each block.
        largest: largest entry of each expert in each block [X, blocks].
        growth: largest sums of absolute entries over all blocks, of an output and of an input [X, 2].
    """

    weights: tuple[Tensor, ...]
    paired: tuple[bool, ...]
    shapes: tuple[tuple[int, int], ...]
    largest: np.ndarray
    growth: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[Tensor], paired: Sequence[bool]) -> ExpertBlocks:
        """Waits for the device, to learn how large the experts are."""
        kept = tuple(w.float().contiguous() for w in weights)
        absolute = [w.abs() for w in kept]
        full = [
            torch.cat([w, w.roll(w.shape[1] // 2, 1)], 2) if p else w for w, p in zip(absolute, paired, strict=True)
        ]
        largest = torch.stack([w.amax((1, 2)) for w in absolute], dim=1)
        growth = [torch.stack([w.sum(axis).amax(1) for w in full]).amax(0) for axis in (2, 1)]
        shapes = tuple((w.shape[2], w.shape[1]) for w in full)
        found = torch.cat([largest, torch.stack(growth, dim=1)], dim=1).double().cpu().numpy()
        return cls(kept, tuple(paired), shapes, found[:, : len(kept)], found[:, len(kept) :])


def mixed_weights(experts: ExpertBlocks, coefficients: np.ndarray, bias: Tensor | None, kind: str) -> BlockWeights:
    """Weights in groups, one for each mixture.

    Args:
        experts: on a device that runs the kernels.
        coefficients: [G, X], float64.
        bias: of the first block, for all groups.
        kind: "split" or "half".
    """
    num_groups, num_experts = coefficients.shape
    device = experts.weights[0].device
    sizes = [k * n for k, n in experts.shapes]
    high = torch.empty(num_groups, sum(sizes), dtype=torch.float16, device=device)
    low = torch.empty_like(high) if kind == "split" else None
    weight = np.abs(coefficients)[:, :, None]
    # Powers of two, each from its own row alone: entries become at most the largest half that is stored.
    bound = (weight * experts.largest).sum(axis=1)
    scale = np.ldexp(2 * HALF_TOP, -np.frexp(np.maximum(bound, 2.0**-100))[1])
    scale = np.pad(scale, ((0, 0), (0, 3 - scale.shape[1])), constant_values=1.0).astype(np.float32)
    scales, coefficient = (torch.from_numpy(a).to(device) for a in (scale, np.ascontiguousarray(coefficients)))
    first = 0
    for i, (w, paired) in enumerate(zip(experts.weights, experts.paired, strict=True)):
        _, rows, depth = w.shape
        programs = cdiv(rows * depth, 128) * cdiv(num_groups, 16)
        _mix_kernel[(programs,)](
            w,
            coefficient,
            scales[:, i:],
            high,
            low,
            num_groups,
            num_experts,
            first,
            high.shape[1],
            rows,
            depth,
            PAIRED=paired,
            SPLIT=SPLIT_OF_KIND[kind],
            BLOCK_G=16,
            BLOCK_E=128,
            num_warps=4,
        )
        first += sizes[i]
    bounds: list[Tensor | None] = [None, None]
    if kind == "half":
        growth = (weight * experts.growth).sum(axis=1)
        shift = 0.0 if bias is None else float(bias.abs().amax()) / HALF_TOP
        bounds = [_powers(growth[:, i], shift if i == 0 else 0.0, device) for i in range(2)]
    stored = Operand(kind, high, low, 1 / scales)
    return BlockWeights(kind, experts.shapes, (), bias, num_groups, stored, None, *bounds)


def _powers(growth: np.ndarray, shift: float, device: torch.device) -> Tensor:
    """Powers of two at or above growth [G] and shift: [G, 2]."""
    bounds = np.stack([growth, np.full_like(growth, shift)], axis=1)
    found = np.ldexp(1.0, np.frexp(np.maximum(bounds, LEAST_UNSCALE.value / 2))[1])
    return torch.from_numpy(found.astype(np.float32)).to(device)
