"""Between atoms and edges: gather, rotate and scale; rotate back, weight and sum.

Formulas (:func:`.reference.gather_rotate_scale`, :func:`.reference.rotate_back_sum`), with D the rotation into the edge
frame, r the radial weights, w the envelope::

    y[e] = r[e] * D[e] (x[source], x[target])           [E, 9, 2C]
    o[i] = sum over edges e into i of w[e] D[e]^T z[e]  [N, 9, C]

No rotation matrix is stored and no gradient of one is taken. As an edge turns, its frame follows by the shortest
rotation, so the gradient with respect to the edge vector is a torque over the length, ``R^T (e x tau) / d``, plus the
part along the edge, which comes from what depends on the length. That the frame's roll about the edge follows in this
way and no other makes no difference to a function that does not depend on the roll, as the energy of an equivariant
network does not.

Sums into atoms run over edges in a fixed order, by one program an atom: no atomics, bitwise repeatable. The backward of
the first operation needs no [E, 9, 2C] gradient of the gathered features either: an atom's program walks the edges into
it, then those out of it, with the atom's own features in registers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_edges, check_shape
from ._compile import choices, kernel
from ._device import (
    frame,
    load_l_major,
    load_m_major,
    load_vectors,
    max_abs,
    power_of_two_scale,
    rotate,
    rotate_back,
    row_scale,
    store_m_major,
    store_sums,
    store_value,
    store_vector_gradient,
    torque,
    wait_for_previous,
)
from ._launch import cdiv, edge_tile, few_atoms, runs_kernels
from .layout import M_BLOCKS, NUM_COEFFICIENTS, NUM_RADIAL
from .operand import SPLIT_OF_KIND, Operand, empty_operand, plain_operand


class EdgeList(NamedTuple):
    """Edges into a range of consecutive atoms, sorted by target, and the same edges by source.

    Attributes:
        source, target: atoms of each edge [E], integer.
        first_target: the range's first atom.
        target_start: first edge into each atom of the range [T + 1].
        by_source: edges in the order of their source atoms [E].
        source_nodes: the atoms whose outgoing edges these are [S].
        source_start: first entry of ``by_source`` of each of them [S + 1].
        num_nodes: number of atoms N in all.
        packed: these are the edges of several systems, whose sums must not depend on how many others there are.
    """

    source: Tensor
    target: Tensor
    first_target: int
    target_start: Tensor
    by_source: Tensor
    source_nodes: Tensor
    source_start: Tensor
    num_nodes: int
    packed: bool = False

    @property
    def whole(self) -> bool:
        """Whether these are all edges of all atoms."""
        return self.target_start.shape[0] == self.num_nodes + 1


def sorted_edges(source: Tensor, target: Tensor, num_nodes: int) -> EdgeList:
    """Index edges that are sorted by target for the sums in both directions.

    Args:
        source, target: atoms of each edge [E]; ``target`` must not decrease.
        num_nodes: number of atoms N.
    """
    starts = torch.searchsorted(target, torch.arange(num_nodes + 1, device=source.device, dtype=target.dtype))
    by_source = torch.argsort(source, stable=True)
    nodes = torch.arange(num_nodes, device=source.device, dtype=source.dtype)
    source_start = torch.searchsorted(source[by_source], torch.arange(num_nodes + 1, device=source.device).to(source))
    return EdgeList(source, target, 0, starts, by_source, nodes, source_start, num_nodes)


# --------------------------------------------------------------------------------------------- gather, rotate, scale


@kernel(
    do_not_specialize=["num_edges"],
    do_not_specialize_on_alignment=["vectors", "radial_unscale", "source", "target", "unscale"],
)
def _gather_rotate_scale_kernel(
    x,
    vectors,
    radial,
    radial_unscale,
    source,
    target,
    high,
    low,
    unscale,
    num_edges,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """y = r * D (x[source], x[target]) for a tile of edges, all channels, so that a row's scale is known at once."""
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < C)
    ux, uy, uz, _ = load_vectors(vectors, edges, m_e)
    c, s, a, b = frame(ux, uy, uz)
    r_at = radial + edges * (6 * 2 * C) + channels
    u = row_scale(radial_unscale, edges, m_e, SCALED)
    o_at = edges * (9 * 2 * C) + channels

    node = tl.load(source + edges, mask=m_e, other=0).to(tl.int64)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load_l_major(x + node * (9 * C) + channels, C, mask)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = rotate(x0, x1, x2, x3, x4, x5, x6, x7, x8, c, s, a, b)
    x0 *= u * tl.load(r_at, mask=mask, other=0.0)
    x2 *= u * tl.load(r_at + 2 * C, mask=mask, other=0.0)
    x6 *= u * tl.load(r_at + 4 * C, mask=mask, other=0.0)
    r = u * tl.load(r_at + 6 * C, mask=mask, other=0.0)
    x1 *= r
    x3 *= r
    r = u * tl.load(r_at + 8 * C, mask=mask, other=0.0)
    x5 *= r
    x7 *= r
    r = u * tl.load(r_at + 10 * C, mask=mask, other=0.0)
    x4 *= r
    x8 *= r

    r_at += C
    node = tl.load(target + edges, mask=m_e, other=0).to(tl.int64)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load_l_major(x + node * (9 * C) + channels, C, mask)
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = rotate(y0, y1, y2, y3, y4, y5, y6, y7, y8, c, s, a, b)
    y0 *= u * tl.load(r_at, mask=mask, other=0.0)
    y2 *= u * tl.load(r_at + 2 * C, mask=mask, other=0.0)
    y6 *= u * tl.load(r_at + 4 * C, mask=mask, other=0.0)
    r = u * tl.load(r_at + 6 * C, mask=mask, other=0.0)
    y1 *= r
    y3 *= r
    r = u * tl.load(r_at + 8 * C, mask=mask, other=0.0)
    y5 *= r
    y7 *= r
    r = u * tl.load(r_at + 10 * C, mask=mask, other=0.0)
    y4 *= r
    y8 *= r

    scale = 1.0
    if SPLIT > 0:
        largest = tl.maximum(max_abs(x0, x1, x2, x3, x4, x5, x6, x7, x8), max_abs(y0, y1, y2, y3, y4, y5, y6, y7, y8))
        scale, inverse = power_of_two_scale(largest)
        tl.store(unscale + edges, inverse, mask=m_e)
    store_m_major(high, low, o_at, 2 * C, mask, scale, x0, x1, x2, x3, x4, x5, x6, x7, x8, SPLIT)
    store_m_major(high, low, o_at + C, 2 * C, mask, scale, y0, y1, y2, y3, y4, y5, y6, y7, y8, SPLIT)


