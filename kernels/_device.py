"""Device functions that several kernels share: frames, rotations of nine coefficients, torques, split storage.

Features travel as nine values ``x0 ... x8`` in l-major order, whatever the layout in memory. The frame of an edge is
the pair of plane rotations of :func:`.reference.edge_frame`: by (c, s) about y, then by (b, a) about x.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from ._launch import INTERPRETED
from .layout import M_MAJOR

# Position in an m-major feature of each l-major coefficient.
P0, P1, P2, P3, P4, P5, P6, P7, P8 = (tl.constexpr(M_MAJOR.index(i)) for i in range(9))

_SQRT3 = tl.constexpr(3.0**0.5)
HALF_TOP = tl.constexpr(2048.0)
"""Rows that kernels scale by their largest entry have it in [2^11, 2^12): a factor of 16 below the largest half, while
the remainder of an entry 2^14 times smaller is still a normal half."""
LEAST_UNSCALE = tl.constexpr(2.0**-99)
"""Least factor that a product's rows of halves stand for: its inverse is finite."""


_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def wait_for_previous():
    """First statement of every kernel that :class:`._compile.Kernel` launches: wait for those before it, and let those
    after it start.

    Where GPUs can (compute capability 9.0 and above), the programs of a kernel start while the last ones of the kernel
    before still run, and wait here until all its results are there: programmatic dependent launch, which that class
    asks for. Nothing may be read or written before. As each waits, all kernels before the last have ended too.
    """
    if _COMPILED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sqrt3(like):
    """The square root of three in the precision of `like`: a bare Python number would be rounded to float32."""
    return tl.full([1, 1], _SQRT3, like.dtype)


@triton.jit
def load_vectors(vectors, edges, mask):
    """Edge vectors -> unit vector, length; masked edges point along y with length 1."""
    at = vectors + edges.to(tl.int64) * 3
    x = tl.load(at, mask=mask, other=0.0)
    y = tl.load(at + 1, mask=mask, other=1.0)
    z = tl.load(at + 2, mask=mask, other=0.0)
    length = tl.sqrt(x * x + y * y + z * z)
    return x / length, y / length, z / length, length


@triton.jit
def frame(ux, uy, uz):
    """Unit vector -> (c, s, a, b)."""
    rho = tl.sqrt(ux * ux + uz * uz)
    on_axis = rho == 0.0
    safe = tl.where(on_axis, 1.0, rho)
    return tl.where(on_axis, 1.0, uz / safe), ux / safe, rho, uy


@triton.jit
def rotate(x0, x1, x2, x3, x4, x5, x6, x7, x8, c, s, a, b):
    """y = D x."""
    c2 = c * c - s * s
    s2 = 2.0 * c * s
    ab = a * b
    z = s * x1 + c * x3
    q0 = c2 * x4 - s2 * x8
    q1 = c * x5 - s * x7
    q3 = s * x5 + c * x7
    q4 = c2 * x8 + s2 * x4
    root = sqrt3(a)
    h = 0.5 * root * a * a
    y1 = c * x1 - s * x3
    y2 = b * x2 + a * z
    y3 = b * z - a * x2
    y4 = b * q0 - a * q1
    y5 = b * q1 + a * q0
    y6 = (b * b - 0.5 * a * a) * x6 + root * ab * q3 + h * q4
    y7 = (b * b - a * a) * q3 + ab * (q4 - root * x6)
    y8 = h * x6 - ab * q3 + 0.5 * (1.0 + b * b) * q4
    return x0, y1, y2, y3, y4, y5, y6, y7, y8


@triton.jit
def rotate_back(y0, y1, y2, y3, y4, y5, y6, y7, y8, c, s, a, b):
    """x = D^T y."""
    c2 = c * c - s * s
    s2 = 2.0 * c * s
    ab = a * b
    root = sqrt3(a)
    h = 0.5 * root * a * a
    z = a * y2 + b * y3
    q0 = b * y4 + a * y5
    q1 = b * y5 - a * y4
    x6 = (b * b - 0.5 * a * a) * y6 - root * ab * y7 + h * y8
    q3 = root * ab * y6 + (b * b - a * a) * y7 - ab * y8
    q4 = h * y6 + ab * y7 + 0.5 * (1.0 + b * b) * y8
    x1 = c * y1 + s * z
    x2 = b * y2 - a * y3
    x3 = c * z - s * y1
    x4 = c2 * q0 + s2 * q4
    x5 = c * q1 + s * q3
    x7 = c * q3 - s * q1
    x8 = c2 * q4 - s2 * q0
    return y0, x1, x2, x3, x4, x5, x6, x7, x8


