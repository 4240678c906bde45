"""Block linears in every precision: against float64, over magnitudes, and their derivatives of any order."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import grouped_linear as grouped_module
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.grouped_linear import grouped_linear
from ase_fastuma.kernels.groups import RowGroups
from ase_fastuma.kernels.linear import block_linear, block_weights
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


COUNTS = {"some": (0, 13, 1, 7, 0, 5), "one row": (1,), "no rows": (0, 0), "one group": (37,)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_tiles_cover_every_row_once(device, counts):
    """Each tile lies in its group, whether the starts come from the host or from the device."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    tensor = torch.tensor(starts, device=device)
    for groups in (RowGroups(starts, tensor.device), RowGroups(tensor, tensor.device, starts[-1])):
        covered = []
        for group, first, end in groups.tiles(4).T.tolist():
            rows = range(first, end)
            assert len(rows) <= 4
            assert not rows or starts[group] <= first < end <= starts[group + 1]
            covered += rows
        assert sorted(covered) == list(range(starts[-1]))
        assert groups.starts == tuple(starts)


@pytest.mark.parametrize("kind", ["split", "half"])
@pytest.mark.parametrize("device", DEVICES)
def test_starts_on_the_device(device, kind):
    matrices = [random((3, 24, 40), device, torch.float64, 1)]
    weights = block_weights(matrices, None, kind)
    x = random((17, 24), device, torch.float32, 2)
    starts = torch.tensor([0, 5, 5, 17], device=device)
    got = block_linear(x, weights, RowGroups(starts, x.device, 17))
    assert torch.equal(got, block_linear(x, weights, RowGroups([0, 5, 5, 17], x.device)))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_grouped_linear_and_its_gradients(device, kind, counts):
    """Output and all gradients against float64, weights' of groups without rows too, which are zero."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    sizes = [(starts[-1], 19), (len(counts), 19, 35), (len(counts), 35)]
    exact = [random(size, device, torch.float64, i).requires_grad_() for i, size in enumerate(sizes)]
    upstream = random((starts[-1], 35), device, torch.float64, 6)
    want = reference.grouped_linear(exact[0], exact[1], starts, exact[2])
    wanted = [want, *torch.autograd.grad(want, exact, upstream)]
    dtype = torch.float64 if kind == "double" else torch.float32
    x, w, b = (t.detach().to(dtype).requires_grad_() for t in exact)
    got = grouped_linear(x, w, starts, b, kind)
    found = [got, *torch.autograd.grad(got, (x, w, b), upstream.to(dtype))]
    for mine, other in zip(found, wanted, strict=True):
        assert mine.shape == other.shape
        assert (mine.double() - other).norm() <= ERROR[kind] * other.norm()


@pytest.mark.parametrize("counts", [COUNTS["some"], COUNTS["one group"]], ids=["some", "one group"])
@pytest.mark.parametrize("decades", [0, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_in_chunks(device, decades, counts, monkeypatch):
    """Chunks of rows summed afterwards, groups without rows and rows of very different size among them."""
    starts, chunks = [sum(counts[:i]) for i in range(len(counts) + 1)], []
    magnitudes = torch.logspace(-decades / 2, decades / 2, starts[-1], dtype=torch.float64, device=device)[:, None]
    x, g = (random((starts[-1], n), device, torch.float64, n) * magnitudes for n in (19, 35))
    w = torch.zeros(len(counts), 19, 35, device=device, requires_grad=True)
    monkeypatch.setattr(grouped_module, "_CHUNK", 8)
    for chunked in (True, False):
        monkeypatch.setattr(grouped_module, "in_chunks", lambda *_, chunked=chunked: chunks.append(chunked) or chunked)
        y = grouped_linear(x.float(), w, starts)
        (got,) = torch.autograd.grad(y, w, g.float())
        want = reference.grouped_outer(x, g, starts)
        # Scales are those of columns, so groups are compared one by one where their rows are alike.
        error, size = ((t.flatten(1) if decades == 0 else t.flatten()[None]).norm(dim=1) for t in (got - want, want))
        assert (error <= ERROR["split"] * size).all()
        assert not got[[i for i, count in enumerate(counts) if count == 0]].any()
    assert chunks == [True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_linear_is_differentiable_to_any_order(device):
    """In x, weights and bias at once; the closed set of maps is the same for every kind."""
    x, w = random((7, 3), device, torch.float64, 1).requires_grad_(), random((3, 3, 2), device, torch.float64, 2)
    b, starts = random((3, 2), device, torch.float64, 3).requires_grad_(), torch.tensor([0, 4, 4, 7], device=device)
    cube = lambda x, w, b: grouped_linear(x, w, starts, b, "double") ** 3  # noqa: E731
    arguments = (x, w.requires_grad_(), b)
    assert torch.autograd.gradcheck(cube, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(cube, arguments, fast_mode=True)


@pytest.mark.parametrize("kind", ["split", "half"])
@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_of_grouped_linear_by_kernels(device, kind):
    starts, sizes = [0, 5, 5, 12], [(12, 19), (3, 19, 35)]

    def second(function, dtype):
        x, w = (random(size, device, torch.float64, i).to(dtype).requires_grad_() for i, size in enumerate(sizes))
        y = function(x, w) ** 2
        first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), (x, w))

    want = second(lambda x, w: reference.grouped_linear(x, w, starts), torch.float64)
    for mine, other in zip(
        second(lambda x, w: grouped_linear(x, w, starts, kind=kind), torch.float32), want, strict=True
    ):
        assert (mine.double() - other).norm() <= 10 * ERROR[kind] * other.norm()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "quad"}, ValueError, "kind: expected one of .* got 'quad'"),
        ({"x": torch.zeros(5)}, ValueError, r"x: expected shape \[any, any\], got \[5\]"),
        ({"weights": torch.zeros(3, 4, 2)}, ValueError, r"weights: expected shape \[2, 4, any\], got \[3, 4, 2\]"),
        ({"starts": [0, 2, 4]}, ValueError, "starts: expected the 5 rows of x, got 4"),
        ({"starts": [0, 6, 5]}, ValueError, r"starts: expected numbers from 0 on .* got \[0, 6, 5\]"),
        ({"starts": [1, 2, 5]}, ValueError, "starts: expected numbers from 0 on"),
        ({"starts": []}, ValueError, "starts: expected numbers from 0 on"),
        ({"starts": [0, 2.0, 5]}, TypeError, r"starts: expected integers, got \[0, 2.0, 5\]"),
        ({"starts": torch.tensor([0.0, 2.0, 5.0])}, ValueError, "starts: expected an int64 tensor"),
        ({"starts": torch.tensor([], dtype=torch.int64)}, ValueError, "starts: expected an int64 tensor"),
        ({"weights": torch.zeros(2, 4, 0)}, ValueError, r"weights: expected .* of at least 1, got shape \[2, 4, 0\]"),
        ({"bias": torch.zeros(2)}, ValueError, r"bias: expected shape \[2, 2\], got \[2\]"),
    ],
)
def test_bad_arguments_of_grouped_linear(change, error, message):
    arguments = {"x": torch.zeros(5, 4), "weights": torch.zeros(2, 4, 2), "starts": [0, 2, 5]}
    with pytest.raises(error, match=message):
        grouped_linear(**(arguments | change))
