"""The atom-wise MLP: kernel against reference, derivatives, and what one atom or one coefficient must not change."""

from __future__ import annotations

import math

import pytest
import torch
from ase_fastuma.kernels import atomwise as module
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.atomwise import atomwise, atomwise_weights
from devices import DEVICES
from edge_graphs import random
from tolerances import TOLERANCE

# Largest relative error of a coefficient's row against float64: 22 bits an operand, twice in a row, and float32 sums.
# Torch's own float32 products ("single") are held to the same.
ERROR = {"double": 1e-14, "single": 2e-6, "split": 2e-6, "half": 2e-6}


def plain_weights(channels, hidden, device):
    """Weights in float64, of a size that keeps values of order 1."""

    def matrix(rows, columns, seed):
        return random((rows, columns), device, torch.float64, seed) / math.sqrt(rows)

    return {
        "gates": matrix(channels, 2 * hidden, 1),
        "gates_bias": random((2 * hidden,), device, torch.float64, 2),
        "first": tuple(matrix(channels, hidden, 3 + degree) for degree in range(3)),
        "first_bias": random((hidden,), device, torch.float64, 6),
        "second": tuple(matrix(hidden, channels, 7 + degree) for degree in range(3)),
        "second_bias": random((channels,), device, torch.float64, 10),
    }


def row_error(got, want):
    return ((got.double() - want).norm(dim=2) / want.norm(dim=2)).max().item() if len(want) else 0.0


