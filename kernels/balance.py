"""Residual sum of node features with the scalars of some channels balanced: their sum over a system is a given total.

Formula (:func:`.reference.balanced_sum`), for the sum s = x + y and an atom n of a system of N atoms::

    out[n, 0, c] = s[n, 0, c] - (sum over the system's atoms of s[., 0, c] - total) / N

for the balanced channels c; all else is s. Linear but for the total, and its own transpose.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import kernel
from ._device import load_l_major_sum, store_l_major, wait_for_previous
from ._launch import cdiv, edge_tile, next_power_of_2, runs_kernels
from .layout import NUM_COEFFICIENTS
from .many_neighbours import Systems


@kernel(do_not_specialize=["num_nodes", "first_channel", "num_channels", "total"])
def _shift_kernel(
    x,
    y,
    first_atom,
    totals,
    shift,
    num_nodes,
    first_channel,
    num_channels,
    total,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """shift[system, c] = (sum over the system's atoms - its total) / atoms, in an order that its size alone decides."""
    wait_for_previous()
    i_system = tl.program_id(0).to(tl.int64)
    first = 0
    last = num_nodes
    if first_atom is not None:
        first = tl.load(first_atom + i_system).to(tl.int32)
        last = tl.load(first_atom + i_system + 1).to(tl.int32)
    if totals is not None:
        total = tl.load(totals + i_system)
    channels = tl.arange(0, BLOCK_C)
    m_c = channels < num_channels
    sums = tl.zeros([BLOCK_N, BLOCK_C], x.dtype.element_ty)
    for k in range(first, last, BLOCK_N):
        nodes = k + tl.arange(0, BLOCK_N)[:, None]
        mask = (nodes < last) & m_c[None, :]
        at = nodes.to(tl.int64) * (9 * C) + first_channel + channels[None, :]
        sums += tl.load(x + at, mask=mask, other=0.0)
        if y is not None:
            sums += tl.load(y + at, mask=mask, other=0.0)
    excess = tl.sum(sums, axis=0) - total.to(sums.dtype)
    tl.store(shift + i_system * num_channels + channels, excess / (last - first).to(sums.dtype), mask=m_c)


@kernel(do_not_specialize=["num_nodes", "first_channel", "num_channels"])
def _balanced_sum_kernel(
    x,
    y,
    of_atom,
    shift,
    out,
    num_nodes,
    first_channel,
    num_channels,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out = x + y, less the shift of the atom's system on the balanced scalars."""
    wait_for_previous()
    nodes = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    mask = (nodes < num_nodes) & (channels < C)
    at = nodes * (9 * C) + channels
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = load_l_major_sum(x + at, None if y is None else y + at, C, mask)
    i_balanced = channels - first_channel
    balanced = mask & (i_balanced >= 0) & (i_balanced < num_channels)
    row = i_balanced + nodes * 0
    if of_atom is not None:
        row += tl.load(of_atom + nodes, mask=nodes < num_nodes, other=0).to(tl.int64) * num_channels
    s0 -= tl.load(shift + row, mask=balanced, other=0.0)
    store_l_major(out + at, C, mask, s0, s1, s2, s3, s4, s5, s6, s7, s8)


def _launch(x: Tensor, y: Tensor | None, channels: slice, total: int | Tensor, systems: Systems | None) -> Tensor:
    """Launch both kernels."""
    num_nodes, _, width = x.shape
    out = torch.empty_like(x)
    if num_nodes == 0:
        return out
    number = channels.stop - channels.start
    num_systems = 1 if systems is None else len(systems.sizes)
    shift = x.new_empty(num_systems, number)
    totals = total.contiguous() if isinstance(total, Tensor) else None
    # A single system's program is alone on the device: many atoms at once. Those of a pack are many, and small.
    atoms, warps = (1024, 16) if systems is None else (64, 1)
    _shift_kernel[(num_systems,)](
        x,
        y,
        None if systems is None else systems.first_atom,
        totals,
        shift,
        num_nodes,
        channels.start,
        number,
        0 if totals is not None else total,
        C=width,
        BLOCK_N=atoms,
        BLOCK_C=next_power_of_2(number),
        num_warps=warps,
    )
    tile = edge_tile(width, x.element_size())
    _balanced_sum_kernel[(cdiv(num_nodes, tile.edges),)](
        x,
        y,
        None if systems is None else systems.of_atom,
        shift,
        out,
        num_nodes,
        channels.start,
        number,
        C=width,
        BLOCK_N=tile.edges,
        BLOCK_C=tile.channels,
        num_warps=tile.warps,
    )
    return out


class _BalancedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, channels, total, systems):
        ctx.channels, ctx.systems, ctx.has_y = channels, systems, y is not None
        return _launch(x, y, channels, total, systems)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _BalancedSum.apply(grad.contiguous(), None, ctx.channels, 0, ctx.systems)
        return found, found if ctx.has_y else None, None, None, None


def _check_channels(channels: slice, width: int) -> None:
    if not isinstance(channels, slice) or not all(type(end) is int for end in (channels.start, channels.stop)):
        raise TypeError(f"channels: expected a slice with first and last + 1, got {channels!r}")
    if channels.step is not None or not 0 <= channels.start < channels.stop <= width:
        raise ValueError(f"channels: expected first and last + 1 of {width} channels, got {channels}")


def _check_totals(total: int | Tensor, systems: Systems | None, x: Tensor) -> None:
    if systems is not None and not isinstance(systems, Systems):
        raise TypeError(f"systems: expected Systems, got {type(systems).__name__}")
    if systems is not None and systems.starts[-1] != x.shape[0]:
        raise ValueError(f"systems: expected those of {x.shape[0]} atoms, got {systems.starts[-1]}")
    if systems is not None and systems.first_atom.device != x.device:
        raise ValueError(f"systems: expected device {x.device}, got {systems.first_atom.device}")
    if not isinstance(total, Tensor):
        if type(total) is not int:
            raise TypeError(f"total: expected an integer or a tensor, got {total!r}")
        return
    if systems is None or total.shape != (len(systems.sizes),):
        wanted = "an integer for a single system" if systems is None else f"shape [{len(systems.sizes)}]"
        raise ValueError(f"total: expected {wanted}, got {list(total.shape)}")
    if total.device != x.device:
        raise ValueError(f"total: expected device {x.device}, got {total.device}")


def balanced_sum(
    x: Tensor, y: Tensor | None, channels: slice, total: int | Tensor, systems: Systems | None = None
) -> Tensor:
    """Sum of node features whose scalars are shifted so that those of some channels sum to a total in each system.

    Args:
        x: node features [N, 9, C], l-major; float32 or float64 (half types are computed in float32).
        y: like x; or None, to balance x alone.
        channels: the balanced ones, first and last + 1.
        total: what each channel's scalars sum to over the atoms of a system; with `systems` also a tensor with one for
            each [S], of any type.
        systems: which atoms belong to which system; None for one system of all atoms.

    Returns:
        [N, 9, C]. Differentiable any number of times in x and y.

    Raises:
        ValueError, TypeError: a shape, type or device does not fit.
    """
    check_shape("x", x, (None, NUM_COEFFICIENTS, None))
    if y is not None:
        check_shape("y", y, tuple(x.shape), x)
    _check_channels(channels, x.shape[2])
    _check_totals(total, systems, x)
    x, y = (t.float() if t is not None and t.element_size() < 4 else t for t in (x, y))
    if not runs_kernels(x):
        return reference.balanced_sum(x, y, channels, total, None if systems is None else systems.atoms)
    return _BalancedSum.apply(x.contiguous(), None if y is None else y.contiguous(), channels, total, systems)
