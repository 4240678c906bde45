"""Balanced sums: kernels against the reference, with derivatives; totals are met; systems do not mix."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.balance import balanced_sum
from ase_fastuma.kernels.many_neighbours import Systems
from devices import DEVICES
from edge_graphs import random
from tolerances import TOLERANCE

SIZES = [1, 70, 3, 64]  # one atom; more than a program takes at once; as many


def case_of(sizes, device):
    """Shape of the features, the systems, and a total for each."""
    systems = Systems.of(sizes, torch.device(device))
    return (sum(sizes), 9, 24), systems, torch.arange(len(sizes), device=device) - 1


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [slice(0, 24), slice(3, 4), slice(5, 14)], ids=str)
@pytest.mark.parametrize("sizes", [[1], [13], [1030], SIZES], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_and_gradients_equal_the_reference(device, sizes, channels, dtype, added):
    shape, systems, totals = case_of(sizes, device)
    packed, total = (None, -2) if len(sizes) == 1 else (systems, totals)
    exact = [random(shape, device, torch.float64, seed).requires_grad_() for seed in range(1 + added)]
    want = reference.balanced_sum(exact[0], exact[1] if added else None, channels, total, packed and systems.atoms)
    inputs = [t.detach().to(dtype).requires_grad_() for t in exact]
    got = balanced_sum(inputs[0], inputs[1] if added else None, channels, total, packed)
    torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])
    upstream = random(shape, device, torch.float64, 4)
    wanted = torch.autograd.grad(want, exact, upstream)
    for grad, grad_want in zip(torch.autograd.grad(got, inputs, upstream.to(dtype)), wanted, strict=True):
        torch.testing.assert_close(grad.double(), grad_want, **TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_totals_are_met_and_all_else_stays(device):
    shape, systems, totals = case_of(SIZES, device)
    x = random(shape, device, torch.float64)
    got = balanced_sum(x, None, slice(5, 14), totals, systems)
    for first, size, total in zip(systems.starts, SIZES, totals.tolist(), strict=False):
        sums = got[first : first + size, 0, 5:14].sum(dim=0)
        torch.testing.assert_close(sums, torch.full_like(sums, total), rtol=0, atol=1e-12)
    stays = torch.ones(9, 24, dtype=torch.bool, device=device)
    stays[0, 5:14] = False
    assert torch.equal(got[:, stays], x[:, stays])


@pytest.mark.parametrize("device", DEVICES)
def test_half_types_and_strides(device):
    """Half types are computed in float32; arrays may lie in memory in any order."""
    shape, systems, totals = case_of(SIZES, device)
    x, y = random(shape, device, torch.float32), random(shape[::-1], device, torch.float32, 1).permute(2, 1, 0)
    got = balanced_sum(x.half(), y.half(), slice(5, 14), totals, systems)
    want = balanced_sum(x.half().float(), y.half().float().contiguous(), slice(5, 14), totals, systems)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_system_does_not_depend_on_the_others(device):
    shape, systems, totals = case_of(SIZES, device)
    x, y = random(shape, device, torch.float32), random(shape, device, torch.float32, 1)
    got = balanced_sum(x, y, slice(0, 9), totals, systems)
    rows = slice(systems.starts[1], systems.starts[2])
    alone = balanced_sum(x[rows], y[rows], slice(0, 9), totals[1:2], Systems.of(SIZES[1:2], torch.device(device)))
    assert torch.equal(got[rows], alone)


@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences(device):
    _, systems, totals = case_of([1, 2], device)
    x, y = (random((3, 9, 2), device, torch.float64, seed).requires_grad_() for seed in (0, 1))

    def of(x, y):
        return balanced_sum(x, y, slice(0, 1), totals, systems)

    assert torch.autograd.gradcheck(of, (x, y), fast_mode=True)
    assert torch.autograd.gradgradcheck(of, (x, y), fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_no_atoms(device):
    x = random((0, 9, 16), device, torch.float32)
    assert balanced_sum(x, None, slice(0, 9), 1).shape == x.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8, 4)}, r"x: expected shape \[any, 9, any\], got \[3, 8, 4\]"),
        ({"y": torch.zeros(2, 9, 4)}, r"y: expected shape \[3, 9, 4\], got \[2, 9, 4\]"),
        ({"channels": slice(2, 5)}, r"channels: expected first and last \+ 1 of 4 channels, got slice\(2, 5, None\)"),
        ({"channels": slice(1, 1)}, "channels: expected first and last"),
        ({"channels": slice(0, 4, 2)}, "channels: expected first and last"),
        ({"systems": Systems.of([2], torch.device("cpu"))}, "systems: expected those of 3 atoms, got 2"),
        ({"total": torch.zeros(2)}, r"total: expected an integer for a single system, got \[2\]"),
        (
            {"total": torch.zeros(2), "systems": Systems.of([3], torch.device("cpu"))},
            r"total: expected shape \[1\], got \[2\]",
        ),
        (
            {"total": torch.zeros(1, device="meta"), "systems": Systems.of([3], torch.device("cpu"))},
            "total: expected device cpu, got meta",
        ),
        ({"systems": Systems.of([3], torch.device("meta"))}, "systems: expected device cpu, got meta"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"x": torch.zeros(3, 9, 4), "y": None, "channels": slice(0, 4), "total": 0, "systems": None}
    with pytest.raises(ValueError, match=message):
        balanced_sum(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": slice(None, 4)}, "channels: expected a slice with first and last"),
        ({"channels": (0, 4)}, r"channels: expected a slice .* got \(0, 4\)"),
        ({"systems": [3]}, "systems: expected Systems, got list"),
        ({"total": 0.5}, "total: expected an integer or a tensor, got 0.5"),
        ({"total": [1]}, r"total: expected an integer or a tensor, got \[1\]"),
    ],
)
def test_arguments_of_other_types(change, message):
    arguments = {"x": torch.zeros(3, 9, 4), "y": None, "channels": slice(0, 4), "total": 0, "systems": None}
    with pytest.raises(TypeError, match=message):
        balanced_sum(**(arguments | change))
