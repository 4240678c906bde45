"""Block linears in every precision: against float64, over magnitudes, and their derivatives of any order."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.linear import RowGroups, block_linear, block_weights
from ase_fastuma.kernels.operand import KINDS, to_operand
from devices import DEVICES
from edge_graphs import random

# Largest relative error of a row of products against float64: a few units in the last place of the operands, less what
# averages out over the sum. "split" carries 22 bits, "half" 11.
ERROR = {"double": 1e-14, "single": 1e-6, "split": 1e-6, "half": 2e-3}
SHAPES = {
    "one block": [(24, 40)],
    "so2": [(48, 80), (64, 64), (32, 32)],
    "odd": [(33, 17), (7, 5), (2, 1)],
}


def make(shapes, device):
    matrices = [random(shape, device, torch.float64, i) for i, shape in enumerate(shapes)]
    return matrices, random((shapes[0][1],), device, torch.float64, 9)


def row_error(got, want):
    return ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max().item()


@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_products_and_gradients(device, kind, shapes, rows):
    matrices, bias = make(shapes, device)
    weights = block_weights(matrices, None, kind)
    depth, width = sum(k for k, _ in shapes), sum(n for _, n in shapes)
    magnitudes = torch.logspace(-9, 9, rows, dtype=torch.float64, device=device)[:, None]  # a row's scale is its own
    exact = (random((rows, depth), device, torch.float64, 5) * magnitudes).requires_grad_()
    x = exact.detach().to(weights.matrices[0].dtype).requires_grad_()
    got, want = block_linear(x, weights), reference.block_linear(exact, matrices, None)
    assert row_error(got, want) < ERROR[kind]
    upstream = random((rows, width), device, torch.float64, 6) / magnitudes
    (grad,) = torch.autograd.grad(got, x, upstream.to(got.dtype))
    (grad_want,) = torch.autograd.grad(want, exact, upstream)
    assert row_error(grad, grad_want) < ERROR[kind]
    with_bias = block_linear(x.detach() * 0, block_weights(matrices, bias, kind))
    torch.testing.assert_close(with_bias[:, : len(bias)].double(), bias.expand(rows, -1), rtol=1e-6, atol=1e-7)
    assert not with_bias[:, len(bias) :].any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_leading_dimensions(device):
    matrices, bias = make([(24, 40)], device)
    weights = block_weights(matrices, bias, "single")
    assert block_linear(torch.zeros(0, 24, device=device), weights).shape == (0, 40)
    x = random((3, 5, 24), device, torch.float32)
    torch.testing.assert_close(block_linear(x, weights), block_linear(x.view(15, 24), weights).view(3, 5, 40))


@pytest.mark.parametrize("device", DEVICES)
def test_derivatives_of_any_order(device):
    matrices, bias = make(SHAPES["odd"], device)
    weights = block_weights(matrices, bias, "double")
    x = random((4, 42), device, torch.float64).requires_grad_()
    cube = lambda x: block_linear(x, weights) ** 3  # noqa: E731
    assert torch.autograd.gradcheck(cube, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(cube, x, fast_mode=True)


@pytest.mark.parametrize("kind", ["split", "half"])
def test_storage_keeps_what_it_promises(kind):
    matrix = random((50, 33), "cpu", torch.float32) * torch.logspace(-30, 30, 50)[:, None]
    matrix[7] = 0
    operand = to_operand(matrix, kind)
    bits = {"split": 22, "half": 11}[kind]
    error = (operand.dense() - matrix).abs().amax(dim=1)
    assert (error <= 2.0**-bits * matrix.abs().amax(dim=1)).all()
    assert operand.high.abs().max() <= 4096  # far below the largest half
    assert (torch.frexp(operand.unscale).mantissa == 0.5).all()  # powers of two: scaling is exact


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, from the interpreter: the point of the test
@pytest.mark.parametrize("kind", ["split", "half"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_hides_a_bad_number(device, bad, kind):
    matrices, _ = make([(24, 40)], device)
    x = random((3, 24), device, torch.float32)
    x[1, 5] = bad
    out = block_linear(x, block_weights(matrices, None, kind))
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_bad_arguments_are_named():
    weights = block_weights([torch.zeros(4, 3)], None, "single")
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 4\], got \[2, 5\]"):
        block_linear(torch.zeros(2, 5), weights)
    with pytest.raises(TypeError, match=r"x: expected a floating-point tensor, got torch.int64"):
        block_linear(torch.zeros(2, 4, dtype=torch.int64), weights)


@pytest.mark.parametrize("counts", [(0, 13, 1, 70, 0, 5), (1,), (0, 0)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_rows(device, kind, shapes, counts):
    """Each group's rows times its own weights, forward and backward; bitwise the same without the other groups."""
    matrices = [random((len(counts), *shape), device, torch.float64, i) for i, shape in enumerate(shapes)]
    bias = random((shapes[0][1],), device, torch.float64, 9)
    weights = block_weights(matrices, bias, kind)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    depth, width = sum(k for k, _ in shapes), sum(n for _, n in shapes)
    exact = random((starts[-1], depth), device, torch.float64, 5)
    upstream = random((starts[-1], width), device, torch.float64, 6)
    x = exact.to(weights.matrices[0].dtype).requires_grad_()
    got = block_linear(x, weights, RowGroups(starts, x.device))
    (grad,) = torch.autograd.grad(got, x, upstream.to(got.dtype))
    for g, count in enumerate(counts):
        rows = slice(starts[g], starts[g + 1])
        own = [m[g] for m in matrices]
        want = reference.block_linear(exact[rows], own, bias)
        if count:
            assert row_error(got[rows], want) < ERROR[kind]
            assert row_error(grad[rows], reference.block_linear(upstream[rows], [m.T for m in own], None)) < ERROR[kind]
        if kind in ("split", "half"):
            alone = block_weights([m[g : g + 1] for m in matrices], bias, kind)
            part = x.detach()[rows].requires_grad_()
            out = block_linear(part, alone, RowGroups([0, count], x.device))
            assert torch.equal(out, got[rows])
            assert torch.equal(torch.autograd.grad(out, part, upstream[rows].to(out.dtype))[0], grad[rows])


def test_groups_that_do_not_fit_are_refused():
    weights = block_weights([torch.zeros(2, 4, 3)], None, "single")
    x = torch.zeros(5, 4)
    with pytest.raises(ValueError, match="groups: expected 2 groups of rows, got none"):
        block_linear(x, weights)
    with pytest.raises(ValueError, match="groups: expected 2 groups of rows, got 1"):
        block_linear(x, weights, RowGroups([0, 5], x.device))
    with pytest.raises(ValueError, match="groups: expected the 5 rows of x"):
        block_linear(x, weights, RowGroups([0, 2, 4], x.device))
