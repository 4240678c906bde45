"""Matrix-product operands: how a matrix is stored for a product of a given precision.

=========  ==========================================  ==================================================
kind       storage                                     a product of two such operands
=========  ==========================================  ==================================================
"double"   float64                                     one float64 product
"single"   float32                                     one IEEE float32 product
"split"    two halves a number, one scale a row        hi*hi + lo*hi + hi*lo, float32 sums: error of float32
"half"     one half a number, one scale a row          one half product, float32 sums: error of TF32
=========  ==========================================  ==================================================

Scales are exact powers of two, so splitting loses nothing but what lies below 22 (11) significant bits; the halves of a
row can neither overflow nor lose their small entries, whatever the row's magnitude. (Halves that products store, and
weights of kind "half", have scales from bounds instead: :mod:`.linear`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import _device
from ._compile import kernel
from ._device import power_of_two_scale, store_value, wait_for_previous
from ._launch import cdiv, next_power_of_2, runs_kernels

KINDS = ("double", "single", "split", "half")
SPLIT_OF_KIND = {"double": 0, "single": 0, "half": 1, "split": 2}
"""The storage that kernels call SPLIT: 0 as it is, 1 one half, 2 two halves."""

HALF_TOP: float = _device.HALF_TOP.value
"""The largest entry of a row stored as halves lies in [HALF_TOP, 2 HALF_TOP)."""


@dataclass(frozen=True)
class Operand:
    """A matrix [M, K] stored for products.

    Attributes:
        kind: one of KINDS.
        high: [M, K], float64, float32 or the leading halves.
        low: [M, K], remainders of the leading halves ("split" alone).
        unscale: [M, 1] float32, what the product's rows are multiplied by ("split" and "half").
        bias: [B] float32 or float64, of a product that left its bias to who reads it: what the first B columns lack.
    """

    kind: str
    high: Tensor
    low: Tensor | None = None
    unscale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the arithmetic on these rows: 8 for float64, else 4."""
        return max(4, self.high.element_size())

    def dense(self) -> Tensor:
        """The numbers, in float32 or float64, with the bias."""
        value = self.high
        if self.unscale is not None:
            value = value.float() if self.low is None else value.float() + self.low.float()
            value = value * self.unscale
        if self.bias is None:
            return value
        return value + torch.nn.functional.pad(self.bias, (0, value.shape[1] - self.bias.shape[0]))


def empty_operand(rows: int, columns: int, kind: str, device: torch.device) -> Operand:
    """Storage for a kernel to fill. OUTPUT: every element of the result is written by the caller's kernel."""
    if kind in ("double", "single"):
        dtype = torch.float64 if kind == "double" else torch.float32
        return Operand(kind, torch.empty(rows, columns, dtype=dtype, device=device))
    high = torch.empty(rows, columns, dtype=torch.float16, device=device)
    low = torch.empty_like(high) if kind == "split" else None
    return Operand(kind, high, low, torch.empty(rows, 1, dtype=torch.float32, device=device))


def plain_operand(matrix: Tensor) -> Operand:
    """A float32 or float64 matrix [M, K] as an operand, as it is."""
    return Operand("double" if matrix.dtype == torch.float64 else "single", matrix)


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["unscale"])
def _store_rows_kernel(
    matrix,
    high,
    low,
    unscale,
    num_rows,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Scale rows by powers of two and store them as halves."""
    wait_for_previous()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    m_m = rows < num_rows
    mask = m_m & (columns < K)
    value = tl.load(matrix + rows * K + columns, mask=mask, other=0.0)
    scale, inverse = power_of_two_scale(tl.max(tl.abs(value), axis=1)[:, None])
    tl.store(unscale + rows, inverse, mask=m_m)
    store_value(high, low, rows * K + columns, mask, value, scale, SPLIT)


def to_operand(matrix: Tensor, kind: str) -> Operand:
    """Store a matrix [M, K] for products of the given kind, with one scale for each row."""
    if kind in ("double", "single"):
        return Operand(kind, matrix.to(torch.float64 if kind == "double" else torch.float32).contiguous())
    value = matrix.float().contiguous()
    num_rows, depth = value.shape
    if runs_kernels(value):
        out = empty_operand(num_rows, depth, kind, value.device)
        if value.numel():
            block = max(16, next_power_of_2(depth))
            rows = max(1, 4096 // block)
            _store_rows_kernel[(cdiv(num_rows, rows),)](
                value,
                out.high,
                out.low,
                out.unscale,
                num_rows,
                K=depth,
                BLOCK_M=rows,
                BLOCK_K=block,
                SPLIT=SPLIT_OF_KIND[kind],
                num_warps=4,
            )
        return out
    return rows_in_halves(value, kind)


def rows_in_halves(value: Tensor, kind: str) -> Operand:
    """Store float32 rows [M, K] as "split" or "half" in plain PyTorch, however long they are."""
    largest = value.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.ldexp(torch.full_like(largest, 2 * HALF_TOP), -torch.frexp(largest).exponent)
    scaled = value * scale
    high = scaled.half()
    low = (scaled - high.float()).half() if kind == "split" else None
    return Operand(kind, high, low, 1 / scale)


@kernel()
def _store_columns_kernel(matrix, scale, high, low, size, K, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Scale columns and store them as halves."""
    wait_for_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    value = tl.load(matrix + at, mask=mask, other=0.0)
    store_value(high, low, at, mask, value, tl.load(scale + at % K, mask=mask, other=0.0), SPLIT)


def columns_in_halves(value: Tensor, kind: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Store a float32 matrix [M, K] as "split" or "half" for a product that sums over its rows.

    Returns what an operand has for rows, with scales for columns: halves and their remainders [M, K], unscale [K].
    """
    largest = torch.linalg.vector_norm(value, torch.inf, dim=0).clamp(min=2.0**-100)
    scale = torch.ldexp(torch.full_like(largest, 2 * HALF_TOP), -torch.frexp(largest).exponent)
    high = torch.empty_like(value, dtype=torch.float16)
    low = torch.empty_like(high) if kind == "split" else None
    size, split = value.numel(), SPLIT_OF_KIND[kind]
    _store_columns_kernel[(cdiv(size, 1024),)](
        value, scale, high, low, size, value.shape[1], BLOCK=1024, SPLIT=split, num_warps=4
    )
    return high, low, 1 / scale


@contextmanager
def ieee_products() -> Iterator[None]:
    """Torch's matrix products in IEEE arithmetic, whatever TF32 switches and autocast regions allow elsewhere.

    The process's switches are put back afterwards.
    """
    changed = []
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    for place in places:
        if place.fp32_precision in ("tf32", "bf16"):
            changed.append((place, place.fp32_precision))
            place.fp32_precision = "ieee"
    try:
        with ExitStack() as stack:
            for device in ("cuda", "cpu"):
                if torch.is_autocast_enabled(device):  # to leave it takes longer than to ask
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for place, precision in changed:
            place.fp32_precision = precision


@contextmanager
def float32_sums() -> Iterator[None]:
    """Torch's products of halves summed in float32, whatever the process's switches, which are put back, allow."""
    cuda: Any = torch.backends.cuda.matmul
    reduced, split, accumulation = (
        cuda.allow_fp16_reduced_precision_reduction,
        cuda.allow_fp16_reduced_precision_reduction_split_k,
        cuda.allow_fp16_accumulation,
    )
    cuda.allow_fp16_reduced_precision_reduction, cuda.allow_fp16_accumulation = (False, split), False
    try:
        yield
    finally:
        cuda.allow_fp16_reduced_precision_reduction = (reduced, split)
        cuda.allow_fp16_accumulation = accumulation
