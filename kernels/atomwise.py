"""The spectral atom-wise MLP: a linear for each degree, a gate, a linear for each degree, as one kernel.

Formula (:func:`.reference.atomwise`), for the coefficients x_l of an atom; biases on l = 0 alone::

    p_l = x_0 G_l + c_l (l = 1, 2);    v_l = x_l W_l (+ b)
    h_0 = silu(v_0);    h_l = sigmoid(silu(p_l)) v_l;    y_l = h_l U_l (+ d)

SiLU is a gate too: h_0 = sigmoid(p_0) v_0 with G_0 = W_0 and p_0 = v_0. So all nine coefficients are one formula, and
each is worked on by a program of its own: a card is filled by a thousand atoms, and no program waits for another.

Products are three half products (:mod:`.operand`) in both half-precision kinds: the work on atoms is a hundredth of
that on edges and stays float32-grade. Rows are scaled and split in registers; weights are stored split. Backward, the
hidden values are computed again. What each coefficient's gate adds to the gradient of l = 0 is summed by a second,
small kernel in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import kernel
from ._device import load_l_major, power_of_two_scale, wait_for_previous
from ._launch import cdiv, edge_tile, next_power_of_2, runs_kernels
from .edge import reference_gradient
from .layout import LMAX, NUM_COEFFICIENTS, NUM_GATES
from .operand import KINDS, Operand, ieee_products, to_operand

_ROWS = 32
"""Atoms a program. A product reads its weights from the L2 cache whatever the rows: by estimate 16 rows wait for them
twice as long as they multiply, 32 about as long; at 64 the hidden values of the backward kernel leave the registers."""

_WARPS = 8
_REGISTERS = 128
"""Registers a thread, up to 128 channels: two programs of 8 warps then share an SM, and one multiplies while the other
waits. The backward kernel puts some 100 bytes a thread aside for it."""

_PART_ATOMS = 1 << 15
"""Atoms a launch of the backward kernel: bounds its scratch to 150 MB at 128 channels."""


@triton.jit
def _split(x):
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _degree_and_gate(coefficient):
    """Degree of an l-major coefficient, and the row of its gate's matrix among W_0, W_1, W_2, G_1, G_2."""
    degree = (coefficient > 0).to(tl.int32) + (coefficient > 3).to(tl.int32)
    return degree, tl.where(degree == 0, 0, degree + 2)


@triton.jit
def _rows_times(
    rows,
    m_m,
    matrix,
    high,
    low,
    unscale,
    K,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_K: tl.constexpr,
):
    """Rows in memory [BLOCK_M, K] times a stored matrix; `rows` points at their beginnings."""
    largest = tl.zeros([BLOCK_M, 1], dtype=tl.float32)
    for k in range(0, K, CHUNK_K):
        o_k = k + tl.arange(0, CHUNK_K)[None, :]
        part = tl.load(rows + o_k, mask=m_m & (o_k < K), other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1)[:, None])
    scale, inverse = power_of_two_scale(largest)
    columns = tl.arange(0, BLOCK_N)[None, :]
    m_n = columns < N
    w_offset = (matrix * N + columns) * K
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, K, CHUNK_K):
        depth = k + tl.arange(0, CHUNK_K)
        value = tl.load(rows + depth[None, :], mask=m_m & (depth[None, :] < K), other=0.0)
        w_mask = m_n & (depth[:, None] < K)
        wh = tl.load(high + w_offset + depth[:, None], mask=w_mask, other=0.0)
        wl = tl.load(low + w_offset + depth[:, None], mask=w_mask, other=0.0)
        xh, xl = _split(value * scale)
        sums = tl.dot(xh, wh, sums)
        sums = tl.dot(xl, wh, sums)
        sums = tl.dot(xh, wl, sums)
    return sums * inverse * tl.load(unscale + matrix * N + columns, mask=m_n, other=0.0)


