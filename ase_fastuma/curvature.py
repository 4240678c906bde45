"""The Hessian of the fused network: tangents forward through every operation, with the adjoints of one evaluation.

The Hessian along directions u, v is the sum over all operations of u S'' v, where S is an operation's outputs times
their adjoints, held fixed, and u and v stand for the tangents of its inputs. The adjoints come from one backward pass;
tangents of all directions then go through the layers side by side.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ase_fastuma.kernels.atomwise_tangent import atomwise_tangent
from ase_fastuma.kernels.convolution import Geometry
from ase_fastuma.kernels.convolution_tangent import (
    Part,
    add_gram,
    convolve_with_adjoints,
    edge_convolution_tangent,
    edge_degree_tangent,
)
from ase_fastuma.kernels.edge import EdgeList
from ase_fastuma.kernels.edge_tangent import Radials
from ase_fastuma.kernels.layout import NUM_COEFFICIENTS
from ase_fastuma.kernels.linear import BlockWeights
from ase_fastuma.kernels.norm_tangent import add_rms_norm_tangent
from ase_fastuma.kernels.radial_tangent import envelope_curvature, hidden_with_curvature, silu_with_derivatives
from ase_fastuma.network import Network, Norm
from ase_fastuma.replay import EdgeInputs, GraphPool, Recorded

# Rows (edges times directions) of the products: enough to fill the largest GPU, and some 0.5 GB of float32 for UMA-S.
_ROWS = 1 << 15
# Rows up to which launching the kernels takes longer than running them, so that a recording is worth its 0.3 GB.
RECORDED_ROWS = 20_000
# Edges of which values and adjoints are there at once: 0.6 GB of float32 for UMA-S.
_EDGES = 16_384
# Arrays of the size of all atoms' tangents that are there at once, at most.
_NODE_ARRAYS = 7


def node_bytes(num_directions: int, num_nodes: int, channels: int, itemsize: int) -> float:
    """What tangents of atoms take, beside the tangents of some edges."""
    return _NODE_ARRAYS * itemsize * NUM_COEFFICIENTS * channels * num_nodes * num_directions


Step = tuple[Tensor, Tensor]
"""What a step of an evaluation gave, and its adjoint."""


@torch.no_grad()
def hessian(
    energy: Tensor,
    trace: Sequence[Tensor],
    network: Network,
    geometry: Geometry,
    inputs: EdgeInputs,
    directions: Tensor,
    balanced: Sequence[slice],
) -> Tensor:
    """Second derivatives of the energy along directions [K, N, 3]: float64 [K, K], symmetric.

    Args:
        energy: what the network gives, with its graph.
        trace: what the evaluation's steps gave, in order: the edge-degree embedding; the residual sum and its norm; and
            for each layer the convolution, sum and norm, the atom-wise MLP, sum and norm.
        network, geometry, inputs: what it was evaluated with.
        directions: in the working precision.
        balanced: channels whose scalars are shifted so that they sum to a constant.
    """
    half = torch.zeros(len(directions), len(directions), dtype=torch.float64, device=directions.device)
    adjoints = torch.autograd.grad(energy, list(trace), materialize_grads=True)
    steps = iter([(value.detach(), adjoint.contiguous()) for value, adjoint in zip(trace, adjoints, strict=True)])
    radials = [network.degree_radial, *(layer.convolution.radial for layer in network.layers)]
    hidden = hidden_with_curvature(geometry.distances, geometry.pair, radials)
    parts = _parts(geometry, inputs, _ROWS // len(directions))

    x, grad = next(steps)
    dx = x.new_empty(len(directions), NUM_COEFFICIENTS, x.shape[0], x.shape[2])
    for part in itertools.chain(*(inner for _, inner in parts)):
        edge_degree_tangent(directions, grad, hidden[0], part, network.degree_out, dx, half)
    dx, dh, h = _normed(dx, None, steps, network.norms[0], half)
    for activations, layer, norm in zip(hidden[1:], network.layers, network.norms[1:], strict=True):
        _, grad = next(steps)
        convolved = torch.empty_like(dx)
        for outer, inner in parts:
            shared = convolve_with_adjoints(h, grad, activations, outer, layer.convolution)
            for part in inner:
                of_part = shared.of_edges(part.first - outer.first, part.last - outer.first)
                edge_convolution_tangent(dh, directions, h, grad, of_part, part, layer.convolution, convolved, half)
        dx, dh, h = _normed(dx, convolved, steps, layer.norm, half)
        _, grad = next(steps)
        update = atomwise_tangent(dh, h, grad, layer.atomwise, half)
        if balanced:
            dx = dx + update
            for channels in balanced:
                scalars = dx[:, 0, :, channels]
                scalars -= scalars.mean(dim=1, keepdim=True)
        dx, dh, h = _normed(dx, None if balanced else update, steps, norm, half)
    _add_head(dh[:, 0], h[:, 0], network.head, half)
    return half + half.T


class Recordings:
    """Hessians of small systems as CUDA graphs: hundreds of kernels, which a GPU runs faster than Python launches them.

    A recording is made the second time that its key is seen, for so many edges as there are then; those of later
    structures are copied to where it reads them. The least recently used give way.
    """

    def __init__(self, kept: int = 4) -> None:
        """`kept` keys stay."""
        self._kept = kept
        self._entries: OrderedDict[Hashable, _Recording | None] = OrderedDict()
        self._pool = GraphPool(self._forget)

    def _forget(self) -> None:
        for key in self._entries:
            self._entries[key] = None

    def run(self, key: Hashable, inputs: EdgeInputs, body: Callable[[EdgeInputs], Tensor]) -> np.ndarray | None:
        """What `body` makes of the edges; None for a key that is new. The key names all that the body reads besides."""
        key = (key, inputs.num_edges)
        if key not in self._entries:
            self._entries[key] = None
        elif self._entries[key] is None:
            self._entries[key] = _Recording.of(inputs, body, self._pool)
        self._entries.move_to_end(key)
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)
        recording = self._entries[key]
        return None if recording is None else recording.run(inputs)


class _Recording(NamedTuple):
    """One Hessian as a CUDA graph, with what it reads."""

    inputs: EdgeInputs
    body: Callable[[EdgeInputs], Tensor]
    recorded: Recorded

    @classmethod
    def of(cls, inputs: EdgeInputs, body: Callable[[EdgeInputs], Tensor], pool: GraphPool) -> _Recording:
        own = EdgeInputs(*(t.clone() for t in inputs))
        return cls(own, body, pool.record(functools.partial(body, own), inputs.numbers.shape[0], inputs.num_edges))

    def run(self, inputs: EdgeInputs) -> np.ndarray:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        return self.recorded.run().numpy().copy()


def _normed(
    dx: Tensor, dy: Tensor | None, steps: Iterator[Step], norm: Norm, half: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of a residual sum and of its norm, and the norm."""
    (total, _), (h, grad) = next(steps), next(steps)
    dx, dh, curved = add_rms_norm_tangent(dx, dy, total, norm.weight, grad)
    add_gram(half, dx.flatten(1, 2), curved.mul_(0.5).flatten(1, 2))
    return dx, dh, h


