"""Second derivatives of the edge operations: tangents along many displacements at once, with primal values shared.

Of an operation whose outputs o have the adjoints g (the energy's derivatives with respect to them), the Hessian of the
energy has its part of S = sum of g o, g fixed, with respect to what the operation reads: features x and edge vectors v.
For directions k, along which x moves by dx[k] and v by dv[k], the kernels here give

    the tangent of o along each k, which the next operation reads,
    cross[k, e] = d/dx (dS/dv) dx[k]    [K, E, 3]
    curvature[e] = d^2 S / dv^2         [E, 3, 3]

With y the rotated features and J the so(3) generators, an edge vector that moves by (x, h, z) in the edge's own frame
(h along it) turns the features by ``w J y``, w = (-z, 0, x) / d, and again to second order: with
``w = (-z, 0, x) / d (1 - h / d)`` the rotation is exp(w J). For S = sum of a(d) exp(w J) y, y at rest::

    tau_i = a J_i y,   tau'_i = a' J_i y,   q_ij = -((J_i a) (J_j y) + (J_j a) (J_i y)) / 2
    S_hh = a'' y,   S_xx = a' y / d + q_zz / d^2,   S_zz = a' y / d + q_xx / d^2,   S_xz = -q_xz / d^2
    S_xh = (tau'_z - tau_z / d) / d,   S_zh = -(tau'_x - tau_x / d) / d

Nothing of size 9 x 9 appears, and neither does a second derivative of a rotation matrix. Directions that share an edge
are worked on side by side, so that what they share comes from the first-level cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._compile import kernel
from ._device import (
    frame,
    load_l_major,
    load_m_major,
    load_vectors,
    max_abs,
    power_of_two_scale,
    rotate,
    rotate_back,
    row_sum,
    sqrt3,
    store_m_major,
    store_sums,
    store_vector_gradient,
    torque,
    wait_for_previous,
)
from ._launch import cdiv, edge_tile
from .edge import EdgeList
from .layout import M_BLOCKS, NUM_COEFFICIENTS
from .operand import SPLIT_OF_KIND, Operand, empty_operand


class Radials(NamedTuple):
    """Functions of each edge's length: value, slope (1/A) and curvature (1/A^2), all of one shape."""

    value: Tensor
    slope: Tensor
    curvature: Tensor


# ----------------------------------------------------------------------------------------------------- device functions


@triton.jit
def _turn_x(y1, y2, y3, y4, y5, y6, y7, y8):
    """J_x y, coefficients 1 to 8."""
    root = sqrt3(y1)
    return tl.zeros_like(y1), -y3, y2, y5, -y4, -root * y7, root * y6 - y8, y7


@triton.jit
def _turn_z(y1, y2, y3, y4, y5, y6, y7, y8):
    """J_z y, coefficients 1 to 8."""
    root = sqrt3(y1)
    return -y2, y1, tl.zeros_like(y1), -y7, -y8 - root * y6, root * y5, y4, y5


@triton.jit
def _turned(y1, y2, y3, y4, y5, y6, y7, y8, wx, wz):
    """w J y, coefficients 1 to 8."""
    a1, a2, a3, a4, a5, a6, a7, a8 = _turn_x(y1, y2, y3, y4, y5, y6, y7, y8)
    b1, b2, b3, b4, b5, b6, b7, b8 = _turn_z(y1, y2, y3, y4, y5, y6, y7, y8)
    return (
        wx * a1 + wz * b1,
        wx * a2 + wz * b2,
        wx * a3 + wz * b3,
        wx * a4 + wz * b4,
        wx * a5 + wz * b5,
        wx * a6 + wz * b6,
        wx * a7 + wz * b7,
        wx * a8 + wz * b8,
    )


@triton.jit
def _load_displacement(dv, rows, mask, c, s, a, b, ux, uy, uz, length):
    """The turn (w_x, w_z) and the stretch of edges that move by dv, and whether any of the tile moves."""
    px = tl.load(dv + rows * 3, mask=mask, other=0.0)
    py = tl.load(dv + rows * 3 + 1, mask=mask, other=0.0)
    pz = tl.load(dv + rows * 3 + 2, mask=mask, other=0.0)
    wx = (a * py - s * b * px - c * b * pz) / length
    wz = (c * px - s * pz) / length
    moved = tl.max(tl.max(tl.abs(px) + tl.abs(py) + tl.abs(pz), axis=1), axis=0) > 0.0
    return wx, wz, ux * px + uy * py + uz * pz, moved


