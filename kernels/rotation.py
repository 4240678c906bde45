"""Rotations of features by stored matrices, for models that need them: the operations of :mod:`.edge` store none.

Formula (:func:`.reference.rotate`), with D the block-diagonal rotation of l = 0, 1, 2, features l-major::

    rotate:      y[e] = D[e] x[e]      grad_x = D^T g,  grad_D = g x^T, summed over channels, on the blocks
    rotate_back: y[e] = D[e]^T x[e]    grad_x = D g,    grad_D = x g^T, likewise

D comes in one of two layouts: *compact* [E, 35], the three blocks row by row, one after another; or *dense* [E, 9, 9].
The kernels read and write the blocks alone, wherever they lie, with the same operations in the same order: both layouts
give bitwise the same results and gradients. Numbers of a dense matrix off its blocks are not read, and their gradient
is exactly zero.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._device import load_l_major
from ._launch import cdiv, edge_tile, runs_kernels
from .edge import reference_gradient
from .layout import COMPACT_SIZE, NUM_COEFFICIENTS


class RotationLayout(NamedTuple):
    """Where the blocks of l = 0, 1, 2 lie in the numbers of one edge's rotation.

    Attributes:
        name: what the user calls it.
        shape: shape of one edge's rotation; size: numbers in it.
        first: number at which each block starts.
        row: distance between the rows of each block.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    first: tuple[int, int, int]
    row: tuple[int, int, int]


COMPACT = RotationLayout("compact", (COMPACT_SIZE,), COMPACT_SIZE, (0, 1, 1 + 9), (1, 3, 5))
DENSE = RotationLayout(
    "dense",
    (NUM_COEFFICIENTS, NUM_COEFFICIENTS),
    NUM_COEFFICIENTS**2,
    (0, 1 + NUM_COEFFICIENTS, 4 + 4 * NUM_COEFFICIENTS),
    (NUM_COEFFICIENTS,) * 3,
)
LAYOUTS = (COMPACT, DENSE)


def check_rotation(rotation: Tensor, num_edges: int | None = None, like: Tensor | None = None) -> RotationLayout:
    """Check a rotation's shape and type, and that it lies beside `like`; returns its layout."""
    for layout in LAYOUTS:
        if isinstance(rotation, Tensor) and rotation.shape[1:] == layout.shape:
            check_shape("rotation", rotation, (num_edges, *layout.shape), like)
            return layout
    edges = "any" if num_edges is None else str(num_edges)
    shapes = " or ".join(f"[{edges}, {', '.join(map(str, layout.shape))}]" for layout in LAYOUTS)
    if not isinstance(rotation, Tensor):
        raise TypeError(f"rotation: expected a tensor {shapes}, got {type(rotation).__name__}")
    raise ValueError(f"rotation: expected shape {shapes}, got {list(rotation.shape)}")


# In both kernels entry (i, j) of the block of degree l is number F_l + i * I_l + j * J_l of an edge's rotation; for the
# inverse rotation the host swaps I and J.


@triton.jit
def _dot_3(d, step, mask, x0, x1, x2):
    """Three entries of the rotation, `step` apart, times three coefficients."""
    y = tl.load(d, mask=mask, other=0.0) * x0
    y += tl.load(d + step, mask=mask, other=0.0) * x1
    y += tl.load(d + 2 * step, mask=mask, other=0.0) * x2
    return y


@triton.jit
def _dot_5(d, step, mask, x0, x1, x2, x3, x4):
    """Five entries of the rotation, `step` apart, times five coefficients."""
    y = tl.load(d, mask=mask, other=0.0) * x0
    y += tl.load(d + step, mask=mask, other=0.0) * x1
    y += tl.load(d + 2 * step, mask=mask, other=0.0) * x2
    y += tl.load(d + 3 * step, mask=mask, other=0.0) * x3
    y += tl.load(d + 4 * step, mask=mask, other=0.0) * x4
    return y


