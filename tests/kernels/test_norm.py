"""Residual sum and norm: kernel against reference, forward, first and second derivative; atoms do not mix."""

from __future__ import annotations

import functools

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.norm import add_rms_norm
from devices import DEVICES
from edge_graphs import random
from tolerances import TOLERANCE


def parameters(width, device, dtype):
    """Weight, bias and shift."""
    return random((3, width), device, dtype, 7), random((width,), device, dtype, 8), random((width,), device, dtype, 9)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 16, 96])
@pytest.mark.parametrize("num_nodes", [0, 1, 13])
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_and_gradients_equal_the_reference(device, num_nodes, width, dtype, added):
    shape = (num_nodes, 9, width)
    exact = [random(shape, device, torch.float64, seed).requires_grad_() for seed in range(1 + added)]
    weight, bias, shift = parameters(width, device, torch.float64)
    total_want = sum(exact)
    want = reference.rms_norm(total_want, weight, bias + shift)
    inputs = [t.detach().to(dtype).requires_grad_() for t in exact]
    total, got = add_rms_norm(inputs[0], inputs[1] if added else None, *(t.to(dtype) for t in (weight, bias, shift)))
    torch.testing.assert_close(total.double(), total_want, **TOLERANCE[dtype])
    torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])
    upstream = [random(shape, device, torch.float64, seed) for seed in (4, 5)]
    # Both outputs used; one alone.
    for outputs, outputs_want, grads in (
        ([total, got], [total_want, want], upstream),
        ([got], [want], upstream[1:]),
    ):
        found = torch.autograd.grad(outputs, inputs, [g.to(dtype) for g in grads], retain_graph=True)
        wanted = torch.autograd.grad(outputs_want, exact, grads, retain_graph=True)
        for grad, grad_want in zip(found, wanted, strict=True):
            torch.testing.assert_close(grad.double(), grad_want, **TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, whose numpy sees the overflow
@pytest.mark.parametrize("device", DEVICES)
def test_squares_beyond_the_range_are_not_hidden(device):
    """Of two atoms one is too large for float32: its norm is no number, forward and backward, and the other's is."""
    weight, bias, _ = parameters(16, device, torch.float32)
    x = random((2, 9, 16), device, torch.float32)
    x[1] *= 1e25
    x.requires_grad_()
    _, normed = add_rms_norm(x, None, weight, bias)
    (grad,) = torch.autograd.grad(normed, x, torch.ones_like(normed))
    for got in (normed, grad, reference.rms_norm(x, weight, bias)):
        assert got[0].isfinite().all()
        assert not got[1].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_shift_for_each_atom(device):
    weight, bias, _ = parameters(16, device, torch.float32)
    x, shift = random((13, 9, 16), device, torch.float32), random((13, 16), device, torch.float32, 8)
    _, got = add_rms_norm(x, None, weight, bias, shift)
    for atom in (0, 7, 12):
        _, alone = add_rms_norm(x[atom : atom + 1], None, weight, bias, shift[atom])
        assert torch.equal(got[atom], alone[0])


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences(device, added):
    weight, bias, shift = parameters(2, device, torch.float64)
    norm = functools.partial(add_rms_norm, weight=weight, bias=bias, shift=shift)
    x, y = (random((1, 9, 2), device, torch.float64, seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(norm, (x, y if added else None), fast_mode=added)
    assert torch.autograd.gradgradcheck(norm, (x, y if added else None), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_atoms_do_not_depend_on_each_other(device, dtype):
    """Bitwise: an atom among many, and alone."""
    weight, bias, shift = parameters(24, device, dtype)
    x, y, grad = (random((13, 9, 24), device, dtype, seed).requires_grad_() for seed in range(3))
    many = add_rms_norm(x, y, weight, bias, shift)
    (grad_many,) = torch.autograd.grad(many, x, [grad, grad])
    alone = add_rms_norm(x[6:7], y[6:7], weight, bias, shift)
    (grad_alone,) = torch.autograd.grad(alone, x, [grad[6:7], grad[6:7]])
    for whole, part in zip((*many, grad_many), (*alone, grad_alone[6:7]), strict=True):
        assert torch.equal(whole[6:7], part)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_that_is_not_wanted_and_strided_or_half_input(device):
    weight, bias, _ = parameters(16, device, torch.float32)
    wide = random((5, 9, 32), device, torch.float32)
    strided = wide[:, :, ::2]
    total, normed = add_rms_norm(strided, strided, weight, bias)
    torch.testing.assert_close(normed, add_rms_norm(total, None, weight, bias)[1], rtol=0, atol=0)
    half = strided.half()
    assert torch.equal(add_rms_norm(half, None, weight, bias)[1], add_rms_norm(half.float(), None, weight, bias)[1])
    x = strided.clone().requires_grad_()
    total, _ = add_rms_norm(x, strided, weight, bias)
    assert torch.equal(torch.autograd.grad(total, x, wide[:, :, 1::2])[0], wide[:, :, 1::2])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(3, 8, 4)}, ValueError, r"x: expected shape \[any, 9, any\], got \[3, 8, 4\]"),
        ({"x": torch.zeros(3, 9, 4).int()}, TypeError, r"x: expected a floating-point tensor, got torch.int32"),
        ({"y": torch.zeros(2, 9, 4)}, ValueError, r"y: expected shape \[3, 9, 4\], got \[2, 9, 4\]"),
        ({"y": torch.zeros(3, 9, 4).double()}, TypeError, r"y: expected torch.float32 like the other arguments"),
        ({"weight": torch.zeros(3, 5)}, ValueError, r"weight: expected shape \[3, 4\], got \[3, 5\]"),
        ({"bias": None}, TypeError, r"bias: expected a tensor \[4\], got NoneType"),
        ({"shift": torch.zeros(1, 4)}, ValueError, r"shift: expected shape \[3, 4\], got \[1, 4\]"),
        ({"shift": torch.zeros(5)}, ValueError, r"shift: expected shape \[4\], got \[5\]"),
        ({"bias": torch.zeros(4, requires_grad=True)}, ValueError, r"bias: expected a frozen tensor"),
    ],
)
def test_bad_arguments_are_named(changed, error, message):
    arguments = {"x": torch.zeros(3, 9, 4), "y": None, "weight": torch.zeros(3, 4), "bias": torch.zeros(4)}
    with pytest.raises(error, match=message):
        add_rms_norm(**(arguments | changed))
