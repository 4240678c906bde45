"""Second derivatives of the edge operations: kernels against the references differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.edge_tangent import (
    Radials,
    gather_rotate_scale_curvature,
    gather_rotate_scale_tangent,
    rotate_back_sum_curvature,
    rotate_back_sum_tangent,
)
from devices import DEVICES
from edge_graphs import random, random_edges
from tolerances import TOLERANCE

F64 = torch.float64


def taylor(radials: Radials, vectors: torch.Tensor) -> torch.Tensor:
    """A function of the lengths with these derivatives."""
    length = vectors.norm(dim=1)
    step = (length - length.detach()).view(-1, *(1,) * (radials.value.dim() - 1))
    return radials.value + step * radials.slope + step**2 / 2 * radials.curvature


def radials(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int) -> Radials:
    return Radials(*(random(shape, device, dtype, seed + i) for i in range(3)))


def displacements(num_directions: int, num_edges: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Edges that move, some along no direction at all."""
    dv = random((num_directions, num_edges, 3), device, dtype, 7)
    return dv * (torch.arange(num_edges, device=device) % 3 > 0)[:, None]


def node_tangents(dx: torch.Tensor) -> torch.Tensor:
    """[K, N, 9, C] as the kernels read it."""
    return dx.transpose(1, 2).contiguous()


def exactly(function, inputs, tangents, grad):
    """Tangents of a reference's output; cross and curvature with respect to the last input, the edge vectors [E, 3]."""
    inputs, tangents, grad = [t.double() for t in inputs], [t.double() for t in tangents], grad.double()
    features_alone = [*tangents[:-1], torch.zeros_like(tangents[-1])]
    tangent, _ = reference.second_order(function, inputs, tangents, grad)
    _, (*_, cross) = reference.second_order(function, inputs, features_alone, grad)
    axes = torch.eye(3, dtype=F64, device=grad.device)[:, None].expand(3, inputs[-1].shape[0], 3)
    still = [torch.zeros(3, *t.shape, dtype=F64, device=grad.device) for t in inputs[:-1]]
    _, (*_, curvature) = reference.second_order(function, inputs, [*still, axes], grad)
    return tangent, cross, curvature.permute(1, 2, 0)


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want, **{k: 10 * t for k, t in TOLERANCE[dtype].items()})


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("num_nodes", "num_edges", "width", "num_directions"), [(4, 11, 6, 5), (1, 0, 3, 2)])
@pytest.mark.parametrize("device", DEVICES)
def test_gather_rotate_scale(device, num_nodes, num_edges, width, num_directions, dtype):
    vectors, edges = random_edges(num_nodes, num_edges, device, dtype)
    x = random((num_nodes, 9, width), device, dtype, 1)
    dx = random((num_directions, num_nodes, 9, width), device, dtype, 2)
    dv = displacements(num_directions, num_edges, device, dtype)
    radial = radials((num_edges, 6, 2 * width), device, dtype, 3)
    grad = random((num_edges, 9, 2 * width), device, dtype, 6)
    exact = Radials(*(r.double() for r in radial))

    def plain(x, vectors):
        return reference.gather_rotate_scale(x, vectors, taylor(exact, vectors), edges.source, edges.target)

    tangent, cross, curvature = exactly(plain, [x, vectors], [dx, dv], grad)
    flat = Radials(*(r.flatten(1) for r in radial))
    kind = "double" if dtype == F64 else "split"
    args = (x, vectors, dv, flat.value, flat.slope, grad.flatten(1), edges, kind)
    out, found = gather_rotate_scale_tangent(node_tangents(dx), *args)
    close(out.dense().view(num_directions, num_edges, 9, 2 * width), tangent, dtype)
    close(found, cross, dtype)
    close(gather_rotate_scale_curvature(x, vectors, flat, grad.flatten(1), edges), curvature, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("num_nodes", "num_edges", "width", "num_directions"), [(4, 11, 6, 5), (1, 0, 3, 2)])
@pytest.mark.parametrize("device", DEVICES)
def test_rotate_back_sum(device, num_nodes, num_edges, width, num_directions, dtype):
    vectors, edges = random_edges(num_nodes, num_edges, device, dtype)
    z, grad = random((num_edges, 9, width), device, dtype, 1), random((num_nodes, 9, width), device, dtype, 6)
    dz = random((num_directions, num_edges, 9, width), device, dtype, 2)
    dv = displacements(num_directions, num_edges, device, dtype)
    weight = radials((num_edges,), device, dtype, 3)
    exact = Radials(*(w.double() for w in weight))

    def plain(z, vectors):
        return reference.rotate_back_sum(z, vectors, taylor(exact, vectors), edges.target, num_nodes)

    tangent, cross, curvature = exactly(plain, [z, vectors], [dz, dv], grad)
    out = torch.empty(num_directions, 9, num_nodes, width, device=device, dtype=dtype)
    flat = z.flatten(1)
    found = rotate_back_sum_tangent(dz.view(-1, 9 * width), flat, vectors, dv, weight, grad, edges, out)
    close(out.transpose(1, 2), tangent, dtype)
    close(found, cross, dtype)
    start = torch.ones(num_edges, 3, 3, device=device, dtype=dtype)
    close(rotate_back_sum_curvature(flat, vectors, weight, grad, edges, start) - 1, curvature, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_messages_that_are_functions_of_the_length(device):
    num_nodes, num_edges, width, num_directions = 4, 7, 6, 3
    vectors, edges = random_edges(num_nodes, num_edges, device, F64)
    z, grad = radials((num_edges, 3, width), device, F64, 1), random((num_nodes, 9, width), device, F64, 6)
    dv, weight = displacements(num_directions, num_edges, device, F64), radials((num_edges,), device, F64, 3)

    def plain(vectors):
        z_of, w_of = taylor(z, vectors), taylor(weight, vectors)
        return reference.rotate_back_sum(z_of, vectors, w_of, edges.target, num_nodes)

    tangent, _, curvature = exactly(plain, [vectors], [dv], grad)
    out = torch.empty(num_directions, 9, num_nodes, width, device=device, dtype=F64)
    flat = Radials(*(t.flatten(1) for t in z))
    assert rotate_back_sum_tangent(None, flat, vectors, dv, weight, grad, edges, out) is None
    close(out.transpose(1, 2), tangent, F64)
    close(rotate_back_sum_curvature(flat, vectors, weight, grad, edges), curvature, F64)