@triton.jit
def _store_times(
    value,
    m_m,
    matrix,
    high,
    low,
    unscale,
    bias,
    out,
    K,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_N: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Store rows in registers [BLOCK_M, K] times a stored matrix; `out` points at the beginnings of the results."""
    scale, inverse = power_of_two_scale(tl.max(tl.abs(value), axis=1)[:, None])
    xh, xl = _split(value * scale)
    o_k = tl.arange(0, BLOCK_K)[:, None]
    for n in range(0, N, CHUNK_N):
        columns = n + tl.arange(0, CHUNK_N)[None, :]
        m_n = columns < N
        w_mask = m_n & (o_k < K)
        w_offset = (matrix * N + columns) * K + o_k
        wh = tl.load(high + w_offset, mask=w_mask, other=0.0)
        wl = tl.load(low + w_offset, mask=w_mask, other=0.0)
        sums = tl.zeros([BLOCK_M, CHUNK_N], dtype=tl.float32)
        sums = tl.dot(xh, wh, sums)
        sums = tl.dot(xl, wh, sums)
        sums = tl.dot(xh, wl, sums)
        sums *= inverse * tl.load(unscale + matrix * N + columns, mask=m_n, other=0.0)
        if BIAS:
            sums += tl.load(bias + matrix * N + columns, mask=m_n, other=0.0)
        tl.store(out + columns, sums, mask=m_m & m_n)


@kernel(do_not_specialize=["num_nodes"])
def _atomwise_kernel(
    x,
    in_high,
    in_low,
    in_unscale,
    in_bias,
    out_high,
    out_low,
    out_unscale,
    out_bias,
    out,
    num_nodes,
    C,
    H,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK_K: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """y = h U_l (+ d) for one coefficient of a tile of atoms, with h = s v and the gate s of its degree."""
    wait_for_previous()
    coefficient = tl.program_id(0) % 9
    degree, gate = _degree_and_gate(coefficient)
    nodes = (tl.program_id(0) // 9).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    m_m = nodes < num_nodes
    hidden = tl.arange(0, BLOCK_H)[None, :]
    m_h = hidden < H
    x0 = x + nodes * (9 * C)
    p = _rows_times(x0, m_m, gate, in_high, in_low, in_unscale, C, H, BLOCK_M, BLOCK_H, CHUNK_K)
    p += tl.load(in_bias + gate * H + hidden, mask=m_h, other=0.0)
    s = tl.sigmoid(tl.where(degree == 0, p, p * tl.sigmoid(p)))
    at = coefficient * C
    v = _rows_times(x0 + at, m_m, degree, in_high, in_low, in_unscale, C, H, BLOCK_M, BLOCK_H, CHUNK_K)
    v += tl.load(in_bias + degree * H + hidden, mask=m_h, other=0.0)
    o_at = out + nodes * (9 * C) + at
    _store_times(
        s * v, m_m, degree, out_high, out_low, out_unscale, out_bias, o_at, H, C, BLOCK_M, BLOCK_H, CHUNK_N, True
    )


@kernel(do_not_specialize=["num_nodes"])
def _atomwise_backward_kernel(
    grad,
    x,
    in_high,
    in_low,
    in_unscale,
    in_bias,
    back_out_high,
    back_out_low,
    back_out_unscale,
    back_in_high,
    back_in_low,
    back_in_unscale,
    grad_x,
    parts,
    num_nodes,
    C,
    H,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK_K: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """For one coefficient of a tile of atoms, with d h = grad U_l^T::

    d x = (d h s) W_l^T;  its part of d x_0 = (d h v s'(p)) G_l^T
    """
    wait_for_previous()
    coefficient = tl.program_id(0) % 9
    degree, gate = _degree_and_gate(coefficient)
    nodes = (tl.program_id(0) // 9).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    m_m = nodes < num_nodes
    hidden = tl.arange(0, BLOCK_H)[None, :]
    m_h = hidden < H
    x0 = x + nodes * (9 * C)
    at = nodes * (9 * C) + coefficient * C
    v = _rows_times(x + at, m_m, degree, in_high, in_low, in_unscale, C, H, BLOCK_M, BLOCK_H, CHUNK_K)
    v += tl.load(in_bias + degree * H + hidden, mask=m_h, other=0.0)
    dh = _rows_times(
        grad + at, m_m, degree, back_out_high, back_out_low, back_out_unscale, C, H, BLOCK_M, BLOCK_H, CHUNK_K
    )
    p = _rows_times(x0, m_m, gate, in_high, in_low, in_unscale, C, H, BLOCK_M, BLOCK_H, CHUNK_K)
    p += tl.load(in_bias + gate * H + hidden, mask=m_h, other=0.0)
    t = tl.sigmoid(p)
    s = tl.sigmoid(tl.where(degree == 0, p, p * t))
    slope = s * (1.0 - s) * tl.where(degree == 0, 1.0, t * (1.0 + p * (1.0 - t)))
    dp = dh * v * slope
    _store_times(
        dh * s,
        m_m,
        degree,
        back_in_high,
        back_in_low,
        back_in_unscale,
        None,
        grad_x + at,
        H,
        C,
        BLOCK_M,
        BLOCK_H,
        CHUNK_N,
        False,
    )
    _store_times(
        dp,
        m_m,
        gate,
        back_in_high,
        back_in_low,
        back_in_unscale,
        None,
        parts + at,
        H,
        C,
        BLOCK_M,
        BLOCK_H,
        CHUNK_N,
        False,
    )


@kernel(do_not_specialize=["num_nodes"])
def _sum_parts_kernel(parts, grad_x, num_nodes, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """d x_0 += the parts of all coefficients, in their order."""
    wait_for_previous()
    nodes = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    mask = (nodes < num_nodes) & (channels < C)
    at = nodes * (9 * C) + channels
    q0, q1, q2, q3, q4, q5, q6, q7, q8 = load_l_major(parts + at, C, mask)
    total = tl.load(grad_x + at, mask=mask, other=0.0) + q0 + q1 + q2 + q3 + q4 + q5 + q6 + q7 + q8
    tl.store(grad_x + at, total, mask=mask)


@dataclass(frozen=True)
class _Stored:
    """Weights for the kernels: transposed and split, matrices one below the other.

    Attributes:
        into: W_0, W_1, W_2, G_1, G_2, transposed [5 H, C], and their biases [5, H]; out_of: U_l, transposed [3 C, H],
            and their biases [3, C].
        back_out_of: U_l [3 H, C]; back_into: W_0, W_1, W_2, G_1, G_2 [5 C, H].
    """

    into: Operand
    into_bias: Tensor
    out_of: Operand
    out_of_bias: Tensor
    back_out_of: Operand
    back_into: Operand


@dataclass(frozen=True)
class AtomwiseWeights:
    """Frozen weights of an atom-wise MLP with C channels and H hidden channels.

    Attributes:
        kind: operand kind; "split" and "half" both stand for three half products.
        gates: [C, 2 H], columns of l = 1, then of l = 2; gates_bias: [2 H].
        first: [C, H] of each degree; first_bias: [H]. second: [H, C] of each degree; second_bias: [C].
        stored: the same for the kernels; None where the reference runs.
    """

    kind: str
    gates: Tensor
    gates_bias: Tensor
    first: tuple[Tensor, ...]
    first_bias: Tensor
    second: tuple[Tensor, ...]
    second_bias: Tensor
    stored: _Stored | None

    def plain(self, x: Tensor) -> Tensor:
        """The reference with these weights."""
        return reference.atomwise(
            x, self.gates, self.gates_bias, self.first, self.first_bias, self.second, self.second_bias
        )


def atomwise_weights(
    gates: Tensor,
    gates_bias: Tensor,
    first: tuple[Tensor, ...],
    first_bias: Tensor,
    second: tuple[Tensor, ...],
    second_bias: Tensor,
    kind: str,
) -> AtomwiseWeights:
    """Store the weights of an atom-wise MLP for products of the given kind; shapes as in :class:`AtomwiseWeights`.

    Raises:
        ValueError, TypeError: a shape, type, device or the kind does not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if len(first) != LMAX + 1 or len(second) != LMAX + 1:
        raise ValueError(f"first, second: expected {LMAX + 1} matrices each, got {len(first)} and {len(second)}")
    check_shape("first[0]", first[0], (None, None))
    channels, hidden = first[0].shape
    check_shape("gates", gates, (channels, NUM_GATES * hidden), first[0])
    check_shape("gates_bias", gates_bias, (NUM_GATES * hidden,), first[0])
    check_shape("first_bias", first_bias, (hidden,), first[0])
    check_shape("second_bias", second_bias, (channels,), first[0])
    for degree in range(LMAX + 1):
        check_shape(f"first[{degree}]", first[degree], (channels, hidden), first[0])
        check_shape(f"second[{degree}]", second[degree], (hidden, channels), first[0])

    dtype = torch.float64 if kind == "double" else torch.float32
    gates, gates_bias, first_bias, second_bias = (
        t.detach().to(dtype).contiguous() for t in (gates, gates_bias, first_bias, second_bias)
    )
    first, second = (tuple(w.detach().to(dtype).contiguous() for w in ws) for ws in (first, second))
    stored = None
    if kind in ("split", "half") and runs_kernels(gates):
        into = (*first, *gates.chunk(NUM_GATES, dim=1))
        zero_hidden, zero_channels = torch.zeros_like(first_bias), torch.zeros_like(second_bias)
        stored = _Stored(
            into=to_operand(torch.cat([w.T for w in into]), "split"),
            into_bias=torch.cat([first_bias, zero_hidden, zero_hidden, gates_bias]),
            out_of=to_operand(torch.cat([w.T for w in second]), "split"),
            out_of_bias=torch.cat([second_bias, zero_channels, zero_channels]),
            back_out_of=to_operand(torch.cat(second), "split"),
            back_into=to_operand(torch.cat(into), "split"),
        )
    return AtomwiseWeights(kind, gates, gates_bias, first, first_bias, second, second_bias, stored)


def _launch(channels: int, hidden: int) -> dict[str, int]:
    """Widths, tiles and options of both kernels.

    The widths are no constants: loops of known length would be unrolled, and their addresses would fill the registers.
    Shared memory holds two stages of both halves of a chunk of the weights, in the second products beside both halves
    of the rows: 88 kB at 128 channels, so that consumer GPUs have room.
    """
    block_c, block_h = (max(16, next_power_of_2(n)) for n in (channels, hidden))
    wide = block_h > 128
    return {
        "C": channels,
        "H": hidden,
        "BLOCK_M": _ROWS,
        "BLOCK_H": block_h,
        "CHUNK_K": min(16 if wide else 32, block_c),
        "CHUNK_N": min(16 if wide else 64, block_c),
        "num_warps": _WARPS,
        "num_stages": 3,
        "maxnreg": 255 if wide else _REGISTERS,
    }


def _forward(x: Tensor, w: _Stored) -> Tensor:
    num_nodes, _, width = x.shape
    out = torch.empty_like(x)
    if num_nodes:
        _atomwise_kernel[(cdiv(num_nodes, _ROWS) * NUM_COEFFICIENTS,)](
            x,
            w.into.high,
            w.into.low,
            w.into.unscale,
            w.into_bias,
            w.out_of.high,
            w.out_of.low,
            w.out_of.unscale,
            w.out_of_bias,
            out,
            num_nodes,
            **_launch(width, w.out_of.high.shape[1]),
        )
    return out


def _backward(grad: Tensor, x: Tensor, w: _Stored) -> Tensor:
    width = x.shape[2]
    grad_x = torch.empty_like(x)
    parts = x.new_empty(min(x.shape[0], _PART_ATOMS), NUM_COEFFICIENTS, width)
    tile = edge_tile(width, x.element_size())
    for first in range(0, x.shape[0], _PART_ATOMS):
        rows = slice(first, first + _PART_ATOMS)
        num_nodes = grad_x[rows].shape[0]
        _atomwise_backward_kernel[(cdiv(num_nodes, _ROWS) * NUM_COEFFICIENTS,)](
            grad[rows],
            x[rows],
            w.into.high,
            w.into.low,
            w.into.unscale,
            w.into_bias,
            w.back_out_of.high,
            w.back_out_of.low,
            w.back_out_of.unscale,
            w.back_into.high,
            w.back_into.low,
            w.back_into.unscale,
            grad_x[rows],
            parts,
            num_nodes,
            **_launch(width, w.back_into.high.shape[1]),
        )
        _sum_parts_kernel[(cdiv(num_nodes, tile.edges),)](
            parts,
            grad_x[rows],
            num_nodes,
            C=width,
            BLOCK_N=tile.edges,
            BLOCK_C=tile.channels,
            num_warps=tile.warps,
        )
    return grad_x


class _Atomwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(x)
        ctx.weights = weights
        return _forward(x, weights.stored)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*reference_gradient(ctx.weights.plain, (x,), grad), None)
        return _backward(grad.contiguous(), x, ctx.weights.stored), None


def atomwise(x: Tensor, weights: AtomwiseWeights) -> Tensor:
    """Apply an atom-wise MLP to node features; differentiable in x.

    Args:
        x: [N, 9, C], l-major, any floating-point type.
        weights: from :func:`atomwise_weights`.

    Returns:
        [N, 9, C], float64 for weights of kind "double", else float32. An atom's numbers do not depend on the other
        atoms, nor on how many there are ("split" and "half"). Second derivatives go through the reference, and so does
        everything in the kinds "single" and "double"; its gradients obey torch's TF32 switches.

    Raises:
        ValueError, TypeError: the shape, type or device does not fit.
    """
    check_shape("x", x, (None, NUM_COEFFICIENTS, weights.gates.shape[0]))
    if x.device != weights.gates.device:
        raise ValueError(f"x: expected device {weights.gates.device}, got {x.device}")
    x = x.to(weights.gates.dtype)
    if weights.stored is None:
        with ieee_products():
            return weights.plain(x)
    return _Atomwise.apply(x.contiguous(), weights)
