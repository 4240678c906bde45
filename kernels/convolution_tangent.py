"""Second derivatives of the edge convolution: tangents along K directions, and the convolution's part of the Hessian.

The Hessian of an energy is the sum over its operations of bilinear forms of their inputs' tangents, with the adjoints
of their outputs held fixed. So tangents go forward once for each direction and nothing comes back: half of the products
of forward-over-reverse, and no more memory than some edges take for all directions. What is linear has no such form;
the gate has one, and the dependence on the edge vectors (:mod:`.gate_tangent`, :mod:`.edge_tangent`). Halves of them
are added up: their sum and its transpose make the Hessian.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .convolution import ConvolutionWeights
from .edge import EdgeList, gather_rotate_scale_forward, rotate_back_sum_backward
from .edge_tangent import (
    Radials,
    gather_rotate_scale_curvature,
    gather_rotate_scale_tangent,
    rotate_back_sum_curvature,
    rotate_back_sum_tangent,
)
from .gate import gate_backward, gate_forward
from .gate_tangent import NUM_HEAD, gate_tangent
from .linear import BlockWeights, block_matmul
from .operand import Operand, plain_operand, to_operand

_GRAM_NUMBERS = 1 << 24
"""Numbers of the products that are made before they are summed: 64 MB."""
_GRAM_PRODUCTS = 64
"""Products side by side: with tiles of 128 rows and columns some hundred directions fill a GPU."""


class Part(NamedTuple):
    """The edges into a range of atoms, as all layers see them.

    Attributes:
        first, last: these are the edges first : last.
        edges: their indices; those by source are not there.
        vectors: [E, 3] in A.
        envelope: weights of messages [E], and their derivatives.
    """

    first: int
    last: int
    edges: EdgeList
    vectors: Tensor
    envelope: Radials

    def displacements(self, directions: Tensor) -> Tensor:
        """Tangents of the edge vectors [K, E, 3] for tangents of the positions [K, N, 3]."""
        return directions[:, self.edges.source] - directions[:, self.edges.target]


def add_gram(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += sum over rows r of a[:, r] b[:, r]^T.

    Args:
        total: OUTPUT [K, K], float64; added to.
        a, b: [K, R, M].
    """
    num_rows, depth = a.shape[1:]
    group = num_rows // _GRAM_PRODUCTS
    if group > 1 and a.stride(1) == b.stride(1) == depth:  # rows that follow one another are one
        whole = num_rows // group * group
        grouped = [t[:, :whole].unflatten(1, (-1, group)).flatten(2) for t in (a, b)]
        add_gram(total, *grouped)
        a, b = a[:, whole:], b[:, whole:]
    step = max(1, _GRAM_NUMBERS // total.numel())
    for rows in range(0, a.shape[1], step):
        products = a[:, rows : rows + step].transpose(0, 1) @ b[:, rows : rows + step].permute(1, 2, 0)
        total += products.sum(dim=0, dtype=torch.float64)


def _add_geometry(total: Tensor, cross: Tensor, curvature: Tensor, dv: Tensor) -> None:
    """Half of what edge vectors have in the Hessian: with features by `cross`, with themselves by `curvature`."""
    half = cross + 0.5 * torch.einsum("eij,kej->kei", curvature, dv)
    total.addmm_(half.flatten(1).double(), dv.flatten(1).double().T)


def _radials(hidden: Tensor, part: Part, out: BlockWeights) -> Radials:
    """The last linear of a radial network, from its hidden activations and their derivatives [3, E, B]."""
    value, *slopes = hidden[:, part.first : part.last]
    both = block_matmul(to_operand(torch.cat(slopes), out.kind), out, biased=False).high
    return Radials(block_matmul(to_operand(value, out.kind), out).high, *both.chunk(2))


class Convolved(NamedTuple):
    """What the convolution makes of some edges, and the adjoints of it: all that tangents share.

    | field | shape | meaning |
    |---|---|---|
    | radial | [E, 6 * 2C] | radial weights, and their slopes (1/A) |
    | first, z | [E, (A + 9) * H], [E, 9 * C] | outputs of the two SO(2) linears |
    | grad_pair, grad_gated | [E, 9 * 2C], [E, 9 * H] | adjoints of the linears' inputs |
    | curvature | [E, 3, 3] | second derivatives with respect to the edge vectors |
    """

    radial: Tensor
    radial_slope: Tensor
    first: Tensor
    z: Tensor
    grad_pair: Tensor
    grad_gated: Tensor
    curvature: Tensor

    def of_edges(self, first: int, last: int) -> Convolved:
        """Those of the edges first : last among these."""
        return Convolved(*(t[first:last] for t in self))


def convolve_with_adjoints(x: Tensor, grad: Tensor, hidden: Tensor, part: Part, w: ConvolutionWeights) -> Convolved:
    """Evaluate the convolution forward and backward for some edges, through the kernels.

    Args:
        x: node features [N, 9, C], l-major; grad: adjoint of the convolution [N, 9, C].
        hidden: hidden activations of the radial network of all edges, and their derivatives [3, E, B].
        part: some of the edges.
        w: the layer's weights, not of kind "half".
    """
    vectors, edges, envelope = part.vectors, part.edges, part.envelope
    radial = _radials(hidden, part, w.radial_out)
    pair = gather_rotate_scale_forward(x, vectors, plain_operand(radial.value), edges, w.kind)
    first = block_matmul(pair, w.first)
    del pair
    gated = gate_forward(first, w.hidden, w.kind) if w.s2 is None else to_operand(w.activate(first.high), w.kind)
    z = block_matmul(gated, w.second)
    del gated
    grad_z, _, _ = rotate_back_sum_backward(grad, z, vectors, envelope.value, edges, w.kind, envelope.slope)
    assert grad_z is not None
    grad_gated = block_matmul(grad_z, w.second, transposed=True)
    del grad_z
    if w.s2 is None:
        grad_first = gate_backward(grad_gated, first, w.hidden, w.kind)
    else:
        grad_first = to_operand(torch.func.vjp(w.activate, first.high)[1](grad_gated.high)[0], w.kind)
    grad_pair = block_matmul(grad_first, w.first, transposed=True).high
    curvature = gather_rotate_scale_curvature(x, vectors, radial, grad_pair, edges)
    rotate_back_sum_curvature(z.high, vectors, envelope, grad, edges, curvature)
    return Convolved(radial.value, radial.slope, first.high, z.high, grad_pair, grad_gated.high, curvature)


def edge_convolution_tangent(
    dx: Tensor,
    directions: Tensor,
    x: Tensor,
    grad: Tensor,
    convolved: Convolved,
    part: Part,
    w: ConvolutionWeights,
    out: Tensor,
    half_hessian: Tensor,
) -> None:
    """Tangents of :func:`.convolution.edge_convolution` for some edges, through the kernels.

    Args:
        dx: tangents of the node features [K, 9, N, C]; directions: of the positions [K, N, 3].
        x, grad, part, w: as for :func:`convolve_with_adjoints`; convolved: what that gives.
        out: OUTPUT [K, 9, N, C], the tangents; those of the part's atoms are written.
        half_hessian: OUTPUT [K, K], float64; added to.
    """
    vectors, edges, c = part.vectors, part.edges, convolved
    dv = part.displacements(directions)
    pair, cross = gather_rotate_scale_tangent(dx, x, vectors, dv, c.radial, c.radial_slope, c.grad_pair, edges, w.kind)
    first = block_matmul(pair, w.first, biased=False).high.view(*dv.shape[:2], -1)
    del pair
    gated = _activation_tangent(first, c.first, c.grad_gated, w, half_hessian)
    del first
    dz = block_matmul(gated, w.second, biased=False).high
    del gated
    cross += rotate_back_sum_tangent(dz, c.z, vectors, dv, part.envelope, grad, edges, out)
    _add_geometry(half_hessian, cross, c.curvature, dv)


def _activation_tangent(t: Tensor, first: Tensor, grad: Tensor, w: ConvolutionWeights, half_hessian: Tensor) -> Operand:
    """Tangents [K * E, 9 * H] through the activation, for tangents [K, E, (A + 9) * H] of its inputs."""
    if w.s2 is None:
        out, half = gate_tangent(t, first, grad, w.kind)
        add_gram(half_hessian, t[..., : NUM_HEAD * w.hidden], half)
        return out
    tangent, (curved,) = reference.second_order(w.activate, [first], [t], grad)
    add_gram(half_hessian, t, curved.mul_(0.5))
    return to_operand(tangent.flatten(0, 1), w.kind)


def edge_degree_tangent(
    directions: Tensor, grad: Tensor, hidden: Tensor, part: Part, radial_out: BlockWeights, out: Tensor, half: Tensor
) -> None:
    """Tangents of :func:`.convolution.edge_degree` for some edges; arguments as for the convolution."""
    dv, z = part.displacements(directions), _radials(hidden, part, radial_out)
    rotate_back_sum_tangent(None, z, part.vectors, dv, part.envelope, grad, part.edges, out)
    curvature = rotate_back_sum_curvature(z, part.vectors, part.envelope, grad, part.edges)
    _add_geometry(half, torch.zeros_like(dv), curvature, dv)
