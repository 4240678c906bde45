"""Gate activation between the two SO(2) linears, as one kernel forward and one backward.

Formula (:func:`.reference.gate`), for gates p1, p2 and m-major values v::

    y[l0] = v silu'd = v sigmoid(v);   y[l, m] = v sigmoid(p_l)        [E, 2 + 9, H] -> [E, 9, H]

The input is the first linear's output as it stands, the |m| blocks one after another in each row; the output is the
second linear's input likewise: blocks stay blocks, nothing is joined or split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import kernel
from ._device import max_abs, power_of_two_scale, row_scale, store_value, wait_for_previous
from ._launch import cdiv, edge_tile, runs_kernels
from .edge import reference_gradient
from .layout import GATE_OF_M_MAJOR, NUM_COEFFICIENTS, NUM_GATES
from .operand import SPLIT_OF_KIND, Operand, empty_operand, plain_operand

# The kernels write the m-major order out: l0, l1, l2 | l1, l2, l1, l2 | l2, l2.
assert GATE_OF_M_MAJOR == (None, 0, 1, 0, 1, 0, 1, 1, 1)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load_biased(at, bias, edges, channels, mask, u, H: tl.constexpr):
    """The first block: both gates and the values of m = 0, with the bias that the product left to be added here.

    The bias is loaded for every edge: as one row it would come in another layout, and go through shared memory.
    """
    p1 = tl.load(at, mask=mask, other=0.0) * u
    p2 = tl.load(at + H, mask=mask, other=0.0) * u
    v0 = tl.load(at + 2 * H, mask=mask, other=0.0) * u
    v1 = tl.load(at + 3 * H, mask=mask, other=0.0) * u
    v2 = tl.load(at + 4 * H, mask=mask, other=0.0) * u
    if bias is not None:
        b_at = bias + edges * 0 + channels
        p1 += tl.load(b_at, mask=mask, other=0.0)
        p2 += tl.load(b_at + H, mask=mask, other=0.0)
        v0 += tl.load(b_at + 2 * H, mask=mask, other=0.0)
        v1 += tl.load(b_at + 3 * H, mask=mask, other=0.0)
        v2 += tl.load(b_at + 4 * H, mask=mask, other=0.0)
    return p1, p2, v0, v1, v2


@kernel(do_not_specialize=["num_edges"])
def _gate_kernel(
    x,
    x_unscale,
    bias,
    high,
    low,
    unscale,
    num_edges,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """y[l0] = v sigmoid(v); y[l, m] = v sigmoid(p_l), for a tile of edges."""
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_H)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < H)
    at = x + edges * (11 * H) + channels
    u = row_scale(x_unscale, edges, m_e, SCALED)
    p1, p2, v0, v1, v2 = _load_biased(at, bias, edges, channels, mask, u, H)
    p1, p2 = _sigmoid(p1), _sigmoid(p2)
    y0 = v0 * _sigmoid(v0)
    y1 = p1 * v1
    y2 = p2 * v2
    y3 = p1 * u * tl.load(at + 5 * H, mask=mask, other=0.0)
    y4 = p2 * u * tl.load(at + 6 * H, mask=mask, other=0.0)
    y5 = p1 * u * tl.load(at + 7 * H, mask=mask, other=0.0)
    y6 = p2 * u * tl.load(at + 8 * H, mask=mask, other=0.0)
    y7 = p2 * u * tl.load(at + 9 * H, mask=mask, other=0.0)
    y8 = p2 * u * tl.load(at + 10 * H, mask=mask, other=0.0)
    scale = 1.0
    if SPLIT > 0:
        scale, inverse = power_of_two_scale(max_abs(y0, y1, y2, y3, y4, y5, y6, y7, y8))
        tl.store(unscale + edges, inverse, mask=m_e)
    at = edges * (9 * H) + channels
    store_value(high, low, at, mask, y0, scale, SPLIT)
    store_value(high, low, at + H, mask, y1, scale, SPLIT)
    store_value(high, low, at + 2 * H, mask, y2, scale, SPLIT)
    store_value(high, low, at + 3 * H, mask, y3, scale, SPLIT)
    store_value(high, low, at + 4 * H, mask, y4, scale, SPLIT)
    store_value(high, low, at + 5 * H, mask, y5, scale, SPLIT)
    store_value(high, low, at + 6 * H, mask, y6, scale, SPLIT)
    store_value(high, low, at + 7 * H, mask, y7, scale, SPLIT)
    store_value(high, low, at + 8 * H, mask, y8, scale, SPLIT)


@kernel(do_not_specialize=["num_edges"])
def _gate_backward_kernel(
    grad,
    grad_unscale,
    x,
    x_unscale,
    bias,
    high,
    low,
    unscale,
    num_edges,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """d v0 = g s (1 + v (1 - s)), s = sigmoid(v); d v = g sigmoid(p); d p = sigmoid'(p) sum over m of g v."""
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_H)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < H)
    at = x + edges * (11 * H) + channels
    g_at = grad + edges * (9 * H) + channels
    u = row_scale(x_unscale, edges, m_e, SCALED)
    g_u = row_scale(grad_unscale, edges, m_e, SCALED)
    p1, p2, v0, v1, v2 = _load_biased(at, bias, edges, channels, mask, u, H)
    p1, p2 = _sigmoid(p1), _sigmoid(p2)
    s = _sigmoid(v0)
    g0 = tl.load(g_at, mask=mask, other=0.0) * g_u * s * (1.0 + v0 * (1.0 - s))
    g1 = tl.load(g_at + H, mask=mask, other=0.0) * g_u
    g2 = tl.load(g_at + 2 * H, mask=mask, other=0.0) * g_u
    g3 = tl.load(g_at + 3 * H, mask=mask, other=0.0) * g_u
    g4 = tl.load(g_at + 4 * H, mask=mask, other=0.0) * g_u
    g5 = tl.load(g_at + 5 * H, mask=mask, other=0.0) * g_u
    g6 = tl.load(g_at + 6 * H, mask=mask, other=0.0) * g_u
    g7 = tl.load(g_at + 7 * H, mask=mask, other=0.0) * g_u
    g8 = tl.load(g_at + 8 * H, mask=mask, other=0.0) * g_u
    q1 = g3 * tl.load(at + 5 * H, mask=mask, other=0.0)
    q2 = g4 * tl.load(at + 6 * H, mask=mask, other=0.0)
    q1 += g5 * tl.load(at + 7 * H, mask=mask, other=0.0)
    q2 += g6 * tl.load(at + 8 * H, mask=mask, other=0.0)
    q2 += g7 * tl.load(at + 9 * H, mask=mask, other=0.0)
    q2 += g8 * tl.load(at + 10 * H, mask=mask, other=0.0)
    q1 = (g1 * v1 + u * q1) * p1 * (1.0 - p1)
    q2 = (g2 * v2 + u * q2) * p2 * (1.0 - p2)
    g1, g3, g5 = g1 * p1, g3 * p1, g5 * p1
    g2, g4, g6, g7, g8 = g2 * p2, g4 * p2, g6 * p2, g7 * p2, g8 * p2
    scale = 1.0
    if SPLIT > 0:
        gates = tl.max(tl.maximum(tl.abs(q1), tl.abs(q2)), axis=1)[:, None]
        largest = tl.maximum(gates, max_abs(g0, g1, g2, g3, g4, g5, g6, g7, g8))
        scale, inverse = power_of_two_scale(largest)
        tl.store(unscale + edges, inverse, mask=m_e)
    at = edges * (11 * H) + channels
    store_value(high, low, at, mask, q1, scale, SPLIT)
    store_value(high, low, at + H, mask, q2, scale, SPLIT)
    store_value(high, low, at + 2 * H, mask, g0, scale, SPLIT)
    store_value(high, low, at + 3 * H, mask, g1, scale, SPLIT)
    store_value(high, low, at + 4 * H, mask, g2, scale, SPLIT)
    store_value(high, low, at + 5 * H, mask, g3, scale, SPLIT)
    store_value(high, low, at + 6 * H, mask, g4, scale, SPLIT)
    store_value(high, low, at + 7 * H, mask, g5, scale, SPLIT)
    store_value(high, low, at + 8 * H, mask, g6, scale, SPLIT)
    store_value(high, low, at + 9 * H, mask, g7, scale, SPLIT)
    store_value(high, low, at + 10 * H, mask, g8, scale, SPLIT)


