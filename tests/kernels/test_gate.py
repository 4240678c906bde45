"""The gate: kernel against reference, forward, first and second derivative."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.gate import gate
from devices import DEVICES
from edge_graphs import random
from tolerances import TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 16, 96])
@pytest.mark.parametrize("num_edges", [0, 1, 13, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_output_and_gradient_equal_the_reference(device, num_edges, width, dtype):
    x = random((num_edges, 11, width), device, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    upstream = random((num_edges, 9, width), device, torch.float64, 1)
    got, want = gate(x), reference.gate(exact)
    torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])
    (grad,) = torch.autograd.grad(got, x, upstream.to(dtype))
    (grad_want,) = torch.autograd.grad(want, exact, upstream)
    torch.testing.assert_close(grad.double(), grad_want, **TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_published_bounds(device):
    """Forward and first derivative within rtol 1e-5, atol 1e-6; second derivative within 2e-5, 2e-6."""
    x = random((37, 11, 16), device, torch.float32).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, want = gate(x), reference.gate(exact)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(got.square().sum(), x, create_graph=True)
    (grad_want,) = torch.autograd.grad(want.square().sum(), exact, create_graph=True)
    torch.testing.assert_close(grad.double(), grad_want, rtol=1e-5, atol=1e-6)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    (second_want,) = torch.autograd.grad(grad_want.square().sum(), exact)
    torch.testing.assert_close(second.double(), second_want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences(device):
    x = random((3, 11, 2), device, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(gate, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(gate, x, fast_mode=True)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 11, any\], got \[3, 9, 4\]"):
        gate(torch.zeros(3, 9, 4))
    with pytest.raises(TypeError, match=r"x: expected a floating-point tensor, got torch.int64"):
        gate(torch.zeros(3, 11, 4, dtype=torch.int64))
