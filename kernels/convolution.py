"""The whole edge convolution of one layer, as one differentiable operation.

    x, edges -> gather, rotate, scale -> SO(2) linear -> gate -> SO(2) linear -> rotate back, weight, sum

What flows between the steps is stored as matrix-product operands (:mod:`.operand`): the kernels around the products
scale and split as they write, so the products read half-precision tiles and nothing is converted twice. Saved for the
backward pass are the node features and, as there is room, products' outputs; the rest is computed again.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .edge import (
    EdgeList,
    gather_rotate_scale_backward,
    gather_rotate_scale_forward,
    reference_gradient,
    rotate_back_sum_backward,
    rotate_back_sum_forward,
)
from .gate import gate_backward, gate_forward
from .layout import M_BLOCKS, NUM_COEFFICIENTS, NUM_RADIAL
from .linear import BlockWeights, RowGroups, block_matmul
from .operand import Operand, to_operand
from .radial import Radial


class Chunk(NamedTuple):
    """The edges into a range of atoms, a contiguous part of all edges: [first, last)."""

    first: int
    last: int
    edges: EdgeList


class Keep(NamedTuple):
    """What the forward pass leaves to the backward pass, which computes the rest again.

    Attributes:
        first: the first linear's output, (A + 9) * H numbers an edge.
        second: the second linear's output, 9 * C numbers.
        radial: the radial weights, 6 * 2C numbers.
    """

    first: bool
    second: bool
    radial: bool


@dataclass(frozen=True)
class Geometry:
    """What the edges of one evaluation share over all layers.

    Attributes:
        vectors: edge vectors [E, 3] in A.
        distances: their lengths [E], float64.
        pair: index of each edge's pair of elements [E].
        weight, weight_slope: the envelope [E] and its derivative (1/A).
        source, target: atoms of each edge [E].
        chunks: the edges in parts that are worked on one after another.
        keep: what to keep for the backward pass.
        groups: groups of edges that have SO(2) weights of their own; None where all edges share them.
    """

    vectors: Tensor
    distances: Tensor
    pair: Tensor
    weight: Tensor
    weight_slope: Tensor
    source: Tensor
    target: Tensor
    chunks: tuple[Chunk, ...]
    keep: Keep
    cutoff: float
    num_nodes: int
    groups: RowGroups | None = None


class S2Grid(NamedTuple):
    """Matrices [G, 9] of the S2 activation between m-major coefficients and a grid of G points on the sphere."""

    to_grid: Tensor
    from_grid: Tensor


@dataclass(frozen=True)
class ConvolutionWeights:
    """Weights of one layer's convolution, for C sphere channels and H hidden channels.

    Attributes:
        kind: operand kind of every product.
        radial: the radial network; radial_out: its last linear, B -> 6 * 2C.
        first: first SO(2) linear, (3, 4, 2) * 2C -> (A + 3, 4, 2) * H; second: (3, 4, 2) * H -> (3, 4, 2) * C.
        channels: C; hidden: H.
        s2: the grid of an S2 activation (A = 1), which is materialised; None for the gate (A = 2), which is a kernel.
    """

    kind: str
    radial: Radial
    radial_out: BlockWeights
    first: BlockWeights
    second: BlockWeights
    channels: int
    hidden: int
    s2: S2Grid | None = None

    def activate(self, first: Tensor) -> Tensor:
        """The activation in plain PyTorch, on rows [E, (A + 9) * H] -> [E, 9 * H]."""
        shaped = first.unflatten(1, (first.shape[1] // self.hidden, self.hidden))
        out = reference.gate(shaped) if self.s2 is None else reference.s2_activation(shaped, *self.s2)
        return out.flatten(1)


def _matmul(
    x: Operand, weights: BlockWeights, groups: RowGroups | None, transposed: bool = False, biased: bool = True
) -> Operand:
    """A product between two kernels: where operands have eleven bits, so has it."""
    return block_matmul(x, weights, transposed, biased, half=weights.kind == "half", groups=groups)


def _linear(x: Operand, weights: BlockWeights, groups: RowGroups | None) -> Operand:
    """An SO(2) linear, whose bias is left to who reads it: products without one may go to the vendor's library."""
    return dataclasses.replace(_matmul(x, weights, groups, biased=False), bias=weights.bias)


def _activate(first: Operand, w: ConvolutionWeights) -> Operand:
    return gate_forward(first, w.hidden, w.kind) if w.s2 is None else to_operand(w.activate(first.dense()), w.kind)


