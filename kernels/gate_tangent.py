"""Second derivatives of gates, along many directions at once, for edges and for atoms.

A gate (:func:`.reference.gate`, and the one within :func:`.reference.atomwise`) makes of gates p_l and values v::

    y_0 = silu(v_0);   y_m = s(p_l) v_m,   s(p) = sigmoid(p) or, for atoms, sigmoid(silu(p))

Along a direction k the inputs move by t. The kernel gives the outputs' tangents

    silu'(v_0) t_0;    s t_m + s' v_m t_l     (t_l the gate's)

and `half`, half of the Hessian of S = sum of g y (g the outputs' adjoints, fixed) times t: S couples nothing but the
gates with themselves and with their values, so three rows a channel suffice,

    t_k . S'' t_j = (head of t)_k . half_j + half_k . (head of t)_j
    half_0 = g_0 silu'' t_0 / 2;    half_l = s'' (sum over m of g v) t_l / 2 + s' sum over m of g t_m

where the head of t are its first three rows: the tangents of both gates and of v_0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._compile import kernel
from ._device import max_abs, power_of_two_scale, store_value, wait_for_previous
from ._launch import cdiv, edge_tile
from .layout import NUM_COEFFICIENTS, NUM_GATES
from .operand import SPLIT_OF_KIND, Operand, empty_operand, plain_operand

NUM_HEAD = NUM_GATES + 1
"""Rows of the inputs that second derivatives couple with all others: the gates and l = 0."""


@triton.jit
def _sigmoid_and_slopes(x):
    """Sigmoid, its slope and its curvature."""
    s = 1.0 / (1.0 + tl.exp(-x))
    slope = s * (1.0 - s)
    return s, slope, slope * (1.0 - 2.0 * s)


@triton.jit
def _silu_slopes(x):
    """Slope and curvature of SiLU."""
    s, slope, _ = _sigmoid_and_slopes(x)
    return s + x * slope, slope * (2.0 + x * (1.0 - 2.0 * s))


@triton.jit
def _gate_value_and_slopes(p, ATOMS: tl.constexpr):
    """s(p), s' and s''."""
    if ATOMS:
        inner, inner_curvature = _silu_slopes(p)
        s, slope, curvature = _sigmoid_and_slopes(p / (1.0 + tl.exp(-p)))
        return s, slope * inner, curvature * inner * inner + slope * inner_curvature
    else:  # noqa: RET505 - without it Triton compiles this branch too
        return _sigmoid_and_slopes(p)


@triton.jit
def _value_tangent(t_at, x_at, g_at, stride, mask, i: tl.constexpr, s, slope, t_gate):
    """Value i: its output's tangent, and what it adds to the sums of g v and g t."""
    t = tl.load(t_at + (2 + i) * stride, mask=mask, other=0.0)
    v = tl.load(x_at + (2 + i) * stride, mask=mask, other=0.0)
    g = tl.load(g_at + i * stride, mask=mask, other=0.0)
    return s * t + slope * v * t_gate, g * v, g * t