@triton.jit
def _products(x0, x1, x2, x3, x4, x5, x6, x7, x8, y0, y1, y2, y3, y4, y5, y6, y7, y8):
    """Sum over coefficients of x y."""
    return x0 * y0 + x1 * y1 + x2 * y2 + x3 * y3 + x4 * y4 + x5 * y5 + x6 * y6 + x7 * y7 + x8 * y8


@triton.jit
def _quadratic(a1, a2, a3, a4, a5, a6, a7, a8, y1, y2, y3, y4, y5, y6, y7, y8):
    """q_xx, q_xz, q_zz of each channel."""
    ax1, ax2, ax3, ax4, ax5, ax6, ax7, ax8 = _turn_x(a1, a2, a3, a4, a5, a6, a7, a8)
    yx1, yx2, yx3, yx4, yx5, yx6, yx7, yx8 = _turn_x(y1, y2, y3, y4, y5, y6, y7, y8)
    az1, az2, az3, az4, az5, az6, az7, az8 = _turn_z(a1, a2, a3, a4, a5, a6, a7, a8)
    yz1, yz2, yz3, yz4, yz5, yz6, yz7, yz8 = _turn_z(y1, y2, y3, y4, y5, y6, y7, y8)
    zero = tl.zeros_like(a1)
    xx = _products(zero, ax1, ax2, ax3, ax4, ax5, ax6, ax7, ax8, zero, yx1, yx2, yx3, yx4, yx5, yx6, yx7, yx8)
    zz = _products(zero, az1, az2, az3, az4, az5, az6, az7, az8, zero, yz1, yz2, yz3, yz4, yz5, yz6, yz7, yz8)
    xz = _products(zero, ax1, ax2, ax3, ax4, ax5, ax6, ax7, ax8, zero, yz1, yz2, yz3, yz4, yz5, yz6, yz7, yz8)
    zx = _products(zero, az1, az2, az3, az4, az5, az6, az7, az8, zero, yx1, yx2, yx3, yx4, yx5, yx6, yx7, yx8)
    return -xx, -0.5 * (xz + zx), -zz


@triton.jit
def _store_curvature(
    out, edges, mask, first, second, tx, tz, dtx, dtz, qxx, qxz, qzz, c, s, a, b, ux, uy, uz, length, ADD: tl.constexpr
):
    """Turn the second derivatives in the edge's frame into Cartesian ones; `first` is a' y and `second` a'' y."""
    inverse = 1.0 / length
    hh = second
    xx = (first + qzz * inverse) * inverse
    zz = (first + qxx * inverse) * inverse
    xz = -qxz * inverse * inverse
    xh = (dtz - tz * inverse) * inverse
    zh = (tx * inverse - dtx) * inverse
    # Rows of the frame: x' = (c, 0, -s), along the edge (ux, uy, uz), z' = (s b, -a, c b).
    zx, zy, zw = s * b, -a, c * b
    x0, x1, x2 = xx * c + xh * ux + xz * zx, xh * uy + xz * zy, xh * uz + xz * zw - xx * s
    h0, h1, h2 = xh * c + hh * ux + zh * zx, hh * uy + zh * zy, hh * uz + zh * zw - xh * s
    z0, z1, z2 = xz * c + zh * ux + zz * zx, zh * uy + zz * zy, zh * uz + zz * zw - xz * s
    at = out + edges * 9
    _store_or_add(at, mask, c * x0 + ux * h0 + zx * z0, ADD)
    _store_or_add(at + 1, mask, c * x1 + ux * h1 + zx * z1, ADD)
    _store_or_add(at + 2, mask, c * x2 + ux * h2 + zx * z2, ADD)
    _store_or_add(at + 3, mask, uy * h0 + zy * z0, ADD)
    _store_or_add(at + 4, mask, uy * h1 + zy * z1, ADD)
    _store_or_add(at + 5, mask, uy * h2 + zy * z2, ADD)
    _store_or_add(at + 6, mask, uz * h0 + zw * z0 - s * x0, ADD)
    _store_or_add(at + 7, mask, uz * h1 + zw * z1 - s * x1, ADD)
    _store_or_add(at + 8, mask, uz * h2 + zw * z2 - s * x2, ADD)