@triton.jit
def _radial_product(r0, r1, r2, r3, r4, r5, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    """Sum over coefficients of r * x, for l-major x and six radial weights."""
    return r0 * x0 + r1 * x2 + r2 * x6 + r3 * (x1 + x3) + r4 * (x5 + x7) + r5 * (x4 + x8)


@kernel(
    do_not_specialize=["first_target", "num_targets", "num_sources", "num_nodes", "num_edges"],
    do_not_specialize_on_alignment=[
        "grad_unscale",
        "vectors",
        "radial_unscale",
        "slope_unscale",
        "target_start",
        "by_source",
        "source_nodes",
        "source_start",
        "grad_vectors",
    ],
)
def _gather_rotate_scale_backward_kernel(
    grad,
    grad_unscale,
    x,
    vectors,
    radial,
    radial_unscale,
    radial_slope,
    slope_unscale,
    first_target,
    num_targets,
    target_start,
    by_source,
    source_nodes,
    num_sources,
    source_start,
    grad_x,
    grad_vectors,
    grad_radial,
    num_nodes,
    num_edges,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALED: tl.constexpr,
    CHAIN: tl.constexpr,
    ADD: tl.constexpr,
):
    """One atom at one end of its edges. With g the gradient of y and h the atom's features in the edge frame::

    grad_x[end, i] (+)= sum over its edges of D^T (r g)
    tau = sum over channels of (r g) . J h;  along the edge: sum of g h dr/dd (CHAIN), else grad_radial = g h
    """
    wait_for_previous()
    i_segment = tl.program_id(0)
    i_end = tl.program_id(1)  # 0: edges out of the atom, channels [0, C); 1: edges into it, channels [C, 2C)
    if i_end == 1:
        if i_segment >= num_targets:
            return
        i_node = (first_target + i_segment).to(tl.int64)
        first = tl.load(target_start + i_segment).to(tl.int32)
        last = tl.load(target_start + i_segment + 1).to(tl.int32)
    else:
        if i_segment >= num_sources:
            return
        i_node = tl.load(source_nodes + i_segment).to(tl.int64)
        first = tl.load(source_start + i_segment).to(tl.int32)
        last = tl.load(source_start + i_segment + 1).to(tl.int32)
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_c = channels < C
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = load_l_major(x + i_node * (9 * C) + channels, C, m_c)
    zero = tl.zeros([BLOCK_E, BLOCK_C], dtype=x.dtype.element_ty)
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(first, last, BLOCK_E):
        entries = k + tl.arange(0, BLOCK_E)[:, None]
        m_e = entries < last
        edges = tl.where(i_end == 0, tl.load(by_source + entries, mask=m_e, other=0), entries).to(tl.int64)
        mask = m_e & m_c
        ux, uy, uz, length = load_vectors(vectors, edges, m_e)
        c, s, a, b = frame(ux, uy, uz)
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = rotate(h0, h1, h2, h3, h4, h5, h6, h7, h8, c, s, a, b)
        at = grad + edges * (9 * 2 * C) + i_end * C + channels
        u = row_scale(grad_unscale, edges, m_e, SCALED)
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = load_m_major(at, 2 * C, mask, u)
        r_offset = edges * (6 * 2 * C) + i_end * C + channels
        if CHAIN:
            r_at = radial_slope + r_offset
            slope = _radial_product(
                tl.load(r_at, mask=mask, other=0.0),
                tl.load(r_at + 2 * C, mask=mask, other=0.0),
                tl.load(r_at + 4 * C, mask=mask, other=0.0),
                tl.load(r_at + 6 * C, mask=mask, other=0.0),
                tl.load(r_at + 8 * C, mask=mask, other=0.0),
                tl.load(r_at + 10 * C, mask=mask, other=0.0),
                g0 * y0,
                g1 * y1,
                g2 * y2,
                g3 * y3,
                g4 * y4,
                g5 * y5,
                g6 * y6,
                g7 * y7,
                g8 * y8,
            )
            along = tl.sum(slope, axis=1)[:, None] * row_scale(slope_unscale, edges, m_e, SCALED)
        else:
            r_at = grad_radial + r_offset
            tl.store(r_at, g0 * y0, mask=mask)
            tl.store(r_at + 2 * C, g2 * y2, mask=mask)
            tl.store(r_at + 4 * C, g6 * y6, mask=mask)
            tl.store(r_at + 6 * C, g1 * y1 + g3 * y3, mask=mask)
            tl.store(r_at + 8 * C, g5 * y5 + g7 * y7, mask=mask)
            tl.store(r_at + 10 * C, g4 * y4 + g8 * y8, mask=mask)
            along = tl.zeros([BLOCK_E, 1], dtype=x.dtype.element_ty)
        r_at = radial + r_offset
        u = row_scale(radial_unscale, edges, m_e, SCALED)
        g0 *= u * tl.load(r_at, mask=mask, other=0.0)
        g2 *= u * tl.load(r_at + 2 * C, mask=mask, other=0.0)
        g6 *= u * tl.load(r_at + 4 * C, mask=mask, other=0.0)
        r = u * tl.load(r_at + 6 * C, mask=mask, other=0.0)
        g1 *= r
        g3 *= r
        r = u * tl.load(r_at + 8 * C, mask=mask, other=0.0)
        g5 *= r
        g7 *= r
        r = u * tl.load(r_at + 10 * C, mask=mask, other=0.0)
        g4 *= r
        g8 *= r
        tx, tz = torque(g1, g2, g3, g4, g5, g6, g7, g8, y1, y2, y3, y4, y5, y6, y7, y8)
        tx = tl.sum(tx, axis=1)[:, None]
        tz = tl.sum(tz, axis=1)[:, None]
        out = grad_vectors + i_end.to(tl.int64) * num_edges * 3
        store_vector_gradient(out, edges, m_e, tx, tz, along, c, s, a, b, ux, uy, uz, length)
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = rotate_back(g0, g1, g2, g3, g4, g5, g6, g7, g8, c, s, a, b)
        a0 += g0
        a1 += g1
        a2 += g2
        a3 += g3
        a4 += g4
        a5 += g5
        a6 += g6
        a7 += g7
        a8 += g8
    at = grad_x + (i_end.to(tl.int64) * num_nodes + i_node) * (9 * C) + tl.arange(0, BLOCK_C)
    store_sums(at, C, tl.arange(0, BLOCK_C) < C, a0, a1, a2, a3, a4, a5, a6, a7, a8, ADD)


def gather_rotate_scale_forward(x: Tensor, vectors: Tensor, radial: Operand, edges: EdgeList, kind: str) -> Operand:
    """Launch the forward kernel, with radial weights [E, 6 * 2C], not split; the result [E, 9 * 2C] is of `kind`."""
    assert radial.bias is None  # this kernel adds none
    num_edges, width = vectors.shape[0], x.shape[2]
    out = empty_operand(num_edges, NUM_COEFFICIENTS * 2 * width, kind, x.device)
    if num_edges:
        tile = edge_tile(width, x.element_size(), edges=1, warps=2)
        _gather_rotate_scale_kernel[(cdiv(num_edges, tile.edges),)](
            x,
            vectors,
            radial.high,
            radial.unscale,
            edges.source,
            edges.target,
            out.high,
            out.low,
            out.unscale,
            num_edges,
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            SCALED=radial.unscale is not None,
            SPLIT=SPLIT_OF_KIND[kind],
            num_warps=tile.warps,
        )
    return out


def gather_rotate_scale_backward(
    grad: Operand,
    x: Tensor,
    vectors: Tensor,
    radial: Operand,
    radial_slope: Operand | None,
    edges: EdgeList,
    grad_x: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Launch the backward kernel. Operands are stored alike, and not split.

    Args:
        grad: gradient of the output [E, 9 * 2C].
        radial_slope: dr/dd [E, 6 * 2C], to take the radial weights' part into the vectors' gradient; None to return
            the radial weights' gradient instead.
        grad_x: OUTPUT [2, N, 9, C], the gradient of x from either end of the edges. Written where ``edges`` are whole,
            added to where they are a part.

    Returns:
        Gradients of vectors [E, 3] and of radial [E, 6 * 2C] (None where ``radial_slope`` is given).
    """
    assert radial.bias is None  # this kernel adds none
    (num_nodes, _, width), num_edges = x.shape, vectors.shape[0]
    grad_vectors = vectors.new_empty(2, num_edges, 3)
    grad_radial = torch.empty_like(radial.high) if radial_slope is None else None
    num_targets, num_sources = edges.target_start.shape[0] - 1, edges.source_nodes.shape[0]
    if num_nodes:
        present = (not edges.packed and few_atoms(num_nodes, x.device), edges.whole)
        others = [(False, True)] if edges.packed else itertools.product((False, True), repeat=2)
        for few, whole in choices(present, others):
            # One edge a warp at a time leaves room for the most warps, by measurement; few atoms want wide programs.
            tile = edge_tile(width, x.element_size(), *((8, 8) if few else (1, 1)))
            _gather_rotate_scale_backward_kernel[(max(num_targets, num_sources), 2)](
                grad.high,
                grad.unscale,
                x,
                vectors,
                radial.high,
                radial.unscale,
                radial_slope and radial_slope.high,
                radial_slope and radial_slope.unscale,
                edges.first_target,
                num_targets,
                edges.target_start,
                edges.by_source,
                edges.source_nodes,
                num_sources,
                edges.source_start,
                grad_x,
                grad_vectors,
                grad_radial,
                num_nodes,
                num_edges,
                C=width,
                BLOCK_E=tile.edges,
                BLOCK_C=tile.channels,
                SCALED=grad.unscale is not None,
                CHAIN=radial_slope is not None,
                ADD=not whole,
                num_warps=tile.warps,
            )
    return grad_vectors[0] + grad_vectors[1], grad_radial


class _GatherRotateScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, vectors, radial, edges):
        ctx.save_for_backward(x, vectors, radial)
        ctx.edges = edges
        weights = plain_operand(radial.flatten(1))
        out = gather_rotate_scale_forward(x, vectors, weights, edges, weights.kind)
        return out.high.view(-1, NUM_COEFFICIENTS, 2 * x.shape[2])

    @staticmethod
    def backward(ctx, grad):
        x, vectors, radial = ctx.saved_tensors
        if torch.is_grad_enabled():
            function = functools.partial(_reference_gather, edges=ctx.edges)
            return (*reference_gradient(function, (x, vectors, radial), grad), None)
        grad_x = x.new_empty(2, *x.shape)
        grads, weights = plain_operand(grad.contiguous().flatten(1)), plain_operand(radial.flatten(1))
        grad_vectors, grad_radial = gather_rotate_scale_backward(grads, x, vectors, weights, None, ctx.edges, grad_x)
        return grad_x[0] + grad_x[1], grad_vectors, grad_radial.view_as(radial), None


def _reference_gather(x, vectors, radial, edges):
    return reference.gather_rotate_scale(x, vectors, radial, edges.source, edges.target)


def reference_gradient(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple:
    """Gradients through a reference function that can be differentiated again, for a backward under create_graph."""
    with torch.enable_grad():
        # Aliases: an input may itself depend on another one, and only this function's own derivatives are wanted.
        aliases = [t.view_as(t) for t in inputs]
        wanted = [a for a in aliases if a.requires_grad]
        found = iter(torch.autograd.grad(function(*aliases), wanted, grad, create_graph=True))
    return tuple(next(found) if a.requires_grad else None for a in aliases)


def gather_rotate_scale(x: Tensor, vectors: Tensor, radial: Tensor, edges: EdgeList) -> Tensor:
    """Edge inputs of the first SO(2) linear: both ends' features in the edge frame, times the radial weights.

    Args:
        x: node features [N, 9, C], l-major, float32 or float64 (half types are computed in float32).
        vectors: edge vectors [E, 3] in A, from target to source, none of length zero.
        radial: radial weights [E, 6, 2C]; channels are source, then target.
        edges: indices, from :func:`sorted_edges`.

    Returns:
        [E, 9, 2C], m-major. Second derivatives go through the reference.

    Raises:
        ValueError, TypeError: a shape, type or device does not fit.
    """
    check_edges(x, vectors, edges)
    check_shape("radial", radial, (vectors.shape[0], NUM_RADIAL, 2 * x.shape[2]), x)
    x, vectors, radial = (t.float() if t.element_size() < 4 else t for t in (x, vectors, radial))
    if not runs_kernels(x):
        return _reference_gather(x, vectors, radial, edges)
    return _GatherRotateScale.apply(x.contiguous(), vectors.contiguous(), radial.contiguous(), edges)


# ------------------------------------------------------------------------------------------------- rotate back, sum


@triton.jit
def _load_message(z, scale, bias, edges, channels, mask, C: tl.constexpr, M0: tl.constexpr):
    """A tile of messages in l-major order, from [E, 9, C] m-major or, with M0, from [E, 3, C].

    They are what is stored times its scale, plus the bias of m = 0 [3, C] that their product left to be added here.
    """
    if M0:
        at = z + edges * (3 * C) + channels
        z0 = tl.load(at, mask=mask, other=0.0) * scale
        z2 = tl.load(at + C, mask=mask, other=0.0) * scale
        z6 = tl.load(at + 2 * C, mask=mask, other=0.0) * scale
        zero = tl.zeros_like(z0)
        z1, z3, z4, z5, z7, z8 = zero, zero, zero, zero, zero, zero
    else:
        at = z + edges * (9 * C) + channels
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = load_m_major(at, C, mask, scale)
    if bias is not None:
        # For every edge: as one row the bias would come in another layout, and go through shared memory.
        at = bias + edges * 0 + channels
        z0 += tl.load(at, mask=mask, other=0.0)
        z2 += tl.load(at + C, mask=mask, other=0.0)
        z6 += tl.load(at + 2 * C, mask=mask, other=0.0)
    return z0, z1, z2, z3, z4, z5, z6, z7, z8


@kernel(
    do_not_specialize_on_alignment=["z_unscale", "vectors", "weight", "target_start"],
)
def _rotate_back_sum_kernel(
    z,
    z_unscale,
    bias,
    vectors,
    weight,
    target_start,
    out,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALED: tl.constexpr,
    M0: tl.constexpr,
):
    """o[i] = sum over edges into i of w D^T z, one atom a program, edges in their order."""
    wait_for_previous()
    i_node = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_C)[None, :]
    first = tl.load(target_start + i_node)
    last = tl.load(target_start + i_node + 1)
    zero = tl.zeros([BLOCK_E, BLOCK_C], dtype=out.dtype.element_ty)
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(first, last, BLOCK_E):
        edges = (k + tl.arange(0, BLOCK_E)[:, None]).to(tl.int64)
        m_e = edges < last
        ux, uy, uz, _ = load_vectors(vectors, edges, m_e)
        c, s, a, b = frame(ux, uy, uz)
        w = tl.load(weight + edges, mask=m_e, other=0.0)
        u = row_scale(z_unscale, edges, m_e, SCALED)
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = _load_message(z, u, bias, edges, channels, m_e & (channels < C), C, M0)
        z0, z1, z2, z3, z4, z5, z6, z7, z8 = rotate_back(z0, z1, z2, z3, z4, z5, z6, z7, z8, c, s, a, b)
        a0 += w * z0
        a1 += w * z1
        a2 += w * z2
        a3 += w * z3
        a4 += w * z4
        a5 += w * z5
        a6 += w * z6
        a7 += w * z7
        a8 += w * z8
    at = out + i_node * (9 * C) + tl.arange(0, BLOCK_C)
    store_sums(at, C, tl.arange(0, BLOCK_C) < C, a0, a1, a2, a3, a4, a5, a6, a7, a8, False)


@kernel(
    do_not_specialize=["num_edges"],
    do_not_specialize_on_alignment=[
        "z_unscale",
        "slope_unscale",
        "vectors",
        "weight",
        "weight_slope",
        "target",
        "unscale",
        "grad_vectors",
        "grad_weight",
    ],
)
def _rotate_back_sum_backward_kernel(
    grad,
    z,
    z_unscale,
    bias,
    z_slope,
    slope_unscale,
    vectors,
    weight,
    weight_slope,
    target,
    high,
    low,
    unscale,
    grad_vectors,
    grad_weight,
    num_edges,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    M0: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A tile of edges. With G = D grad[target]::

    grad_z = w G;  tau = -sum over channels of w G . J z
    along the edge: sum of G (z dw/dd + w dz/dd) (CHAIN; dz/dd with M0 alone), else grad_weight = sum of G z
    """
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    m_e = edges < num_edges
    mask = m_e & (channels < C)
    ux, uy, uz, length = load_vectors(vectors, edges, m_e)
    c, s, a, b = frame(ux, uy, uz)
    w = tl.load(weight + edges, mask=m_e, other=0.0)
    node = tl.load(target + edges, mask=m_e, other=0).to(tl.int64)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = load_l_major(grad + node * (9 * C) + channels, C, mask)
    g0, g1, g2, g3, g4, g5, g6, g7, g8 = rotate(g0, g1, g2, g3, g4, g5, g6, g7, g8, c, s, a, b)
    u = row_scale(z_unscale, edges, m_e, SCALED)
    z0, z1, z2, z3, z4, z5, z6, z7, z8 = _load_message(z, u, bias, edges, channels, mask, C, M0)
    product = g0 * z0 + g1 * z1 + g2 * z2 + g3 * z3 + g4 * z4 + g5 * z5 + g6 * z6 + g7 * z7 + g8 * z8
    tx, tz = torque(z1, z2, z3, z4, z5, z6, z7, z8, g1, g2, g3, g4, g5, g6, g7, g8)
    tx = tl.sum(tx, axis=1)[:, None] * w
    tz = tl.sum(tz, axis=1)[:, None] * w
    if CHAIN:
        along = product * tl.load(weight_slope + edges, mask=m_e, other=0.0)
        if M0:
            at = z_slope + edges * (3 * C) + channels
            slope = g0 * tl.load(at, mask=mask, other=0.0) + g2 * tl.load(at + C, mask=mask, other=0.0)
            slope += g6 * tl.load(at + 2 * C, mask=mask, other=0.0)
            along += w * row_scale(slope_unscale, edges, m_e, SCALED) * slope
        along = tl.sum(along, axis=1)[:, None]
    else:
        tl.store(grad_weight + edges, tl.sum(product, axis=1)[:, None], mask=m_e)
        along = tl.zeros([BLOCK_E, 1], dtype=w.dtype)
    store_vector_gradient(grad_vectors, edges, m_e, tx, tz, along, c, s, a, b, ux, uy, uz, length)
    if M0:
        if not CHAIN:
            at = edges * (3 * C) + channels
            store_value(high, low, at, mask, w * g0, 1.0, 0)
            store_value(high, low, at + C, mask, w * g2, 1.0, 0)
            store_value(high, low, at + 2 * C, mask, w * g6, 1.0, 0)
    else:
        scale = 1.0
        if SPLIT > 0:
            largest = max_abs(g0, g1, g2, g3, g4, g5, g6, g7, g8) * tl.abs(w)
            scale, inverse = power_of_two_scale(largest)
            tl.store(unscale + edges, inverse, mask=m_e)
        at = edges * (9 * C) + channels
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = w * g0, w * g1, w * g2, w * g3, w * g4, w * g5, w * g6, w * g7, w * g8
        store_m_major(high, low, at, C, mask, scale, g0, g1, g2, g3, g4, g5, g6, g7, g8, SPLIT)


def rotate_back_sum_forward(z: Operand, vectors: Tensor, weight: Tensor, edges: EdgeList, width: int) -> Tensor:
    """Launch the forward kernel for messages [E, 9 * C] or [E, 3 * C], not split, with C = `width`.

    Returns sums [T, 9, C] of the edges' target range.
    """
    num_targets = edges.target_start.shape[0] - 1
    out = vectors.new_empty(num_targets, NUM_COEFFICIENTS, width)
    if num_targets:
        present = not edges.packed and few_atoms(edges.num_nodes, out.device)
        for few in choices(present, (False,) if edges.packed else (False, True)):
            # Two warps an edge, by measurement: half of the registers for sums a lane.
            tile = edge_tile(width, out.element_size(), *((4, 8) if few else (2, 4)))
            _rotate_back_sum_kernel[(num_targets,)](
                z.high,
                z.unscale,
                z.bias,
                vectors,
                weight,
                edges.target_start,
                out,
                C=width,
                BLOCK_E=tile.edges,
                BLOCK_C=tile.channels,
                SCALED=z.unscale is not None,
                M0=z.high.shape[1] == M_BLOCKS[0] * width,
                num_warps=tile.warps,
            )
    return out


def rotate_back_sum_backward(
    grad: Tensor,
    z: Operand,
    vectors: Tensor,
    weight: Tensor,
    edges: EdgeList,
    kind: str,
    weight_slope: Tensor | None = None,
    z_slope: Operand | None = None,
) -> tuple[Operand | None, Tensor, Tensor | None]:
    """Launch the backward kernel.

    Args:
        grad: gradient of the sums [N, 9, C].
        z: messages [E, 9 * C] or [E, 3 * C], not split.
        kind: storage of the messages' gradient.
        weight_slope: dw/dd [E], to take what depends on the length into the vectors' gradient; None to return the
            weights' gradient instead.
        z_slope: dz/dd [E, 3 * C], stored like z, for m = 0 messages that are functions of the length alone (needs
            ``weight_slope``); their own gradient is then not returned.

    Returns:
        Gradients of z (operand like z, of `kind`), of vectors [E, 3] and of weight [E].
    """
    (num_edges, columns), width, chain = z.high.shape, grad.shape[2], weight_slope is not None
    m0 = columns == M_BLOCKS[0] * width
    grad_z = None if m0 and chain else empty_operand(num_edges, columns, kind, grad.device)
    grad_vectors = torch.empty_like(vectors)
    grad_weight = None if chain else torch.empty_like(weight)
    if num_edges:
        tile = edge_tile(width, grad.element_size())
        _rotate_back_sum_backward_kernel[(cdiv(num_edges, tile.edges),)](
            grad,
            z.high,
            z.unscale,
            z.bias,
            z_slope and z_slope.high,
            z_slope and z_slope.unscale,
            vectors,
            weight,
            weight_slope,
            edges.target,
            grad_z and grad_z.high,
            grad_z and grad_z.low,
            grad_z and grad_z.unscale,
            grad_vectors,
            grad_weight,
            num_edges,
            C=width,
            BLOCK_E=tile.edges,
            BLOCK_C=tile.channels,
            SCALED=z.unscale is not None,
            SPLIT=SPLIT_OF_KIND[kind],
            M0=m0,
            CHAIN=chain,
            num_warps=tile.warps,
        )
    return grad_z, grad_vectors, grad_weight


class _RotateBackSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, vectors, weight, edges):
        ctx.save_for_backward(z, vectors, weight)
        ctx.edges = edges
        return rotate_back_sum_forward(plain_operand(z.flatten(1)), vectors, weight, edges, z.shape[2])

    @staticmethod
    def backward(ctx, grad):
        z, vectors, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            function = functools.partial(_reference_sum, edges=ctx.edges)
            return (*reference_gradient(function, (z, vectors, weight), grad), None)
        messages = plain_operand(z.flatten(1))
        grad_z, grad_vectors, grad_weight = rotate_back_sum_backward(
            grad.contiguous(), messages, vectors, weight, ctx.edges, messages.kind
        )
        return grad_z.high.view_as(z), grad_vectors, grad_weight, None


def _reference_sum(z, vectors, weight, edges):
    return reference.rotate_back_sum(z, vectors, weight, edges.target, edges.num_nodes)


def rotate_back_sum(z: Tensor, vectors: Tensor, weight: Tensor, edges: EdgeList) -> Tensor:
    """Rotate edge messages back, weight them and sum them into their target atoms.

    Args:
        z: messages [E, 9, C], m-major, or [E, 3, C], the m = 0 coefficients alone; float32 or float64 (half types are
            computed in float32).
        vectors: edge vectors [E, 3] in A, none of length zero.
        weight: weight of each message [E].
        edges: indices, from :func:`sorted_edges`.

    Returns:
        [N, 9, C], l-major. Second derivatives go through the reference.

    Raises:
        ValueError, TypeError: a shape, type or device does not fit.
    """
    coefficients = M_BLOCKS[0] if z.dim() == 3 and z.shape[1] == M_BLOCKS[0] else NUM_COEFFICIENTS
    check_edges(None, vectors, edges)
    check_shape("z", z, (vectors.shape[0], coefficients, None), vectors)
    check_shape("weight", weight, (vectors.shape[0],), vectors)
    z, vectors, weight = (t.float() if t.element_size() < 4 else t for t in (z, vectors, weight))
    if not runs_kernels(z):
        return _reference_sum(z, vectors, weight, edges)
    return _RotateBackSum.apply(z.contiguous(), vectors.contiguous(), weight.contiguous(), edges)
