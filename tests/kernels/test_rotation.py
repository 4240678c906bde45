"""Stored rotations: kernels against dense products, the two layouts against each other, and what rotations must do."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.layout import DEGREE_SLICES
from ase_fastuma.kernels.rotation import edge_rotation, pack, rotate, rotate_back, unpack
from devices import DEVICES
from edge_graphs import random, random_edges, roll_invariant
from tolerances import TOLERANCE

F64 = torch.float64
LAYOUTS = ["compact", "dense"]


def off_the_blocks() -> torch.Tensor:
    """Mask [9, 9] of what belongs to no block."""
    mask = torch.ones(9, 9, dtype=torch.bool)
    for rows in DEGREE_SLICES:
        mask[rows, rows] = False
    return mask


def blocks(num_edges: int, layout: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Random blocks, no rotations: every entry counts."""
    compact = random((num_edges, 35), device, dtype, 7)
    return compact if layout == "compact" else unpack(compact)


def harmonics(r: torch.Tensor) -> torch.Tensor:
    """Real spherical harmonics of unit vectors [..., 3], l = 0, 1, 2, written out in m = -l ... l, polar axis y."""
    x, y, z = r.unbind(-1)
    root = 3**0.5
    second = [root * x * z, root * x * y, (3 * y * y - 1) / 2, root * y * z, root / 2 * (z * z - x * x)]
    return torch.stack([torch.ones_like(x), x, y, z, *second], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_edges", "width"), [(0, 6), (1, 1), (7, 5), (3, 96)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_and_gradients_equal_dense_products(device, layout, num_edges, width, dtype):
    x = random((num_edges, 9, width), device, dtype, 1).requires_grad_()
    rotation = blocks(num_edges, layout, device, dtype).requires_grad_()
    upstream = random((num_edges, 9, width), device, F64, 2)
    exact_x = x.detach().double().requires_grad_()
    exact = rotation.detach().double().requires_grad_()
    matrices = unpack(exact) if layout == "compact" else exact
    for function, matrix in ((rotate, matrices), (rotate_back, matrices.mT)):
        got, want = function(x, rotation), torch.bmm(matrix, exact_x)
        torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])
        grad_x, grad = torch.autograd.grad(got, (x, rotation), upstream.to(dtype))
        want_x, want_grad = torch.autograd.grad(want, (exact_x, exact), upstream, retain_graph=True)
        torch.testing.assert_close(grad_x.double(), want_x, **TOLERANCE[dtype])
        assert grad.shape == rotation.shape
        if layout == "dense":
            want_grad = want_grad.masked_fill(off_the_blocks().to(device), 0)
            assert not grad[:, off_the_blocks()].any()
        torch.testing.assert_close(grad.double(), want_grad, **TOLERANCE[dtype])
        (alone,) = torch.autograd.grad(function(x, rotation.detach()), x, upstream.to(dtype))
        torch.testing.assert_close(alone, grad_x, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [rotate, rotate_back])
@pytest.mark.parametrize("device", DEVICES)
def test_reference_equals_dense_products(device, function, layout):
    """The path of the CPU and of second derivatives, against the same oracle as the kernels."""
    x, rotation = random((7, 9, 3), device, F64, 1), blocks(7, layout, device, F64)
    matrices = unpack(rotation) if layout == "compact" else rotation
    want = torch.bmm(matrices if function is rotate else matrices.mT, x)
    torch.testing.assert_close(getattr(reference, function.__name__)(x, rotation), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [rotate, rotate_back])