def _add_head(dx: Tensor, x: Tensor, head: Sequence[BlockWeights], half: Tensor) -> None:
    """The energy MLP's part of the Hessian, for tangents [K, N, C] of the scalars x [N, C]."""
    tangents, slopes, curvatures = [], [], []
    for layer in head[:-1]:
        x, dx = torch.addmm(layer.bias, x, layer.matrices[0]), dx @ layer.matrices[0]
        x, slope, curvature = silu_with_derivatives(x)
        tangents.append(dx)
        slopes.append(slope)
        curvatures.append(curvature)
        dx = dx * slope
    grad = head[-1].matrices[0].T  # [1, H], the same for all atoms
    for layer, dx, slope, curvature in zip(head[-2::-1], tangents[::-1], slopes[::-1], curvatures[::-1], strict=True):
        add_gram(half, dx, 0.5 * grad * curvature * dx)
        grad = (grad * slope) @ layer.matrices[0].T


def _parts(geometry: Geometry, inputs: EdgeInputs, num_edges: int) -> list[tuple[Part, list[Part]]]:
    """All edges in parts of whole target atoms: values and adjoints come for the outer, tangents for the inner parts.

    Inner parts have about `num_edges` edges.
    """
    distances, dtype = geometry.distances, geometry.vectors.dtype
    curvature = envelope_curvature(distances, geometry.cutoff).to(dtype)
    envelope = Radials(geometry.weight, geometry.weight_slope, curvature)
    none = inputs.by_source[:0]

    def part(atoms: tuple[int, int], first: int, last: int) -> Part:
        edges = EdgeList(
            inputs.source[first:last],
            inputs.target[first:last],
            atoms[0],
            inputs.target_start[atoms[0] : atoms[1] + 1] - first,
            by_source=none,
            source_nodes=none,
            source_start=none,
            num_nodes=geometry.num_nodes,
        )
        values = Radials(*(t[first:last] for t in envelope))
        return Part(first, last, edges, geometry.vectors[first:last], values)

    if inputs.num_edges <= min(num_edges, _EDGES):  # nothing to wait for
        whole = part((0, geometry.num_nodes), 0, inputs.num_edges)
        return [(whole, [whole])]
    starts = inputs.target_start.tolist()

    def parts(atoms: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
        """Ranges of atoms with at most so many edges, or of one atom."""
        first, end = atoms
        for atom in range(first + 1, end):
            if starts[atom + 1] - starts[first] > size:
                yield first, atom
                first = atom
        yield first, end

    found = []
    for outer in parts((0, geometry.num_nodes), _EDGES):
        inner = [part(atoms, starts[atoms[0]], starts[atoms[1]]) for atoms in parts(outer, num_edges)]
        found.append((part(outer, starts[outer[0]], starts[outer[1]]), inner))
    return found
