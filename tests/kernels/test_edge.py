"""Gather-rotate-scale and rotate-back-sum: kernels against references, and what rotations must do."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.edge import gather_rotate_scale, rotate_back_sum, sorted_edges
from devices import DEVICES
from edge_graphs import SIZES, random, random_edges, roll_equivariant, roll_invariant
from tolerances import TOLERANCE

F64 = torch.float64
WIDTHS = [1, 6, 16]
# Each size and each width where kernels are interpreted, each with each on a GPU.
CASES = [("cpu", *size, width) for size, width in zip([*SIZES, SIZES[2]], [16, 6, 1, 6, 1, 16], strict=True)]
CASES += [pytest.param("cuda", *size, width, marks=pytest.mark.gpu) for size in SIZES for width in WIDTHS]


def leaves(num_nodes, num_edges, width, device, dtype):
    vectors, edges = random_edges(num_nodes, num_edges, device, dtype)
    x = random((num_nodes, 9, width), device, dtype, 3)
    radial = random((num_edges, 6, 2 * width), device, dtype, 4)
    weight = random((num_edges,), device, dtype, 5)
    return [t.requires_grad_() for t in (x, vectors, radial, weight)], edges


def fused(x, vectors, radial, weight, edges):
    y = gather_rotate_scale(x, vectors, radial, edges)
    z = roll_equivariant(y[:, :, : x.shape[2]])
    return y, rotate_back_sum(z, vectors, weight, edges)


def plain(x, vectors, radial, weight, edges):
    y = reference.gather_rotate_scale(x, vectors, radial, edges.source, edges.target)
    z = roll_equivariant(y[:, :, : x.shape[2]])
    return y, reference.rotate_back_sum(z, vectors, weight, edges.target, edges.num_nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("device", "num_nodes", "num_edges", "width"), CASES)
def test_outputs_and_gradients_equal_the_reference(device, num_nodes, num_edges, width, dtype):
    inputs, edges = leaves(num_nodes, num_edges, width, device, dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    outputs, expected = fused(*inputs, edges), plain(*exact, edges)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])
    upstream = random((num_nodes, 9, width), device, F64, 6)
    got = torch.autograd.grad((outputs[1] * upstream.to(dtype)).sum(), inputs)
    wanted = torch.autograd.grad((expected[1] * upstream).sum(), exact)
    for name, g, w in zip(("x", "vectors", "radial", "weight"), got, wanted, strict=True):
        torch.testing.assert_close(g.double(), w, **TOLERANCE[dtype], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("device", DEVICES)
def test_radial_messages_alone(device):
    vectors, edges = random_edges(4, 11, device, F64)
    inputs = [vectors, random((11, 3, 5), device, F64), random((11,), device, F64, 1)]
    inputs = [t.requires_grad_() for t in inputs]
    vectors, z, weight = inputs
    got = rotate_back_sum(z, vectors, weight, edges)
    want = reference.rotate_back_sum(z, vectors, weight, edges.target, 4)
    torch.testing.assert_close(got, want)
    upstream = random((4, 9, 5), device, F64, 2)
    pairs = zip(
        torch.autograd.grad((got * upstream).sum(), inputs),
        torch.autograd.grad((want * upstream).sum(), inputs),
        strict=True,
    )
    for g, w in pairs:
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_against_finite_differences(device):
    inputs, edges = leaves(2, 3, 1, device, F64)

    def scalar(x, vectors, radial, weight):
        y, out = fused(x, vectors, radial, weight, edges)
        return roll_invariant(y) + (out * torch.sin(out)).sum()

    assert torch.autograd.gradcheck(scalar, inputs, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_against_finite_differences(device):
    inputs, edges = leaves(2, 3, 1, device, F64)

    def scalar(x, vectors, radial, weight):
        y, out = fused(x, vectors, radial, weight, edges)
        return roll_invariant(y) + (out * torch.sin(out)).sum()

    assert torch.autograd.gradgradcheck(scalar, inputs, fast_mode=True)


def test_frames_turn_edges_onto_the_polar_axis():
    vectors, _ = random_edges(5, 50, "cpu", F64)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    turned = torch.einsum("eij,ej->ei", reference.edge_frame(vectors), unit)
    torch.testing.assert_close(turned, torch.tensor([0.0, 1.0, 0.0], dtype=F64).expand(50, 3))
    frames = reference.edge_frame(vectors)
    torch.testing.assert_close(frames @ frames.mT, torch.eye(3, dtype=F64).expand(50, 3, 3))
    torch.testing.assert_close(torch.linalg.det(frames), torch.ones(50, dtype=F64))


def test_wigner_matrices_are_a_representation():
    first, second = (reference.edge_frame(random((20, 3), "cpu", F64, seed)) for seed in (1, 2))
    for d_first, d_second, d_both in zip(
        reference.wigner(first), reference.wigner(second), reference.wigner(first @ second), strict=True
    ):
        torch.testing.assert_close(d_first @ d_second, d_both)


@pytest.mark.parametrize("device", DEVICES)
def test_messages_turn_with_the_atoms(device):
    """Rotating features and edges together rotates the sums."""
    (x, vectors, radial, weight), edges = leaves(4, 17, 6, device, F64)
    rotation = reference.edge_frame(random((1, 3), device, F64, 9))
    turn = lambda t: reference.rotate(t, rotation.expand(t.shape[0], 3, 3))  # noqa: E731
    _, out = fused(x, vectors, radial, weight, edges)
    _, turned = fused(turn(x), vectors @ rotation[0].T, radial, weight, edges)
    torch.testing.assert_close(turned, turn(out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(device, dtype):
    inputs, edges = leaves(3, 7, 6, device, torch.float32)
    halves = [t.detach().to(dtype) for t in inputs]
    for got, want in zip(fused(*halves, edges), fused(*(t.float() for t in halves), edges), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_inputs(device):
    (x, vectors, radial, weight), edges = leaves(3, 7, 6, device, F64)
    strided = [t.detach().transpose(0, -1).contiguous().transpose(0, -1) for t in (x, vectors, radial)]
    for got, want in zip(fused(*strided, weight, edges), fused(x, vectors, radial, weight, edges), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_bad_arguments_are_named():
    (x, vectors, radial, weight), edges = leaves(3, 7, 4, "cpu", F64)
    with pytest.raises(ValueError, match=r"radial: expected shape \[7, 6, 8\], got \[7, 6, 4\]"):
        gather_rotate_scale(x, vectors, radial[:, :, :4], edges)
    with pytest.raises(ValueError, match=r"x: expected shape \[3, 9, any\], got \[2, 9, 4\]"):
        gather_rotate_scale(x[:2], vectors, radial, edges)
    with pytest.raises(ValueError, match=r"vectors: expected shape \[any, 3\], got \[7, 2\]"):
        gather_rotate_scale(x, vectors[:, :2], radial, edges)
    with pytest.raises(TypeError, match=r"radial: expected torch.float64 like the other arguments, got torch.float32"):
        gather_rotate_scale(x, vectors, radial.float(), edges)
    with pytest.raises(ValueError, match=r"z: expected shape \[7, 9, any\], got \[7, 8, 4\]"):
        rotate_back_sum(torch.zeros(7, 8, 4, dtype=F64), vectors, weight, edges)
    with pytest.raises(ValueError, match=r"weight: expected shape \[7\], got \[6\]"):
        rotate_back_sum(torch.zeros(7, 9, 4, dtype=F64), vectors, weight[:6], edges)
    with pytest.raises(TypeError, match=r"edges.source: expected int32 or int64, got torch.float32"):
        gather_rotate_scale(x, vectors, radial, edges._replace(source=edges.source.float()))
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"edges.source: expected shape \[7\], got \[0\]"):
        gather_rotate_scale(x, vectors, radial, sorted_edges(empty, empty, 3))