def _activate_backward(grad: Operand, first: Operand, w: ConvolutionWeights) -> Operand:
    if w.s2 is None:
        return gate_backward(grad, first, w.hidden, w.kind)
    with torch.enable_grad():
        x = first.dense().detach().requires_grad_()
        (found,) = torch.autograd.grad(w.activate(x), x, grad.dense())
    return to_operand(found, w.kind)


class _Part:
    """One chunk's slices of the shared geometry, and its radial weights."""

    def __init__(self, geometry: Geometry, chunk: Chunk) -> None:
        rows = slice(chunk.first, chunk.last)
        self.edges = chunk.edges
        self.vectors, self.distances = geometry.vectors[rows], geometry.distances[rows]
        self.pair, self.weight = geometry.pair[rows], geometry.weight[rows]
        self.weight_slope = geometry.weight_slope[rows]
        self.groups = geometry.groups

    def radial(self, radial: Radial, out: BlockWeights, kind: str) -> Operand:
        """Radial weights [E, R]."""
        return _matmul(radial.hidden(self.distances, self.pair, kind, False)[0], out, self.groups)

    def radial_slope(self, radial: Radial, out: BlockWeights, kind: str) -> Operand:
        """Their derivatives with respect to the distance [E, R]."""
        return _matmul(radial.hidden(self.distances, self.pair, kind, True)[1], out, self.groups, biased=False)


@dataclass
class _Kept:
    """Outputs of one chunk's forward pass; None is computed again."""

    radial: Operand | None = None
    first: Operand | None = None
    second: Operand | None = None


class _EdgeConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, vectors, geometry, w):
        x = x.contiguous()
        sums, kept, keep = [], [], geometry.keep
        for chunk in geometry.chunks:
            part = _Part(geometry, chunk)
            radial = part.radial(w.radial, w.radial_out, w.kind)
            pair = gather_rotate_scale_forward(x, part.vectors, radial, part.edges, w.kind)
            radial = radial if keep.radial else None
            first = _linear(pair, w.first, part.groups)
            del pair
            second = _linear(_activate(first, w), w.second, part.groups)
            sums.append(rotate_back_sum_forward(second, part.vectors, part.weight, part.edges, w.channels))
            kept.append(_Kept(radial, first if keep.first else None, second if keep.second else None))
            del radial, first, second
        ctx.save_for_backward(x, vectors)
        # Not through autograd: the backward pass lets go of each as soon as it is used, which it could not there.
        ctx.kept = kept
        ctx.geometry, ctx.weights = geometry, w
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    @staticmethod
    def backward(ctx, grad):
        x, vectors = ctx.saved_tensors
        geometry, w = ctx.geometry, ctx.weights
        if torch.is_grad_enabled():
            function = functools.partial(edge_convolution_reference, geometry=geometry, w=w)
            return (*reference_gradient(function, (x, vectors), grad), None, None)
        grad = grad.contiguous()
        whole = len(geometry.chunks) == 1
        grad_x = x.new_empty(2, *x.shape) if whole else x.new_zeros(2, *x.shape)
        grad_vectors = torch.empty_like(geometry.vectors)
        for chunk in geometry.chunks:
            part = _Part(geometry, chunk)
            kept = ctx.kept.pop(0) if ctx.kept else _Kept()
            first, z, kept.first, kept.second = kept.first, kept.second, None, None
            if first is None:
                radial = kept.radial or part.radial(w.radial, w.radial_out, w.kind)
                pair = gather_rotate_scale_forward(x, part.vectors, radial, part.edges, w.kind)
                del radial
                first = _linear(pair, w.first, part.groups)
                del pair
            if z is None:
                z = _linear(_activate(first, w), w.second, part.groups)
            grad_z, out_vectors, _ = rotate_back_sum_backward(
                grad, z, part.vectors, part.weight, part.edges, w.kind, part.weight_slope
            )
            del z
            grad_gated = _matmul(grad_z, w.second, part.groups, transposed=True)
            del grad_z
            grad_first = _activate_backward(grad_gated, first, w)
            del grad_gated, first
            grad_pair = _matmul(grad_first, w.first, part.groups, transposed=True)
            del grad_first
            # The radial weights come last: with their slopes they are the largest arrays but one.
            radial = kept.radial or part.radial(w.radial, w.radial_out, w.kind)
            slope = part.radial_slope(w.radial, w.radial_out, w.kind)
            in_vectors, _ = gather_rotate_scale_backward(grad_pair, x, part.vectors, radial, slope, part.edges, grad_x)
            del kept, radial, slope, grad_pair
            torch.add(in_vectors, out_vectors, out=grad_vectors[chunk.first : chunk.last])
        return grad_x[0] + grad_x[1], grad_vectors, None, None