@kernel(do_not_specialize=["num_directions", "num_rows"])
def _gate_tangent_kernel(
    t,
    x,
    grad,
    high,
    low,
    unscale,
    half,
    num_directions,
    num_rows,
    H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ATOMS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A tile of directions for one edge or atom: tangents of the outputs, and half of S'' t."""
    wait_for_previous()
    i_row = tl.program_id(0).to(tl.int64)
    directions = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    channels = tl.arange(0, BLOCK_H)[None, :]
    m_k = directions < num_directions
    mask = m_k & (channels < H)
    rows = i_row + 0 * directions  # what directions share is loaded as whole tiles, in the layout of the tangents
    size = num_rows.to(tl.int64) * H
    # Edges are m-major, with coefficients one after another in a row; atoms are l-major, with coefficients outermost.
    if ATOMS:
        stride = size
        t_at, o_at = (directions * 11 * num_rows + rows) * H, (directions * 9 * num_rows + rows) * H
        h_at, x_at, g_at = (directions * 3 * num_rows + rows) * H, rows * H, rows * H
    else:
        stride = H
        t_at, o_at = (directions * num_rows + rows) * (11 * H), (directions * num_rows + rows) * (9 * H)
        h_at, x_at, g_at = (directions * num_rows + rows) * (3 * H), rows * (11 * H), rows * (9 * H)
    t_at, o_at, h_at = t + t_at + channels, o_at + channels, half + h_at + channels
    x_at, g_at = x + x_at + channels, grad + g_at + channels
    # The values of degrees 1 and 2 among the nine.
    A1: tl.constexpr = 1
    A2: tl.constexpr = 2 if ATOMS else 3
    A3: tl.constexpr = 3 if ATOMS else 5
    B1: tl.constexpr = 4 if ATOMS else 2
    B2: tl.constexpr = 5 if ATOMS else 4

    v = tl.load(x_at + 2 * stride, mask=mask, other=0.0)
    t_head = tl.load(t_at + 2 * stride, mask=mask, other=0.0)
    slope, curvature = _silu_slopes(v)
    y0 = slope * t_head
    tl.store(h_at + 2 * stride, 0.5 * tl.load(g_at, mask=mask, other=0.0) * curvature * t_head, mask=mask)

    t_head = tl.load(t_at, mask=mask, other=0.0)
    s, slope, curvature = _gate_value_and_slopes(tl.load(x_at, mask=mask, other=0.0), ATOMS)
    y1, gv1, gt1 = _value_tangent(t_at, x_at, g_at, stride, mask, A1, s, slope, t_head)
    y2, gv2, gt2 = _value_tangent(t_at, x_at, g_at, stride, mask, A2, s, slope, t_head)
    y3, gv3, gt3 = _value_tangent(t_at, x_at, g_at, stride, mask, A3, s, slope, t_head)
    tl.store(h_at, 0.5 * curvature * (gv1 + gv2 + gv3) * t_head + slope * (gt1 + gt2 + gt3), mask=mask)

    t_head = tl.load(t_at + stride, mask=mask, other=0.0)
    s, slope, curvature = _gate_value_and_slopes(tl.load(x_at + stride, mask=mask, other=0.0), ATOMS)
    y4, gv1, gt1 = _value_tangent(t_at, x_at, g_at, stride, mask, B1, s, slope, t_head)
    y5, gv2, gt2 = _value_tangent(t_at, x_at, g_at, stride, mask, B2, s, slope, t_head)
    y6, gv3, gt3 = _value_tangent(t_at, x_at, g_at, stride, mask, 6, s, slope, t_head)
    y7, gv4, gt4 = _value_tangent(t_at, x_at, g_at, stride, mask, 7, s, slope, t_head)
    y8, gv5, gt5 = _value_tangent(t_at, x_at, g_at, stride, mask, 8, s, slope, t_head)
    half_2 = 0.5 * curvature * (gv1 + gv2 + gv3 + gv4 + gv5) * t_head + slope * (gt1 + gt2 + gt3 + gt4 + gt5)
    tl.store(h_at + stride, half_2, mask=mask)

    scale = 1.0
    if SPLIT > 0:
        scale, inverse = power_of_two_scale(max_abs(y0, y1, y2, y3, y4, y5, y6, y7, y8))
        tl.store(unscale + directions * num_rows + i_row, inverse, mask=m_k)
    store_value(high, low, o_at, mask, y0, scale, SPLIT)
    store_value(high, low, o_at + A1 * stride, mask, y1, scale, SPLIT)
    store_value(high, low, o_at + A2 * stride, mask, y2, scale, SPLIT)
    store_value(high, low, o_at + A3 * stride, mask, y3, scale, SPLIT)
    store_value(high, low, o_at + B1 * stride, mask, y4, scale, SPLIT)
    store_value(high, low, o_at + B2 * stride, mask, y5, scale, SPLIT)
    store_value(high, low, o_at + 6 * stride, mask, y6, scale, SPLIT)
    store_value(high, low, o_at + 7 * stride, mask, y7, scale, SPLIT)
    store_value(high, low, o_at + 8 * stride, mask, y8, scale, SPLIT)


def gate_tangent(t: Tensor, x: Tensor, grad: Tensor, kind: str) -> tuple[Operand, Tensor]:
    """Tangents through the gate of edges, m-major rows, gates first.

    Args:
        t: tangents of the inputs [K, E, 11 * H]; x: the inputs [E, 11 * H].
        grad: adjoints of the outputs [E, 9 * H].
        kind: storage of the tangents.

    Returns:
        Tangents of the outputs [K * E, 9 * H], and `half` [K, E, 3 * H]; the head of t are its first 3 * H columns.
    """
    num_directions, num_rows, columns = t.shape
    width = columns // (NUM_GATES + NUM_COEFFICIENTS)
    out = empty_operand(num_directions * num_rows, NUM_COEFFICIENTS * width, kind, t.device)
    half = t.new_empty(num_directions, num_rows, NUM_HEAD * width)
    _launch(t, x, grad, out, half, num_rows, width, atoms=False)
    return out, half


def atomwise_gate_tangent(t: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents through the gate of the atom-wise MLP, l-major, coefficients outermost.

    Args:
        t: tangents of the inputs [K, 11, N, H], gates first; x: the inputs [11, N, H].
        grad: adjoints of the outputs [9, N, H].

    Returns:
        Tangents of the outputs [K, 9, N, H], and `half` [K, 3, N, H]; the head of t is t[:, :3].
    """
    num_directions, _, num_rows, width = t.shape
    out = t.new_empty(num_directions, NUM_COEFFICIENTS, num_rows, width)
    half = t.new_empty(num_directions, NUM_HEAD, num_rows, width)
    _launch(t, x, grad, plain_operand(out), half, num_rows, width, atoms=True)
    return out, half


def _launch(
    t: Tensor, x: Tensor, grad: Tensor, out: Operand, half: Tensor, num_rows: int, width: int, atoms: bool
) -> None:
    num_directions = t.shape[0]
    if num_directions * num_rows:
        tile = edge_tile(width, t.element_size())
        _gate_tangent_kernel[(num_rows, cdiv(num_directions, tile.edges))](
            t,
            x,
            grad,
            out.high,
            out.low,
            out.unscale,
            half,
            num_directions,
            num_rows,
            H=width,
            BLOCK_K=tile.edges,
            BLOCK_H=tile.channels,
            ATOMS=atoms,
            SPLIT=SPLIT_OF_KIND[out.kind],
            num_warps=tile.warps,
        )