@triton.jit
def _store_or_add(ptr, mask, x, ADD: tl.constexpr):
    if ADD:
        x += tl.load(ptr, mask=mask, other=0.0)
    tl.store(ptr, x, mask=mask)


@triton.jit
def _load_radial(at, stride, mask):
    """Six radial weights."""
    return (
        tl.load(at, mask=mask, other=0.0),
        tl.load(at + stride, mask=mask, other=0.0),
        tl.load(at + 2 * stride, mask=mask, other=0.0),
        tl.load(at + 3 * stride, mask=mask, other=0.0),
        tl.load(at + 4 * stride, mask=mask, other=0.0),
        tl.load(at + 5 * stride, mask=mask, other=0.0),
    )


@triton.jit
def _scaled(r0, r1, r2, r3, r4, r5, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    """Radial weights times l-major coefficients."""
    return r0 * x0, r3 * x1, r1 * x2, r3 * x3, r5 * x4, r4 * x5, r2 * x6, r4 * x7, r5 * x8


# --------------------------------------------------------------------------------------------- gather, rotate, scale


@triton.jit
def _end_tangent(dx, dx_stride, x, x_stride, radial, slope, grad, stride, mask, c, s, a, b, wx, wz, stretch, moved):
    """One end of a tile: the tangent of its nine outputs, and of each channel a' y, tau_x, tau_z with y = D dx."""
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load_l_major(dx, dx_stride, mask)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = rotate(y0, y1, y2, y3, y4, y5, y6, y7, y8, c, s, a, b)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load_m_major(grad, stride, mask, 1.0)
    r0, r1, r2, r3, r4, r5 = _load_radial(slope, stride, mask)
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = _scaled(r0, r1, r2, r3, r4, r5, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    along = _products(h0, h1, h2, h3, h4, h5, h6, h7, h8, y0, y1, y2, y3, y4, y5, y6, y7, y8)
    r0, r1, r2, r3, r4, r5 = _load_radial(radial, stride, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = _scaled(r0, r1, r2, r3, r4, r5, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    tx, tz = torque(g1, g2, g3, g4, g5, g6, g7, g8, y1, y2, y3, y4, y5, y6, y7, y8)
    if moved:
        h0, h1, h2, h3, h4, h5, h6, h7, h8 = load_l_major(x, x_stride, mask)
        h0, h1, h2, h3, h4, h5, h6, h7, h8 = rotate(h0, h1, h2, h3, h4, h5, h6, h7, h8, c, s, a, b)
        g1, g2, g3, g4, g5, g6, g7, g8 = _turned(h1, h2, h3, h4, h5, h6, h7, h8, wx, wz)
        y1, y2, y3, y4, y5, y6, y7, y8 = y1 + g1, y2 + g2, y3 + g3, y4 + g4, y5 + g5, y6 + g6, y7 + g7, y8 + g8
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = _scaled(r0, r1, r2, r3, r4, r5, y0, y1, y2, y3, y4, y5, y6, y7, y8)
    if moved:
        h0, h1, h2, h3, h4, h5, h6, h7, h8 = load_l_major(x, x_stride, mask)
        h0, h1, h2, h3, h4, h5, h6, h7, h8 = rotate(h0, h1, h2, h3, h4, h5, h6, h7, h8, c, s, a, b)
        r0, r1, r2, r3, r4, r5 = _load_radial(slope, stride, mask)
        h0, h1, h2, h3, h4, h5, h6, h7, h8 = _scaled(r0, r1, r2, r3, r4, r5, h0, h1, h2, h3, h4, h5, h6, h7, h8)
        y0, y1, y2, y3, y4 = (
            y0 + stretch * h0,
            y1 + stretch * h1,
            y2 + stretch * h2,
            y3 + stretch * h3,
            y4 + stretch * h4,
        )
        y5, y6, y7, y8 = y5 + stretch * h5, y6 + stretch * h6, y7 + stretch * h7, y8 + stretch * h8
    return y0, y1, y2, y3, y4, y5, y6, y7, y8, along, tx, tz


@kernel(
    do_not_specialize=["num_directions", "num_edges", "num_nodes"],
    do_not_specialize_on_alignment=["vectors", "dv", "source", "target", "unscale", "cross"],
)
def _gather_tangent_kernel(
    dx,
    x,
    vectors,
    dv,
    radial,
    radial_slope,
    grad,
    source,
    target,
    high,
    low,
    unscale,
    cross,
    num_directions,
    num_edges,
    num_nodes,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The tangent of y = r D (x[source], x[target]) along a tile of directions, for one edge::

    r D dx + r w J D x + r' (stretch) D x;   cross = the gradient of S with respect to v, with dx in place of x
    """
    wait_for_previous()
    i_edge = tl.program_id(0).to(tl.int64)
    directions = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_k = directions < num_directions
    mask = m_k & (channels < C)
    edges = i_edge + 0 * directions  # what directions share is loaded as whole tiles, in the layout of the tangents
    rows = directions * num_edges + i_edge
    ux, uy, uz, length = load_vectors(vectors, edges, m_k)
    c, s, a, b = frame(ux, uy, uz)
    wx, wz, stretch, moved = _load_displacement(dv, rows, m_k, c, s, a, b, ux, uy, uz, length)
    dx_stride = num_nodes.to(tl.int64) * C
    r_at = edges * (6 * 2 * C) + channels
    g_at = grad + edges * (9 * 2 * C) + channels
    dx_at = dx + directions * (9 * dx_stride) + channels

    node = tl.load(source + i_edge).to(tl.int64)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, along, tx, tz = _end_tangent(
        dx_at + node * C,
        dx_stride,
        x + node * (9 * C) + channels + 0 * directions,
        C,
        radial + r_at,
        radial_slope + r_at,
        g_at,
        2 * C,
        mask,
        c,
        s,
        a,
        b,
        wx,
        wz,
        stretch,
        moved,
    )
    node = tl.load(target + i_edge).to(tl.int64)
    y0, y1, y2, y3, y4, y5, y6, y7, y8, along_t, tx_t, tz_t = _end_tangent(
        dx_at + node * C,
        dx_stride,
        x + node * (9 * C) + channels + 0 * directions,
        C,
        radial + r_at + C,
        radial_slope + r_at + C,
        g_at + C,
        2 * C,
        mask,
        c,
        s,
        a,
        b,
        wx,
        wz,
        stretch,
        moved,
    )
    tx, tz, along = row_sum(tx + tx_t), row_sum(tz + tz_t), row_sum(along + along_t)
    store_vector_gradient(cross, rows, m_k, tx, tz, along, c, s, a, b, ux, uy, uz, length)
    scale = 1.0
    if SPLIT > 0:
        largest = tl.maximum(max_abs(x0, x1, x2, x3, x4, x5, x6, x7, x8), max_abs(y0, y1, y2, y3, y4, y5, y6, y7, y8))
        scale, inverse = power_of_two_scale(largest)
        tl.store(unscale + rows, inverse, mask=m_k)
    o_at = rows * (9 * 2 * C) + channels
    store_m_major(high, low, o_at, 2 * C, mask, scale, x0, x1, x2, x3, x4, x5, x6, x7, x8, SPLIT)
    store_m_major(high, low, o_at + C, 2 * C, mask, scale, y0, y1, y2, y3, y4, y5, y6, y7, y8, SPLIT)


@triton.jit
def _end_curvature(x, radial, slope, curvature, grad, C: tl.constexpr, mask, c, s, a, b):
    """One end of a tile: a' y, a'' y, tau, tau' and q of each channel."""
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load_l_major(x, C, mask)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = rotate(y0, y1, y2, y3, y4, y5, y6, y7, y8, c, s, a, b)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load_m_major(grad, 2 * C, mask, 1.0)
    r0, r1, r2, r3, r4, r5 = _load_radial(curvature, 2 * C, mask)
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = _scaled(r0, r1, r2, r3, r4, r5, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    second = _products(h0, h1, h2, h3, h4, h5, h6, h7, h8, y0, y1, y2, y3, y4, y5, y6, y7, y8)
    r0, r1, r2, r3, r4, r5 = _load_radial(slope, 2 * C, mask)
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = _scaled(r0, r1, r2, r3, r4, r5, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    first = _products(h0, h1, h2, h3, h4, h5, h6, h7, h8, y0, y1, y2, y3, y4, y5, y6, y7, y8)
    dtx, dtz = torque(h1, h2, h3, h4, h5, h6, h7, h8, y1, y2, y3, y4, y5, y6, y7, y8)
    r0, r1, r2, r3, r4, r5 = _load_radial(radial, 2 * C, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = _scaled(r0, r1, r2, r3, r4, r5, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    tx, tz = torque(g1, g2, g3, g4, g5, g6, g7, g8, y1, y2, y3, y4, y5, y6, y7, y8)
    qxx, qxz, qzz = _quadratic(g1, g2, g3, g4, g5, g6, g7, g8, y1, y2, y3, y4, y5, y6, y7, y8)
    return first, second, tx, tz, dtx, dtz, qxx, qxz, qzz


@kernel(
    do_not_specialize=["num_edges"],
    do_not_specialize_on_alignment=["vectors", "source", "target", "out"],
)
def _gather_curvature_kernel(
    x,
    vectors,
    radial,
    radial_slope,
    radial_curvature,
    grad,
    source,
    target,
    out,
    num_edges,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """d^2 S / dv^2 of a tile of edges, with a = r g and y = D x of both ends."""
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < C)
    ux, uy, uz, length = load_vectors(vectors, edges, m_e)
    c, s, a, b = frame(ux, uy, uz)
    r_at = edges * (6 * 2 * C) + channels
    g_at = grad + edges * (9 * 2 * C) + channels
    node = tl.load(source + edges, mask=m_e, other=0).to(tl.int64)
    x_at = x + node * (9 * C) + channels
    first, second, tx, tz, dtx, dtz, qxx, qxz, qzz = _end_curvature(
        x_at, radial + r_at, radial_slope + r_at, radial_curvature + r_at, g_at, C, mask, c, s, a, b
    )
    r_at += C
    node = tl.load(target + edges, mask=m_e, other=0).to(tl.int64)
    x_at = x + node * (9 * C) + channels
    p0, p1, p2, p3, p4, p5, p6, p7, p8 = _end_curvature(
        x_at, radial + r_at, radial_slope + r_at, radial_curvature + r_at, g_at + C, C, mask, c, s, a, b
    )
    _store_curvature(
        out,
        edges,
        m_e,
        row_sum(first + p0),
        row_sum(second + p1),
        row_sum(tx + p2),
        row_sum(tz + p3),
        row_sum(dtx + p4),
        row_sum(dtz + p5),
        row_sum(qxx + p6),
        row_sum(qxz + p7),
        row_sum(qzz + p8),
        c,
        s,
        a,
        b,
        ux,
        uy,
        uz,
        length,
        False,
    )


def gather_rotate_scale_tangent(
    dx: Tensor,
    x: Tensor,
    vectors: Tensor,
    dv: Tensor,
    radial: Tensor,
    radial_slope: Tensor,
    grad: Tensor,
    edges: EdgeList,
    kind: str,
) -> tuple[Operand, Tensor]:
    """Tangents of :func:`.edge.gather_rotate_scale`, whose radial weights are functions of the length.

    Args:
        dx: tangents of the node features [K, 9, N, C]; x: the features [N, 9, C], l-major.
        vectors: edge vectors [E, 3] in A; dv: their tangents [K, E, 3].
        radial: radial weights [E, 6 * 2C]; radial_slope: their derivatives with respect to the length (1/A).
        grad: adjoint of the output [E, 9 * 2C].
        edges: indices; only source and target are read.
        kind: storage of the tangents.

    Returns:
        Tangents of the output [K * E, 9 * 2C], and cross [K, E, 3].
    """
    (num_directions, _, num_nodes, width), num_edges = dx.shape, vectors.shape[0]
    out = empty_operand(num_directions * num_edges, NUM_COEFFICIENTS * 2 * width, kind, x.device)
    cross = torch.empty_like(dv)
    if num_directions * num_edges:
        # Two directions a program: both ends' coefficients and what goes into them are 168 numbers a thread.
        tile = edge_tile(width, x.element_size(), edges=2)
        _gather_tangent_kernel[(num_edges, cdiv(num_directions, tile.edges))](
            dx,
            x,
            vectors,
            dv,
            radial,
            radial_slope,
            grad,
            edges.source,
            edges.target,
            out.high,
            out.low,
            out.unscale,
            cross,
            num_directions,
            num_edges,
            num_nodes,
            C=width,
            BLOCK_K=tile.edges,
            BLOCK_C=tile.channels,
            SPLIT=SPLIT_OF_KIND[kind],
            num_warps=tile.warps,
        )
    return out, cross


def gather_rotate_scale_curvature(x: Tensor, vectors: Tensor, radial: Radials, grad: Tensor, edges: EdgeList) -> Tensor:
    """Second derivatives [E, 3, 3] with respect to the edge vectors; arguments of `gather_rotate_scale_tangent`."""
    num_edges, width = vectors.shape[0], x.shape[2]
    out = vectors.new_empty(num_edges, 3, 3)
    if num_edges:
        tile = edge_tile(width, x.element_size(), edges=1, warps=2)
        _gather_curvature_kernel[(cdiv(num_edges, tile.edges),)](
            x,
            vectors,
            *radial,
            grad,
            edges.source,
            edges.target,
            out,
            num_edges,
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            num_warps=tile.warps,
        )
    return out


# ------------------------------------------------------------------------------------------------- rotate back, sum


@triton.jit
def _load_messages(z, edges, channels, mask, C: tl.constexpr, M0: tl.constexpr):
    """A tile of messages in l-major order, from [E, 9, C] m-major or, with M0, from [E, 3, C]."""
    if M0:
        at = z + edges * (3 * C) + channels
        z0 = tl.load(at, mask=mask, other=0.0)
        zero = tl.zeros_like(z0)
        z2 = tl.load(at + C, mask=mask, other=0.0)
        z6 = tl.load(at + 2 * C, mask=mask, other=0.0)
        return z0, zero, z2, zero, zero, zero, z6, zero, zero
    else:  # noqa: RET505 - without it Triton compiles this branch too
        return load_m_major(z + edges * (9 * C) + channels, C, mask, 1.0)


@kernel(
    do_not_specialize=["first_target", "num_edges", "num_nodes"],
    do_not_specialize_on_alignment=["vectors", "dv", "weight", "weight_slope", "target_start", "cross"],
)
def _rotate_back_sum_tangent_kernel(
    dz,
    z,
    z_slope,
    vectors,
    dv,
    weight,
    weight_slope,
    grad,
    target_start,
    out,
    cross,
    first_target,
    num_edges,
    num_nodes,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    M0: tl.constexpr,
):
    """The tangent of o = sum of w D^T z for one atom along one direction, edges in their order::

    sum of D^T (w dz + w' (stretch) z - w (w J) z);   cross: the gradient of S with respect to v, with dz in place of z

    With M0 z is a function of the length, and dz its slope times the stretch; there is no cross then.
    """
    wait_for_previous()
    i_segment = tl.program_id(0)
    i_node = (first_target + i_segment).to(tl.int64)
    i_direction = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, BLOCK_C)[None, :]
    first = tl.load(target_start + i_segment).to(tl.int64)
    last = tl.load(target_start + i_segment + 1).to(tl.int64)
    zero = tl.zeros([BLOCK_E, BLOCK_C], dtype=out.dtype.element_ty)
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(first, last, BLOCK_E):
        edges = k + tl.arange(0, BLOCK_E)[:, None]
        m_e = edges < last
        mask = m_e & (channels < C)
        rows = i_direction * num_edges + edges
        ux, uy, uz, length = load_vectors(vectors, edges, m_e)
        c, s, a, b = frame(ux, uy, uz)
        w = tl.load(weight + edges, mask=m_e, other=0.0)
        slope = tl.load(weight_slope + edges, mask=m_e, other=0.0)
        wx, wz, stretch, moved = _load_displacement(dv, rows, m_e, c, s, a, b, ux, uy, uz, length)
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
        if not M0:
            z0, z1, z2, z3, z4, z5, z6, z7, z8 = load_m_major(dz + rows * (9 * C) + channels, C, mask, 1.0)
            g_at = grad + i_node * (9 * C) + channels + 0 * edges
            g0, g1, g2, g3, g4, g5, g6, g7, g8 = load_l_major(g_at, C, mask)
            g0, g1, g2, g3, g4, g5, g6, g7, g8 = rotate(g0, g1, g2, g3, g4, g5, g6, g7, g8, c, s, a, b)
            along = _products(g0, g1, g2, g3, g4, g5, g6, g7, g8, z0, z1, z2, z3, z4, z5, z6, z7, z8)
            tx, tz = torque(z1, z2, z3, z4, z5, z6, z7, z8, g1, g2, g3, g4, g5, g6, g7, g8)
            tx, tz, along = row_sum(tx) * w, row_sum(tz) * w, row_sum(along) * slope
            store_vector_gradient(cross, rows, m_e, tx, tz, along, c, s, a, b, ux, uy, uz, length)
            z0, z1, z2, z3, z4, z5, z6, z7, z8 = w * z0, w * z1, w * z2, w * z3, w * z4, w * z5, w * z6, w * z7, w * z8
        if moved:
            y0, y1, y2, y3, y4, y5, y6, y7, y8 = _load_messages(z, edges, channels, mask, C, M0)
            p1, p2, p3, p4, p5, p6, p7, p8 = _turned(y1, y2, y3, y4, y5, y6, y7, y8, w * wx, w * wz)
            change = slope * stretch
            z0, z1, z2, z3 = z0 + change * y0, z1 + change * y1 - p1, z2 + change * y2 - p2, z3 + change * y3 - p3
            z4, z5, z6 = z4 + change * y4 - p4, z5 + change * y5 - p5, z6 + change * y6 - p6
            z7, z8 = z7 + change * y7 - p7, z8 + change * y8 - p8
            if M0:
                y0, y1, y2, y3, y4, y5, y6, y7, y8 = _load_messages(z_slope, edges, channels, mask, C, M0)
                change = w * stretch
                z0, z2, z6 = z0 + change * y0, z2 + change * y2, z6 + change * y6
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = rotate_back(z0, z1, z2, z3, z4, z5, z6, z7, z8, c, s, a, b)
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = (
            a0 + z0,
            a1 + z1,
            a2 + z2,
            a3 + z3,
            a4 + z4,
            a5 + z5,
            a6 + z6,
            a7 + z7,
            a8 + z8,
        )
    stride = num_nodes.to(tl.int64) * C
    at = out + i_direction * (9 * stride) + i_node * C + tl.arange(0, BLOCK_C)
    store_sums(at, stride, tl.arange(0, BLOCK_C) < C, a0, a1, a2, a3, a4, a5, a6, a7, a8, False)


@kernel(
    do_not_specialize=["num_edges"],
    do_not_specialize_on_alignment=["vectors", "weight", "weight_slope", "weight_curvature", "target", "out"],
)
def _rotate_back_sum_curvature_kernel(
    z,
    z_slope,
    z_curvature,
    vectors,
    weight,
    weight_slope,
    weight_curvature,
    grad,
    target,
    out,
    num_edges,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    M0: tl.constexpr,
    ADD: tl.constexpr,
):
    """d^2 S / dv^2 of a tile of edges, with a = w z (of which z moves with the length for M0 alone) and y = D grad."""
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < C)
    ux, uy, uz, length = load_vectors(vectors, edges, m_e)
    c, s, a, b = frame(ux, uy, uz)
    w0 = tl.load(weight + edges, mask=m_e, other=0.0)
    w1 = tl.load(weight_slope + edges, mask=m_e, other=0.0)
    w2 = tl.load(weight_curvature + edges, mask=m_e, other=0.0)
    node = tl.load(target + edges, mask=m_e, other=0).to(tl.int64)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load_l_major(grad + node * (9 * C) + channels, C, mask)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = rotate(y0, y1, y2, y3, y4, y5, y6, y7, y8, c, s, a, b)
    z0, z1, z2, z3, z4, z5, z6, z7, z8 = _load_messages(z, edges, channels, mask, C, M0)
    product = row_sum(_products(z0, z1, z2, z3, z4, z5, z6, z7, z8, y0, y1, y2, y3, y4, y5, y6, y7, y8))
    tx, tz = torque(z1, z2, z3, z4, z5, z6, z7, z8, y1, y2, y3, y4, y5, y6, y7, y8)
    tx, tz = row_sum(tx), row_sum(tz)
    qxx, qxz, qzz = _quadratic(z1, z2, z3, z4, z5, z6, z7, z8, y1, y2, y3, y4, y5, y6, y7, y8)
    qxx, qxz, qzz = w0 * row_sum(qxx), w0 * row_sum(qxz), w0 * row_sum(qzz)
    first, second = w1 * product, w2 * product
    dtx, dtz = w1 * tx, w1 * tz
    if M0:
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = _load_messages(z_slope, edges, channels, mask, C, M0)
        product = row_sum(z0 * y0 + z2 * y2 + z6 * y6)
        first += w0 * product
        second += 2.0 * w1 * product
        px, pz = torque(z1, z2, z3, z4, z5, z6, z7, z8, y1, y2, y3, y4, y5, y6, y7, y8)
        dtx += w0 * row_sum(px)
        dtz += w0 * row_sum(pz)
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = _load_messages(z_curvature, edges, channels, mask, C, M0)
        second += w0 * row_sum(z0 * y0 + z2 * y2 + z6 * y6)
    _store_curvature(
        out, edges, m_e, first, second, w0 * tx, w0 * tz, dtx, dtz, qxx, qxz, qzz, c, s, a, b, ux, uy, uz, length, ADD
    )


def rotate_back_sum_tangent(
    dz: Tensor | None,
    z: Tensor | Radials,
    vectors: Tensor,
    dv: Tensor,
    weight: Radials,
    grad: Tensor,
    edges: EdgeList,
    out: Tensor,
) -> Tensor | None:
    """Tangents of :func:`.edge.rotate_back_sum`, whose weights are functions of the length.

    Args:
        dz: tangents of the messages [K * E, 9 * C], m-major; z: the messages [E, 9 * C]. Or None, and messages
            [E, 3 * C] that are functions of the length, with their derivatives.
        vectors: edge vectors [E, 3] in A; dv: their tangents [K, E, 3].
        weight: weights [E] and their derivatives.
        grad: adjoint of the sums of all atoms [N, 9, C], l-major.
        edges: the edges into a range of atoms; those by source are not read.
        out: OUTPUT [K, 9, N, C], the sums' tangents; those of the range are written.

    Returns:
        cross [K, E, 3]; None without dz.
    """
    num_directions, _, num_nodes, width = out.shape
    num_targets, cross = edges.target_start.shape[0] - 1, None if dz is None else torch.empty_like(dv)
    if num_directions * num_targets:
        tile = edge_tile(width, out.element_size(), edges=2)
        _rotate_back_sum_tangent_kernel[(num_targets, num_directions)](
            dz,
            z.value if isinstance(z, Radials) else z,
            z.slope if isinstance(z, Radials) else None,
            vectors,
            dv,
            weight.value,
            weight.slope,
            grad,
            edges.target_start,
            out,
            cross,
            edges.first_target,
            vectors.shape[0],
            num_nodes,
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            M0=isinstance(z, Radials),
            num_warps=tile.warps,
        )
    return cross


def rotate_back_sum_curvature(
    z: Tensor | Radials, vectors: Tensor, weight: Radials, grad: Tensor, edges: EdgeList, out: Tensor | None = None
) -> Tensor:
    """Second derivatives [E, 3, 3] with respect to the edge vectors; arguments of `rotate_back_sum_tangent`.

    With ``out`` they are added to it, and it is returned.
    """
    num_edges, width, add = vectors.shape[0], grad.shape[2], out is not None
    out = vectors.new_empty(num_edges, 3, 3) if out is None else out
    m0 = isinstance(z, Radials)
    if m0:
        assert z.value.shape[1] == M_BLOCKS[0] * width
    if num_edges:
        tile = edge_tile(width, out.element_size())
        _rotate_back_sum_curvature_kernel[(cdiv(num_edges, tile.edges),)](
            *(z if isinstance(z, Radials) else (z, None, None)),
            vectors,
            *weight,
            grad,
            edges.target,
            out,
            num_edges,
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            M0=m0,
            ADD=add,
            num_warps=tile.warps,
        )
    return out