@pytest.mark.parametrize(
    ("kind", "channels", "hidden", "num_nodes"),
    [
        ("split", 16, 16, 0),
        ("split", 16, 16, 1),
        ("split", 16, 48, 37),
        ("split", 24, 16, 13),
        ("split", 96, 24, 2),
        ("half", 128, 128, 3),
        ("single", 24, 16, 13),
        ("double", 24, 16, 13),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_output_and_gradient_equal_the_reference(device, kind, channels, hidden, num_nodes):
    plain = plain_weights(channels, hidden, device)
    weights = atomwise_weights(**plain, kind=kind)
    exact = random((num_nodes, 9, channels), device, torch.float64).float().double()
    exact[1:2] = 0
    exact.requires_grad_()
    x = exact.detach().to(weights.gates.dtype).requires_grad_()
    got, want = atomwise(x, weights), reference.atomwise(exact, **plain)
    assert got.shape == want.shape
    nonzero = [i for i in range(num_nodes) if i != 1]
    assert row_error(got[nonzero], want[nonzero]) < ERROR[kind]
    torch.testing.assert_close(got[1:2].double(), want[1:2], **TOLERANCE[got.dtype])
    upstream = random((num_nodes, 9, channels), device, torch.float64, 20)
    (grad,) = torch.autograd.grad(got, x, upstream.to(got.dtype))
    (grad_want,) = torch.autograd.grad(want, exact, upstream)
    assert row_error(grad, grad_want) < ERROR[kind]


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives(device):
    plain = plain_weights(16, 16, device)
    exact = random((2, 9, 16), device, torch.float64).requires_grad_()
    x = exact.detach().float().requires_grad_()
    (grad,) = torch.autograd.grad(
        atomwise(x, atomwise_weights(**plain, kind="split")).square().sum(), x, create_graph=True
    )
    (grad_want,) = torch.autograd.grad(reference.atomwise(exact, **plain).square().sum(), exact, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    (second_want,) = torch.autograd.grad(grad_want.square().sum(), exact)
    assert row_error(second, second_want) < 1e-5


def test_finite_differences():
    weights = atomwise_weights(**plain_weights(3, 2, "cpu"), kind="double")
    x = random((2, 9, 3), "cpu", torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: atomwise(x, weights), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: atomwise(x, weights), x, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_atoms_do_not_depend_on_each_other(device, monkeypatch):
    """Bitwise: an atom among many, alone, and in another launch of the backward kernel."""
    weights = atomwise_weights(**plain_weights(16, 16, device), kind="split")
    x, upstream = (random((34, 9, 16), device, torch.float32, seed).requires_grad_() for seed in range(2))
    many = atomwise(x, weights)
    (grad_many,) = torch.autograd.grad(many, x, upstream, retain_graph=True)
    last = slice(33, 34)
    alone = atomwise(x[last], weights)
    assert torch.equal(many[last], alone)
    assert torch.equal(grad_many[last], torch.autograd.grad(alone, x, upstream[last])[0][last])
    monkeypatch.setattr(module, "_PART_ATOMS", 32)
    assert torch.equal(grad_many, torch.autograd.grad(many, x, upstream)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_scale_and_turn(device):
    """l = 1 and l = 2 go through exactly scaled products (bitwise over 60 powers of two), and turn with the input."""
    weights = atomwise_weights(**plain_weights(16, 16, device), kind="split")
    x = random((3, 9, 16), device, torch.float32)
    out = atomwise(x, weights)
    powers = torch.tensor([2.0**-30, 1.0, 2.0**30], device=device)[:, None, None]
    scaled = atomwise(torch.cat([x[:, :1], x[:, 1:] * powers], dim=1), weights)
    assert torch.equal(scaled[:, 1:], out[:, 1:] * powers)
    assert torch.equal(scaled[:, :1], out[:, :1])
    rotation = torch.linalg.qr(random((3, 3, 3), device, torch.float64, 5)).Q
    rotation = (rotation * torch.linalg.det(rotation)[:, None, None]).float()
    torch.testing.assert_close(
        atomwise(reference.rotate(x, rotation), weights), reference.rotate(out, rotation), **TOLERANCE[torch.float32]
    )


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy's, from the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_hides_a_bad_number(device, bad):
    weights = atomwise_weights(**plain_weights(16, 16, device), kind="split")
    x = random((3, 9, 16), device, torch.float32)
    x[0, 0, 3] = x[1, 5, 7] = bad
    out = atomwise(x, weights)
    assert not out[0].isfinite().any()  # every coefficient has a gate made of l = 0
    assert not out[1, 5].isfinite().any()
    out[0] = out[1, 5] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_half_input(device):
    weights = atomwise_weights(**plain_weights(16, 16, device), kind="split")
    x = random((2, 9, 32), device, torch.float32)[:, :, ::2].half()
    assert torch.equal(atomwise(x, weights), atomwise(x.float().contiguous(), weights))


WIDTHS = {"gates": (4, 6), "gates_bias": (6,), "first_bias": (3,), "second_bias": (4,)}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"kind": "triple"}, ValueError, r"kind: expected one of double, single, split, half, got 'triple'"),
        ({"gates": torch.zeros(4, 3)}, ValueError, r"gates: expected shape \[4, 6\], got \[4, 3\]"),
        ({"gates_bias": torch.zeros(3)}, ValueError, r"gates_bias: expected shape \[6\], got \[3\]"),
        ({"first": (torch.zeros(4, 3),) * 2}, ValueError, r"expected 3 matrices each, got 2 and 3"),
        ({"first_bias": None}, TypeError, r"first_bias: expected a tensor \[3\], got NoneType"),
        ({"second": (torch.zeros(4, 3),) * 3}, ValueError, r"second\[0\]: expected shape \[3, 4\], got \[4, 3\]"),
        ({"second_bias": torch.zeros(4).int()}, TypeError, r"second_bias: expected a floating-point tensor"),
    ],
)
def test_bad_weights_are_named(changed, error, message):
    arguments = {name: torch.zeros(shape) for name, shape in WIDTHS.items()}
    arguments |= {"first": (torch.zeros(4, 3),) * 3, "second": (torch.zeros(3, 4),) * 3, "kind": "split"}
    with pytest.raises(error, match=message):
        atomwise_weights(**(arguments | changed))


def test_bad_features_are_named():
    weights = atomwise_weights(**plain_weights(4, 3, "cpu"), kind="split")
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 9, 4\], got \[2, 9, 5\]"):
        atomwise(torch.zeros(2, 9, 5), weights)
    with pytest.raises(TypeError, match=r"x: expected a floating-point tensor, got torch.int64"):
        atomwise(torch.zeros(2, 9, 4, dtype=torch.int64), weights)
    with pytest.raises(ValueError, match=r"x: expected device cpu, got meta"):
        atomwise(torch.zeros(2, 9, 4, device="meta"), weights)