@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences(device, function, layout):
    x = random((2, 9, 1), device, F64, 1).requires_grad_()
    compact = random((2, 35), device, F64, 7).requires_grad_()

    def apply(x, compact):  # the entries off the blocks are not varied: there the gradient is zero by definition
        return function(x, compact if layout == "compact" else unpack(compact))

    assert torch.autograd.gradcheck(apply, (x, compact), fast_mode=True)
    assert torch.autograd.gradgradcheck(apply, (x, compact), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_edges", [0, 1, 13])
@pytest.mark.parametrize("device", DEVICES)
def test_packing_is_bitwise(device, num_edges, dtype):
    dense = random((num_edges, 9, 9), device, dtype).requires_grad_()
    compact = pack(dense)
    assert compact.shape == (num_edges, 35)
    assert compact.dtype == dtype
    at = 0
    for rows in DEGREE_SLICES:
        block = dense[:, rows, rows].flatten(1)
        assert torch.equal(compact[:, at : at + block.shape[1]], block)
        at += block.shape[1]
    spread = unpack(compact)
    assert torch.equal(pack(spread), compact)
    assert torch.equal(spread, dense.masked_fill(off_the_blocks().to(device), 0))
    upstream = random((num_edges, 35), device, dtype, 1)
    (grad,) = torch.autograd.grad(compact, dense, upstream)
    assert torch.equal(grad, unpack(upstream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_both_layouts_agree_bitwise_down_to_the_edge_vectors(device, dtype):
    vectors, _ = random_edges(3, 7, device, dtype)
    x, upstream = random((7, 9, 6), device, dtype, 1), random((7, 9, 6), device, dtype, 2)
    outcomes = []
    for make in (edge_rotation, lambda v: edge_rotation(v, "dense"), lambda v: pack(edge_rotation(v, "dense"))):
        leaf, features = vectors.clone().requires_grad_(), x.clone().requires_grad_()
        rotation = make(leaf)
        turned = rotate(features, rotation)
        back = rotate_back(torch.sin(turned), rotation)
        outcomes.append((turned, back, *torch.autograd.grad((back * upstream).sum(), (leaf, features))))
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))
    assert torch.equal(edge_rotation(vectors, "dense"), unpack(edge_rotation(vectors)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_edge_vectors_against_finite_differences(device, layout):
    """A gradient with respect to the vectors is right for what no roll about an edge changes."""
    vectors, _ = random_edges(2, 3, device, F64)
    x = random((3, 9, 1), device, F64, 1)

    def scalar(x, vectors):
        return roll_invariant(rotate(x, edge_rotation(vectors, layout))[:, list(reference.M_MAJOR)])

    assert torch.autograd.gradcheck(scalar, (x.requires_grad_(), vectors.requires_grad_()), fast_mode=True)
    assert torch.autograd.gradgradcheck(scalar, (x, vectors), fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_features_turn_as_spherical_harmonics_do(device, layout):
    """D Y(r) = Y(R r), for rotations whose D1 is read in the order x, y, z of the harmonics of l = 1."""
    vectors, _ = random_edges(3, 7, device, F64)
    points = torch.nn.functional.normalize(random((4, 3), device, F64, 3), dim=1)
    features = harmonics(points).T.expand(7, 9, 4)
    turned = torch.einsum("eij,pj->epi", reference.edge_frame(vectors), points)
    torch.testing.assert_close(rotate(features, edge_rotation(vectors, layout)), harmonics(turned).mT)
    towards_edge = harmonics(torch.nn.functional.normalize(vectors, dim=1))[:, :, None]
    polar = harmonics(torch.tensor([0.0, 1.0, 0.0], dtype=F64, device=device)).view(1, 9, 1).expand(7, 9, 1)
    torch.testing.assert_close(rotate(towards_edge, edge_rotation(vectors, layout)), polar)


@pytest.mark.parametrize("device", DEVICES)
def test_rotations_are_orthogonal_and_compose(device):
    dense = edge_rotation(random_edges(3, 7, device, F64)[0], "dense")
    torch.testing.assert_close(dense @ dense.mT, torch.eye(9, dtype=F64, device=device).expand(7, 9, 9))
    x = random((7, 9, 6), device, F64)
    torch.testing.assert_close(rotate_back(rotate(x, dense), dense), x)
    torch.testing.assert_close(rotate(rotate_back(x, pack(dense)), pack(dense)), x)
    first, second = (reference.edge_frame(random((7, 3), device, F64, seed)) for seed in (1, 2))
    both = reference.compact_rotation(second @ first)
    one_by_one = rotate(rotate(x, reference.compact_rotation(first)), reference.compact_rotation(second))
    torch.testing.assert_close(one_by_one, rotate(x, both))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_half_inputs_are_computed_in_float32(device, dtype, layout):
    vectors, x = random((5, 3), device, dtype), random((5, 9, 6), device, dtype, 1)
    rotation = edge_rotation(vectors, layout)
    assert rotation.dtype == torch.float32
    assert torch.equal(rotation, edge_rotation(vectors.float(), layout))
    for function in (rotate, rotate_back):
        got = function(x, rotation.to(dtype))
        assert got.dtype == torch.float32
        assert torch.equal(got, function(x.float(), rotation.to(dtype).float()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_strided_inputs(device, layout):
    x, rotation = random((7, 9, 6), device, F64), blocks(7, layout, device, F64)
    strided = [t.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for t in (x, rotation)]
    plain = [t.clone().requires_grad_() for t in (x, rotation)]
    upstream = random((6, 9, 7), device, F64, 1).transpose(0, 2)
    for got, want in zip(
        torch.autograd.grad(rotate(*strided), strided, upstream),
        torch.autograd.grad(rotate(*plain), plain, upstream.contiguous()),
        strict=True,
    ):
        assert torch.equal(got, want)


X, D, V = torch.zeros(7, 9, 4), torch.zeros(7, 35), torch.zeros(7, 3)
SHAPES = r"\[7, 35\] or \[7, 9, 9\]"
REFUSED = [
    (rotate, (X[:, :8], D), ValueError, r"x: expected shape \[any, 9, any\], got \[7, 8, 4\]"),
    (rotate, (X[:, :, 0], D), ValueError, r"x: expected shape \[any, 9, any\], got \[7, 9\]"),
    (rotate, (X.int(), D), TypeError, r"x: expected a floating-point tensor, got torch.int32"),
    (rotate, (X.numpy(), D), TypeError, r"x: expected a tensor \[any, 9, any\], got ndarray"),
    (rotate, (X, torch.zeros(7, 9)), ValueError, rf"rotation: expected shape {SHAPES}, got \[7, 9\]"),
    (rotate, (X, torch.zeros(7, 81)), ValueError, rf"rotation: expected shape {SHAPES}, got \[7, 81\]"),
    (rotate, (X, torch.zeros(7, 3, 3)), ValueError, rf"rotation: expected shape {SHAPES}, got \[7, 3, 3\]"),
    (rotate, (X, torch.zeros(7, 1, 35)), ValueError, rf"rotation: expected shape {SHAPES}, got \[7, 1, 35\]"),
    (rotate, (X, torch.zeros(35)), ValueError, rf"rotation: expected shape {SHAPES}, got \[35\]"),
    (rotate, (X, torch.tensor(1.0)), ValueError, rf"rotation: expected shape {SHAPES}, got \[\]"),
    (rotate, (X, D[:6]), ValueError, r"rotation: expected shape \[7, 35\], got \[6, 35\]"),
    (rotate, (X, torch.zeros(1, 9, 9)), ValueError, r"rotation: expected shape \[7, 9, 9\], got \[1, 9, 9\]"),
    (rotate, (X, D.long()), TypeError, r"rotation: expected a floating-point tensor, got torch.int64"),
    (rotate, (X, None), TypeError, rf"rotation: expected a tensor {SHAPES}, got NoneType"),
    (rotate, (X, D.double()), TypeError, r"rotation: expected torch.float32 like the other arguments, got torch.flo"),
    (rotate, (X.half(), D.double()), TypeError, r"rotation: expected torch.float16 like the other arguments, got tor"),
    (rotate, (X, D.to("meta")), ValueError, r"rotation: expected device cpu, got meta"),
    (edge_rotation, (V[:, :2],), ValueError, r"vectors: expected shape \[any, 3\], got \[7, 2\]"),
    (edge_rotation, (V.int(),), TypeError, r"vectors: expected a floating-point tensor, got torch.int32"),
    (edge_rotation, (V, "full"), ValueError, r"layout: expected one of \['compact', 'dense'\], got 'full'"),
    (pack, (D,), ValueError, r"dense: expected shape \[any, 9, 9\], got \[7, 35\]"),
    (pack, (torch.zeros(7, 9, 9).int(),), TypeError, r"dense: expected a floating-point tensor, got torch.int32"),
    (unpack, (torch.zeros(7, 9, 9),), ValueError, r"compact: expected shape \[any, 35\], got \[7, 9, 9\]"),
    (unpack, (D.int(),), TypeError, r"compact: expected a floating-point tensor, got torch.int32"),
]
REFUSED += [(rotate_back, *rest) for function, *rest in REFUSED if function is rotate]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), REFUSED)
def test_bad_arguments_are_named(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)