def gate_forward(x: Operand, width: int, kind: str) -> Operand:
    """Launch the forward kernel on rows [E, 11 * H], not split; the result [E, 9 * H] is of the given kind.

    A bias that x leaves to be added is that of its first block [5 * H].
    """
    num_edges = x.high.shape[0]
    out = empty_operand(num_edges, NUM_COEFFICIENTS * width, kind, x.high.device)
    if num_edges:
        tile = edge_tile(width, x.itemsize)
        _gate_kernel[(cdiv(num_edges, tile.edges),)](
            x.high,
            x.unscale,
            x.bias,
            out.high,
            out.low,
            out.unscale,
            num_edges,
            H=width,
            BLOCK_E=tile.edges,
            BLOCK_H=tile.channels,
            SCALED=x.unscale is not None,
            SPLIT=SPLIT_OF_KIND[kind],
            num_warps=tile.warps,
        )
    return out


def gate_backward(grad: Operand, x: Operand, width: int, kind: str) -> Operand:
    """Launch the backward kernel on rows [E, 9 * H] and [E, 11 * H], stored alike and not split; x as for the forward.

    The result [E, 11 * H] is of the given kind.
    """
    num_edges = x.high.shape[0]
    out = empty_operand(num_edges, (NUM_GATES + NUM_COEFFICIENTS) * width, kind, x.high.device)
    if num_edges:
        tile = edge_tile(width, x.itemsize)
        _gate_backward_kernel[(cdiv(num_edges, tile.edges),)](
            grad.high,
            grad.unscale,
            x.high,
            x.unscale,
            x.bias,
            out.high,
            out.low,
            out.unscale,
            num_edges,
            H=width,
            BLOCK_E=tile.edges,
            BLOCK_H=tile.channels,
            SCALED=x.unscale is not None,
            SPLIT=SPLIT_OF_KIND[kind],
            num_warps=tile.warps,
        )
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        rows = plain_operand(x.flatten(1))
        return gate_forward(rows, x.shape[2], rows.kind).high.view(-1, NUM_COEFFICIENTS, x.shape[2])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return reference_gradient(reference.gate, (x,), grad)
        rows, grads = plain_operand(x.flatten(1)), plain_operand(grad.contiguous().flatten(1))
        return gate_backward(grads, rows, x.shape[2], rows.kind).high.view_as(x)


def gate(x: Tensor) -> Tensor:
    """Gate activation: SiLU on l = 0, sigmoid of the degree's gate times l = 1 and l = 2.

    Args:
        x: [E, 2 + 9, H]: gates of l = 1 and l = 2, then the m-major coefficients; float32 or float64 (half types are
            computed in float32).

    Returns:
        [E, 9, H], m-major. Second derivatives go through the reference.

    Raises:
        ValueError, TypeError: the shape or type does not fit.
    """
    check_shape("x", x, (None, NUM_GATES + NUM_COEFFICIENTS, None))
    x = x.float() if x.element_size() < 4 else x
    return _Gate.apply(x.contiguous()) if runs_kernels(x) else reference.gate(x)
