"""Radial networks as tables: for one pair of elements they are functions of the distance alone.

A table holds, for each pair of elements and each of its intervals, the cubic that has the network's value and slope at
both ends (cubic Hermite interpolation), as polynomial coefficients, so that neither value nor slope suffers from the
cancellation of neighbouring values in float32. The energy computed through it is smooth, and its forces are its exact
derivative. With 512 knots over 6 A the hidden activations are reproduced to 3e-9, their slopes to 1e-6.

    f(d) = c0 + t (c1 + t (c2 + t c3)),   df/dd = (c1 + t (2 c2 + 3 t c3)) / h,   t = d / h - floor(d / h)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from . import reference
from ._compile import kernel
from ._device import power_of_two_scale, store_value, wait_for_previous
from ._launch import cdiv, next_power_of_2
from .operand import SPLIT_OF_KIND, Operand, empty_operand, to_operand

NUM_KNOTS = 512
_PAIRS = 16  # tabulated at a time


@dataclass(frozen=True)
class RadialTable:
    """Hidden activations of one radial network over the distance, for every pair of elements.

    Attributes:
        coefficients: [P, NUM_KNOTS - 1, 4, B] float32.
        spacing: distance h between knots in A.
    """

    coefficients: Tensor
    spacing: float


def tabulate(pair_bias: Tensor, layers: reference.RadialLayers, cutoff: float) -> RadialTable:
    """Tabulate a radial network from 0 to the cutoff (A), in float64, for the pairs of ``pair_bias`` [P, B].

    The table of a pair does not depend on the others: all products are of the same shape, pairs standing in for those
    that are missing at the end.
    """
    pairs, width = pair_bias.shape
    spacing = cutoff / (NUM_KNOTS - 1)
    knots = torch.arange(NUM_KNOTS, dtype=torch.float64, device=pair_bias.device) * spacing
    coefficients = pair_bias.new_empty(pairs, NUM_KNOTS - 1, 4, width, dtype=torch.float32)
    for first in range(0, pairs, _PAIRS):  # some at a time: the float64 intermediates stay small
        pair = torch.arange(first, first + _PAIRS, device=knots.device).clamp(max=pairs - 1)
        each = pair.repeat_interleave(NUM_KNOTS, output_size=_PAIRS * NUM_KNOTS)
        found = network_with_slope(knots.repeat(_PAIRS), pair_bias, each, layers)
        value, slope = (t.view(_PAIRS, NUM_KNOTS, width)[: pairs - first] for t in found)
        slope = slope * spacing
        rise = value[:, 1:] - value[:, :-1]
        block = coefficients[first : first + _PAIRS]
        block[:, :, 0], block[:, :, 1] = value[:, :-1], slope[:, :-1]
        block[:, :, 2] = 3 * rise - 2 * slope[:, :-1] - slope[:, 1:]
        block[:, :, 3] = slope[:, :-1] + slope[:, 1:] - 2 * rise
    return RadialTable(coefficients, spacing)


def network_with_slope(
    distances: Tensor, pair_bias: Tensor, pair: Tensor, layers: reference.RadialLayers
) -> tuple[Tensor, Tensor]:
    """Hidden activations [E, B] of a radial network and their derivatives with respect to the distance (1/A)."""
    offset = distances[:, None] - layers.centres
    gaussians = torch.exp(layers.gaussian_exponent * offset**2)
    slopes = 2 * layers.gaussian_exponent * offset * gaussians
    hidden = gaussians @ layers.weight_distance + pair_bias[pair]
    hidden, slope = _norm_silu_with_slope(hidden, slopes @ layers.weight_distance, *layers.norm_first)
    hidden, slope = hidden @ layers.weight_second + layers.bias_second, slope @ layers.weight_second
    return _norm_silu_with_slope(hidden, slope, *layers.norm_second)


def _norm_silu_with_slope(x: Tensor, dx: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm, then SiLU, of rows x [E, B] with derivatives dx along one direction."""
    x, dx = x - x.mean(dim=1, keepdim=True), dx - dx.mean(dim=1, keepdim=True)
    scale = (x.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
    y = x * scale
    dy = (dx - y * (y * dx).mean(dim=1, keepdim=True)) * scale
    y, dy = y * weight + bias, dy * weight
    s = y.sigmoid()
    return y * s, dy * s * (1 + y * (1 - s))


@kernel(
    do_not_specialize=["num_edges"],
    do_not_specialize_on_alignment=["distances", "pair", "unscale", "slope_unscale"],
)
def _radial_table_kernel(
    distances,
    pair,
    coefficients,
    high,
    low,
    unscale,
    slope_high,
    slope_low,
    slope_unscale,
    num_edges,
    INTERVALS: tl.constexpr,
    INVERSE_SPACING: tl.constexpr,
    B: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLIT: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Value, and with SLOPE the derivative, of the tabulated activations for a tile of edges."""
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_B)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < B)
    # In float64: the place between two knots is the small difference of large numbers.
    inverse_spacing = tl.full([1, 1], INVERSE_SPACING, tl.float64)
    position = tl.load(distances + edges, mask=m_e, other=0.0) * inverse_spacing
    interval = tl.minimum(position.to(tl.int32), INTERVALS - 1)
    t = (position - interval.to(tl.float64)).to(tl.float32)
    row = tl.load(pair + edges, mask=m_e, other=0).to(tl.int64) * INTERVALS + interval
    at = coefficients + row * (4 * B) + channels
    c0 = tl.load(at, mask=mask, other=0.0)
    c1 = tl.load(at + B, mask=mask, other=0.0)
    c2 = tl.load(at + 2 * B, mask=mask, other=0.0)
    c3 = tl.load(at + 3 * B, mask=mask, other=0.0)
    out = edges * B + channels
    value = c0 + t * (c1 + t * (c2 + t * c3))
    scale = 1.0
    if SPLIT > 0:
        scale, inverse = power_of_two_scale(tl.max(tl.abs(value), axis=1)[:, None])
        tl.store(unscale + edges, inverse, mask=m_e)
    store_value(high, low, out, mask, value, scale, SPLIT)
    if SLOPE:
        slope = (c1 + t * (2.0 * c2 + 3.0 * t * c3)) * INVERSE_SPACING
        if SPLIT > 0:
            scale, inverse = power_of_two_scale(tl.max(tl.abs(slope), axis=1)[:, None])
            tl.store(slope_unscale + edges, inverse, mask=m_e)
        store_value(slope_high, slope_low, out, mask, slope, scale, SPLIT)


def look_up(
    distances: Tensor, pair: Tensor, table: RadialTable, kind: str, with_slope: bool
) -> tuple[Operand, Operand | None]:
    """Tabulated activations of each edge as operands [E, B], and their derivatives if wanted.

    Args:
        distances: d [E] in A, float64, at most the table's cutoff.
        pair: index of each edge's pair of elements [E].
        kind: storage of the results ("single", "split" or "half").
    """
    num_edges, width = distances.shape[0], table.coefficients.shape[3]
    value = empty_operand(num_edges, width, kind, distances.device)
    slope = empty_operand(num_edges, width, kind, distances.device) if with_slope else None
    if num_edges:
        _radial_table_kernel[(cdiv(num_edges, 4),)](
            distances,
            pair,
            table.coefficients,
            value.high,
            value.low,
            value.unscale,
            slope and slope.high,
            slope and slope.low,
            slope and slope.unscale,
            num_edges,
            INTERVALS=NUM_KNOTS - 1,
            INVERSE_SPACING=1 / table.spacing,
            B=width,
            BLOCK_E=4,
            BLOCK_B=max(16, next_power_of_2(width)),
            SPLIT=SPLIT_OF_KIND[kind],
            SLOPE=with_slope,
            num_warps=4,
        )
    return value, slope


@dataclass(frozen=True)
class Radial:
    """One radial network up to its last linear layer: its weights, and its table where one is kept.

    Attributes:
        pair_bias: first layer's contribution of each pair of elements [P, B].
        layers: the remaining weights.
        table: None to evaluate the network itself: float64, very many pairs, or no GPU.
    """

    pair_bias: Tensor
    layers: reference.RadialLayers
    table: RadialTable | None

    def hidden(self, distances: Tensor, pair: Tensor, kind: str, with_slope: bool) -> tuple[Operand, Operand | None]:
        """Hidden activations of each edge as operands [E, B], and their derivatives (1/A) if wanted.

        `distances` [E] are in A, float64.
        """
        if self.table is not None:
            return look_up(distances, pair, self.table, kind, with_slope)
        value, slope = network_with_slope(distances.to(self.pair_bias.dtype), self.pair_bias, pair, self.layers)
        return to_operand(value, kind), to_operand(slope, kind) if with_slope else None