@triton.jit
def torque(g1, g2, g3, g4, g5, g6, g7, g8, y1, y2, y3, y4, y5, y6, y7, y8):
    """g . J_x y and g . J_z y for each channel, with J the so(3) generators of l = 1, 2."""
    root = sqrt3(g1)
    tx = g3 * y2 - g2 * y3 + g4 * y5 - g5 * y4 + g8 * y7 - g7 * y8 + root * (g7 * y6 - g6 * y7)
    tz = g2 * y1 - g1 * y2 + g7 * y4 - g4 * y7 + g8 * y5 - g5 * y8 + root * (g6 * y5 - g5 * y6)
    return tx, tz


@triton.jit
def store_vector_gradient(out, edges, mask, tx, tz, along, c, s, a, b, ux, uy, uz, length):
    """Gradient with respect to the edge vector: R^T (e x tau) / length, plus the part along the edge."""
    wx = tz / length
    wz = -tx / length
    at = out + edges.to(tl.int64) * 3
    tl.store(at, c * wx + s * b * wz + along * ux, mask=mask)
    tl.store(at + 1, along * uy - a * wz, mask=mask)
    tl.store(at + 2, c * b * wz - s * wx + along * uz, mask=mask)


@triton.jit
def load_l_major(ptr, stride, mask):
    """Nine l-major coefficients, `stride` elements apart."""
    return (
        tl.load(ptr, mask=mask, other=0.0),
        tl.load(ptr + stride, mask=mask, other=0.0),
        tl.load(ptr + 2 * stride, mask=mask, other=0.0),
        tl.load(ptr + 3 * stride, mask=mask, other=0.0),
        tl.load(ptr + 4 * stride, mask=mask, other=0.0),
        tl.load(ptr + 5 * stride, mask=mask, other=0.0),
        tl.load(ptr + 6 * stride, mask=mask, other=0.0),
        tl.load(ptr + 7 * stride, mask=mask, other=0.0),
        tl.load(ptr + 8 * stride, mask=mask, other=0.0),
    )


@triton.jit
def load_l_major_sum(x, y, stride, mask):
    """Nine l-major coefficients of x + y, or of x alone where y is None."""
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load_l_major(x, stride, mask)
    if y is not None:
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load_l_major(y, stride, mask)
        x0, x1, x2, x3, x4 = x0 + y0, x1 + y1, x2 + y2, x3 + y3, x4 + y4
        x5, x6, x7, x8 = x5 + y5, x6 + y6, x7 + y7, x8 + y8
    return x0, x1, x2, x3, x4, x5, x6, x7, x8