class _EdgeDegree(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors, geometry, radial, out, kind):
        ctx.save_for_backward(vectors)
        ctx.constants = (geometry, radial, out, kind)
        sums = []
        for chunk in geometry.chunks:
            part = _Part(geometry, chunk)
            z = part.radial(radial, out, kind)
            width = z.high.shape[1] // M_BLOCKS[0]
            sums.append(rotate_back_sum_forward(z, part.vectors, part.weight, part.edges, width))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    @staticmethod
    def backward(ctx, grad):
        (vectors,) = ctx.saved_tensors
        geometry, radial, out, kind = ctx.constants
        if torch.is_grad_enabled():
            function = functools.partial(edge_degree_reference, geometry=geometry, radial=radial, out=out)
            return (*reference_gradient(function, (vectors,), grad), None, None, None, None)
        grad = grad.contiguous()
        grad_vectors = torch.empty_like(geometry.vectors)
        for chunk in geometry.chunks:
            part = _Part(geometry, chunk)
            z, slope = part.radial(radial, out, kind), part.radial_slope(radial, out, kind)
            _, found, _ = rotate_back_sum_backward(
                grad, z, part.vectors, part.weight, part.edges, kind, part.weight_slope, slope
            )
            grad_vectors[chunk.first : chunk.last] = found
        return grad_vectors, None, None, None, None


def edge_convolution(x: Tensor, vectors: Tensor, geometry: Geometry, weights: ConvolutionWeights) -> Tensor:
    """The edge convolution of one layer, through the kernels.

    Args:
        x: node features [N, 9, C], l-major, float32 ("double" weights: float64).
        vectors: edge vectors [E, 3], the values of ``geometry.vectors``; the gradient goes here.
        geometry: what depends on the edges alone.
        weights: the layer's weights.

    Returns:
        [N, 9, C]. Second derivatives go through :func:`edge_convolution_reference`.
    """
    return _EdgeConvolution.apply(x, vectors, geometry, weights)


def edge_degree(vectors: Tensor, geometry: Geometry, radial: Radial, out: BlockWeights, kind: str) -> Tensor:
    """The edge-degree embedding [N, 9, C]: radial m = 0 messages, rotated back, weighted and summed."""
    return _EdgeDegree.apply(vectors, geometry, radial, out, kind)


def edge_convolution_reference(x: Tensor, vectors: Tensor, geometry: Geometry, w: ConvolutionWeights) -> Tensor:
    """:func:`edge_convolution` in plain PyTorch, differentiable twice."""
    distances = vectors.norm(dim=1)
    hidden = reference.radial_network(distances, w.radial.pair_bias, geometry.pair, w.radial.layers)
    radial = reference.block_linear(hidden, list(w.radial_out.matrices), w.radial_out.bias)
    pair = reference.gather_rotate_scale(
        x, vectors, radial.view(-1, NUM_RADIAL, 2 * w.channels), geometry.source, geometry.target
    )
    first = reference.block_linear(pair.flatten(1), list(w.first.matrices), w.first.bias)
    z = reference.block_linear(w.activate(first), list(w.second.matrices), w.second.bias)
    weight = reference.envelope(distances, geometry.cutoff)
    return reference.rotate_back_sum(
        z.view(-1, NUM_COEFFICIENTS, w.channels), vectors, weight, geometry.target, geometry.num_nodes
    )


def edge_degree_reference(vectors: Tensor, geometry: Geometry, radial: Radial, out: BlockWeights) -> Tensor:
    """:func:`edge_degree` in plain PyTorch, differentiable twice."""
    distances = vectors.norm(dim=1)
    hidden = reference.radial_network(distances, radial.pair_bias, geometry.pair, radial.layers)
    z = reference.block_linear(hidden, list(out.matrices), out.bias)
    weight = reference.envelope(distances, geometry.cutoff)
    return reference.rotate_back_sum(
        z.view(-1, M_BLOCKS[0], z.shape[1] // M_BLOCKS[0]), vectors, weight, geometry.target, geometry.num_nodes
    )