@triton.jit
def _store_product(d, m_d, y, stride, mask, F1, F2, I1, J1, I2, J2, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    """Store D x for nine l-major tiles x, `stride` elements apart."""
    tl.store(y, tl.load(d, mask=m_d, other=0.0) * x0, mask=mask)
    at = d + F1
    tl.store(y + stride, _dot_3(at, J1, m_d, x1, x2, x3), mask=mask)
    tl.store(y + 2 * stride, _dot_3(at + I1, J1, m_d, x1, x2, x3), mask=mask)
    tl.store(y + 3 * stride, _dot_3(at + 2 * I1, J1, m_d, x1, x2, x3), mask=mask)
    at = d + F2
    tl.store(y + 4 * stride, _dot_5(at, J2, m_d, x4, x5, x6, x7, x8), mask=mask)
    tl.store(y + 5 * stride, _dot_5(at + I2, J2, m_d, x4, x5, x6, x7, x8), mask=mask)
    tl.store(y + 6 * stride, _dot_5(at + 2 * I2, J2, m_d, x4, x5, x6, x7, x8), mask=mask)
    tl.store(y + 7 * stride, _dot_5(at + 3 * I2, J2, m_d, x4, x5, x6, x7, x8), mask=mask)
    tl.store(y + 8 * stride, _dot_5(at + 4 * I2, J2, m_d, x4, x5, x6, x7, x8), mask=mask)


@triton.jit
def _store_outer_1(d, mask, g, x):
    """Store the sum of g x over channels as one entry of the rotation's gradient."""
    tl.store(d, tl.sum(g * x, axis=1)[:, None], mask=mask)


@triton.jit
def _store_outer_3(d, step, mask, g, x0, x1, x2):
    """Store one row of the l = 1 block of the rotation's gradient."""
    _store_outer_1(d, mask, g, x0)
    _store_outer_1(d + step, mask, g, x1)
    _store_outer_1(d + 2 * step, mask, g, x2)


@triton.jit
def _store_outer_5(d, step, mask, g, x0, x1, x2, x3, x4):
    """Store one row of the l = 2 block of the rotation's gradient."""
    _store_outer_1(d, mask, g, x0)
    _store_outer_1(d + step, mask, g, x1)
    _store_outer_1(d + 2 * step, mask, g, x2)
    _store_outer_1(d + 3 * step, mask, g, x3)
    _store_outer_1(d + 4 * step, mask, g, x4)


@triton.jit(do_not_specialize=["num_edges"], do_not_specialize_on_alignment=["rotation"])
def _rotate_kernel(
    x,
    rotation,
    out,
    num_edges,
    SIZE: tl.constexpr,
    F1: tl.constexpr,
    F2: tl.constexpr,
    I1: tl.constexpr,
    J1: tl.constexpr,
    I2: tl.constexpr,
    J2: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """y = D x, for a tile of edges."""
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < C)
    at = edges * (9 * C) + channels
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load_l_major(x + at, C, mask)
    d = rotation + edges * SIZE
    _store_product(d, m_e, out + at, C, mask, F1, F2, I1, J1, I2, J2, x0, x1, x2, x3, x4, x5, x6, x7, x8)


@triton.jit(do_not_specialize=["num_edges"], do_not_specialize_on_alignment=["rotation", "grad_rotation"])
def _rotate_backward_kernel(
    grad,
    x,
    rotation,
    grad_x,
    grad_rotation,
    num_edges,
    SIZE: tl.constexpr,
    F1: tl.constexpr,
    F2: tl.constexpr,
    I1: tl.constexpr,
    J1: tl.constexpr,
    I2: tl.constexpr,
    J2: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_x = D^T g; grad_D = g x^T, summed over channels, on the blocks; for a tile of edges."""
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < C)
    at = edges * (9 * C) + channels
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load_l_major(grad + at, C, mask)
    d = rotation + edges * SIZE
    _store_product(d, m_e, grad_x + at, C, mask, F1, F2, J1, I1, J2, I2, g0, g1, g2, g3, g4, g5, g6, g7, g8)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load_l_major(x + at, C, mask)
    d = grad_rotation + edges * SIZE
    _store_outer_1(d, m_e, g0, x0)
    at = d + F1
    _store_outer_3(at, J1, m_e, g1, x1, x2, x3)
    _store_outer_3(at + I1, J1, m_e, g2, x1, x2, x3)
    _store_outer_3(at + 2 * I1, J1, m_e, g3, x1, x2, x3)
    at = d + F2
    _store_outer_5(at, J2, m_e, g4, x4, x5, x6, x7, x8)
    _store_outer_5(at + I2, J2, m_e, g5, x4, x5, x6, x7, x8)
    _store_outer_5(at + 2 * I2, J2, m_e, g6, x4, x5, x6, x7, x8)
    _store_outer_5(at + 3 * I2, J2, m_e, g7, x4, x5, x6, x7, x8)
    _store_outer_5(at + 4 * I2, J2, m_e, g8, x4, x5, x6, x7, x8)


def _places(rotation: Tensor, inverse: bool) -> dict[str, int]:
    """Where the kernels find the entries of D, or of its inverse (that is its transpose), in this rotation's layout."""
    layout = check_rotation(rotation)
    _, row_1, row_2 = layout.row
    _, first_1, first_2 = layout.first
    (i1, j1), (i2, j2) = ((1, row_1), (1, row_2)) if inverse else ((row_1, 1), (row_2, 1))
    return {"SIZE": layout.size, "F1": first_1, "F2": first_2, "I1": i1, "J1": j1, "I2": i2, "J2": j2}


def rotate_forward(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Launch the forward kernel on contiguous x [E, 9, C] and rotation: D x, or D^T x for the inverse."""
    (num_edges, _, width), out = x.shape, torch.empty_like(x)
    if num_edges:
        tile = edge_tile(width, x.element_size())
        _rotate_kernel[(cdiv(num_edges, tile.edges),)](
            x,
            rotation,
            out,
            num_edges,
            **_places(rotation, inverse),
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            num_warps=tile.warps,
        )
    return out


def rotate_backward(grad: Tensor, x: Tensor, rotation: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel; gradients of x [E, 9, C] and of the rotation, in the rotation's layout."""
    (num_edges, _, width), grad_x = x.shape, torch.empty_like(x)
    grad_rotation = torch.zeros_like(rotation)  # stays zero off the blocks
    if num_edges:
        tile = edge_tile(width, x.element_size())
        _rotate_backward_kernel[(cdiv(num_edges, tile.edges),)](
            grad,
            x,
            rotation,
            grad_x,
            grad_rotation,
            num_edges,
            **_places(rotation, inverse),
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            num_warps=tile.warps,
        )
    return grad_x, grad_rotation


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotation, inverse):
        ctx.save_for_backward(x, rotation)
        ctx.inverse = inverse
        return rotate_forward(x, rotation, inverse)

    @staticmethod
    def backward(ctx, grad):
        x, rotation = ctx.saved_tensors
        if torch.is_grad_enabled():
            function = functools.partial(_reference_rotate, inverse=ctx.inverse)
            return (*reference_gradient(function, (x, rotation), grad), None)
        grad = grad.contiguous()
        if not ctx.needs_input_grad[1]:
            return rotate_forward(grad, rotation, not ctx.inverse), None, None
        return (*rotate_backward(grad, x, rotation, ctx.inverse), None)


def _reference_rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    return reference.rotate_back(x, rotation) if inverse else reference.rotate(x, rotation)


def _rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    check_shape("x", x, (None, NUM_COEFFICIENTS, None))
    check_rotation(rotation, x.shape[0], x)
    x, rotation = (t.float() if t.element_size() < 4 else t for t in (x, rotation))
    if not runs_kernels(x):
        return _reference_rotate(x, rotation, inverse)
    return _Rotate.apply(x.contiguous(), rotation.contiguous(), inverse)


def edge_rotation(vectors: Tensor, layout: str = "compact") -> Tensor:
    """Rotations into the frames of edges, where each edge lies along the polar axis y.

    Made in PyTorch, differentiable to any order. The gradient with respect to the vectors follows the shortest rotation
    (:func:`.reference.edge_frame`): it is right for functions that do not depend on the roll about the edge.

    Args:
        vectors: edge vectors [E, 3] in A, none of length zero; float32 or float64 (half types are computed in float32).
        layout: "compact" or "dense".

    Returns:
        Rotations [E, 35] or [E, 9, 9].

    Raises:
        ValueError, TypeError: the shape or type does not fit, or there is no such layout.
    """
    check_shape("vectors", vectors, (None, 3))
    names = [known.name for known in LAYOUTS]
    if layout not in names:
        raise ValueError(f"layout: expected one of {names}, got {layout!r}")
    vectors = vectors.float() if vectors.element_size() < 4 else vectors
    compact = reference.compact_rotation(reference.edge_frame(vectors))
    return compact if layout == COMPACT.name else reference.dense_from_compact(compact)


def pack(dense: Tensor) -> Tensor:
    """Collect the blocks of dense rotations [E, 9, 9] into compact ones [E, 35], bit for bit.

    Numbers off the blocks are dropped; their gradient is exactly zero.

    Raises:
        ValueError, TypeError: the shape or type does not fit.
    """
    check_shape("dense", dense, (None, *DENSE.shape))
    return reference.compact_from_dense(dense)


def unpack(compact: Tensor) -> Tensor:
    """Spread compact rotations [E, 35] into dense ones [E, 9, 9], bit for bit, with exact zeros off the blocks.

    Raises:
        ValueError, TypeError: the shape or type does not fit.
    """
    check_shape("compact", compact, (None, *COMPACT.shape))
    return reference.dense_from_compact(compact)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate features: D x for each edge and channel.

    Args:
        x: features [E, 9, C], l-major, float32 or float64 (half types are computed in float32). Those of atoms are
            gathered by indexing, ``x[source]``.
        rotation: compact [E, 35] or dense [E, 9, 9]; numbers off the blocks of a dense one are taken as zero.

    Returns:
        [E, 9, C], l-major. The rotation's gradient has the rotation's shape, with exact zeros off the blocks. Second
        derivatives go through the reference.

    Raises:
        ValueError, TypeError: a shape, type or device does not fit.
    """
    return _rotate(x, rotation, False)


def rotate_back(x: Tensor, rotation: Tensor) -> Tensor:
    """The inverse of :func:`rotate`: D^T x for each edge and channel; arguments, result and errors are the same."""
    return _rotate(x, rotation, True)