@triton.jit
def store_l_major(ptr, stride, mask, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    """The nine coefficients of an atom (edge) and channel, `stride` apart."""
    tl.store(ptr, x0, mask=mask)
    tl.store(ptr + stride, x1, mask=mask)
    tl.store(ptr + 2 * stride, x2, mask=mask)
    tl.store(ptr + 3 * stride, x3, mask=mask)
    tl.store(ptr + 4 * stride, x4, mask=mask)
    tl.store(ptr + 5 * stride, x5, mask=mask)
    tl.store(ptr + 6 * stride, x6, mask=mask)
    tl.store(ptr + 7 * stride, x7, mask=mask)
    tl.store(ptr + 8 * stride, x8, mask=mask)


@triton.jit
def row_scale(unscale, rows, mask, SCALED: tl.constexpr):
    """What stored values of each row are multiplied by: its scale where rows are scaled halves, else one."""
    if SCALED:
        return tl.load(unscale + rows, mask=mask, other=0.0)
    else:  # noqa: RET505 - without it Triton compiles this branch too
        return 1.0


@triton.jit
def load_m_major(ptr, stride, mask, scale):
    """Nine m-major coefficients, `stride` elements apart, times the rows' scale, returned in l-major order."""
    return (
        tl.load(ptr + P0 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P1 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P2 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P3 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P4 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P5 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P6 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P7 * stride, mask=mask, other=0.0) * scale,
        tl.load(ptr + P8 * stride, mask=mask, other=0.0) * scale,
    )


@triton.jit
def store_sum(ptr, mask, x, ADD: tl.constexpr):
    """Store (or add) the sum of a tile over its first axis."""
    total = tl.sum(x, axis=0)
    if ADD:
        total += tl.load(ptr, mask=mask, other=0.0)
    tl.store(ptr, total, mask=mask)


@triton.jit
def store_sums(ptr, stride, mask, x0, x1, x2, x3, x4, x5, x6, x7, x8, ADD: tl.constexpr):
    """Store (or add) the sums of nine l-major tiles over their first axis, `stride` elements apart."""
    store_sum(ptr, mask, x0, ADD)
    store_sum(ptr + stride, mask, x1, ADD)
    store_sum(ptr + 2 * stride, mask, x2, ADD)
    store_sum(ptr + 3 * stride, mask, x3, ADD)
    store_sum(ptr + 4 * stride, mask, x4, ADD)
    store_sum(ptr + 5 * stride, mask, x5, ADD)
    store_sum(ptr + 6 * stride, mask, x6, ADD)
    store_sum(ptr + 7 * stride, mask, x7, ADD)
    store_sum(ptr + 8 * stride, mask, x8, ADD)


@triton.jit
def row_sum(x):
    """Sums of a tile over its last axis, kept as a column."""
    return tl.sum(x, axis=1)[:, None]


@triton.jit
def max_abs(x0, x1, x2, x3, x4, x5, x6, x7, x8):
    """Largest absolute value of nine tiles, over their last axis, kept as a column."""
    m = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    m = tl.maximum(m, tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7))))
    return tl.max(tl.maximum(m, tl.abs(x8)), axis=1)[:, None]


@triton.jit
def power_of_two_scale(largest):
    """Exact powers of two: what to multiply a row by before storing it in halves, and its inverse.

    Not-a-number and infinity scale by zero and come back as not-a-number: they are never hidden.
    """
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent.to(tl.float32, bitcast=True), 7.888609052210118e-31)  # 2^-100: rows of zeros
    return HALF_TOP / power, power / HALF_TOP


@triton.jit
def store_value(high, low, offset, mask, x, scale, SPLIT: tl.constexpr):
    """Store a tile: as it is (SPLIT = 0), as one scaled half (1), or as a half and its remainder (2)."""
    if SPLIT == 0:
        tl.store(high + offset, x, mask=mask)
    else:
        scaled = x * scale
        rounded = scaled.to(tl.float16)
        tl.store(high + offset, rounded, mask=mask)
        if SPLIT == 2:
            tl.store(low + offset, (scaled - rounded.to(tl.float32)).to(tl.float16), mask=mask)


@triton.jit
def store_m_major(high, low, offset, stride, mask, scale, x0, x1, x2, x3, x4, x5, x6, x7, x8, SPLIT: tl.constexpr):
    """Store nine l-major values as m-major coefficients, in the storage that SPLIT names."""
    store_value(high, low, offset + P0 * stride, mask, x0, scale, SPLIT)
    store_value(high, low, offset + P1 * stride, mask, x1, scale, SPLIT)
    store_value(high, low, offset + P2 * stride, mask, x2, scale, SPLIT)
    store_value(high, low, offset + P3 * stride, mask, x3, scale, SPLIT)
    store_value(high, low, offset + P4 * stride, mask, x4, scale, SPLIT)
    store_value(high, low, offset + P5 * stride, mask, x5, scale, SPLIT)
    store_value(high, low, offset + P6 * stride, mask, x6, scale, SPLIT)
    store_value(high, low, offset + P7 * stride, mask, x7, scale, SPLIT)
    store_value(high, low, offset + P8 * stride, mask, x8, scale, SPLIT)
