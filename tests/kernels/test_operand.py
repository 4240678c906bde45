"""Rows that products leave to the next kernel as scaled halves: what is written, and that every kernel reads it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ase_fastuma.kernels import linear
from ase_fastuma.kernels.edge import (
    gather_rotate_scale_backward,
    gather_rotate_scale_forward,
    rotate_back_sum_backward,
    rotate_back_sum_forward,
)
from ase_fastuma.kernels.gate import gate_backward, gate_forward
from ase_fastuma.kernels.linear import block_matmul, block_weights
from ase_fastuma.kernels.operand import Operand, float32_sums, plain_operand, to_operand
from devices import DEVICES
from edge_graphs import random, random_edges

F32, WIDTH = torch.float32, 6


def halves(shape, device, seed) -> tuple[Operand, Operand]:
    """Rows of very different magnitudes as halves, and the same numbers in float32."""
    magnitudes = torch.logspace(-9, 9, shape[0], device=device)[:, None]
    stored = to_operand(random(shape, device, F32, seed) * magnitudes, "half")
    return stored, plain_operand(stored.dense())


def assert_same(got, want):
    """Equal, row by row, but for the rounding of float32: of sums of up to some hundred numbers, 2^-24 of each."""
    for g, w in zip(got, want, strict=True):
        g, w = (t.dense() if isinstance(t, Operand) else t for t in (g, w))
        g, w = g.flatten(1), w.flatten(1)
        scale = w.abs().amax(dim=1, keepdim=True)
        torch.testing.assert_close(g / scale, w / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_products_store_halves(device, transposed):
    """Eleven bits of every number, whatever the row's magnitude, with a bias or without."""
    matrices = [random(shape, device, F32, i) for i, shape in enumerate([(48, 80), (64, 64), (32, 32)])]
    weights = block_weights(matrices, random((80,), device, F32, 9), "half")
    x = to_operand(
        random((37, 176 if transposed else 144), device, F32, 5) * torch.logspace(-9, 9, 37, device=device)[:, None],
        "half",
    )
    exact = block_matmul(x, weights, transposed).high
    stored = block_matmul(x, weights, transposed, half=True)
    assert stored.high.dtype == torch.float16
    assert stored.high.abs().max() < 2**14
    torch.testing.assert_close(stored.unscale, torch.exp2(stored.unscale.log2().round()), rtol=0, atol=0)
    top = exact.abs().amax(dim=1, keepdim=True)
    assert ((stored.dense() - exact).abs() <= 2**-11 * exact.abs() + 2**-20 * top).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_library_multiplies_halves(device, transposed, monkeypatch):
    """Equal to the kernel's product but for the order of sums, and no bias is added or counts towards scales."""
    matrices = [random(shape, device, F32, i) for i, shape in enumerate([(48, 80), (64, 64), (32, 32)])]
    matrices[2] *= 2.0**-14  # its numbers stay halves with eleven bits beside those of larger weights
    weights = block_weights(matrices, random((80,), device, F32, 9), "half")
    x = to_operand(
        random((37, 176 if transposed else 144), device, F32, 5) * torch.logspace(-9, 9, 37, device=device)[:, None],
        "half",
    )
    products = []
    for by_library in (False, True):
        monkeypatch.setattr(linear, "library_multiplies", lambda *_, by_library=by_library: by_library)
        products.append(block_matmul(x, weights, transposed, biased=False, half=True))
    want, got = products
    torch.testing.assert_close(got.unscale, want.unscale, rtol=0, atol=0)
    assert got.high.dtype == torch.float16
    # Float32 sums in another order may round to the next half: 2^-10 of it. A small one, of numbers of up to 2^15, may
    # be off by 2^-23 of those: 2^-8.
    torch.testing.assert_close(got.high, want.high, rtol=2**-10, atol=2.0**-8)


@pytest.mark.parametrize("allowed", [(True, True), (False, False)])
def test_switches_of_half_products(allowed):
    """Sums are float32's within, and switches are as they were afterwards."""
    switches = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction_split_k")
    before, accumulation = tuple(getattr(switches, n) for n in names), switches.allow_fp16_accumulation
    try:
        switches.allow_fp16_reduced_precision_reduction, switches.allow_fp16_accumulation = allowed, True
        with float32_sums():
            assert not switches.allow_fp16_reduced_precision_reduction
            assert not switches.allow_fp16_accumulation
        assert tuple(getattr(switches, n) for n in names) == allowed
        assert switches.allow_fp16_accumulation
    finally:
        switches.allow_fp16_reduced_precision_reduction, switches.allow_fp16_accumulation = before, accumulation


@pytest.mark.filterwarnings("ignore:.*overflow encountered in exp")  # infinite is right: its sigmoid is 0
@pytest.mark.parametrize("device", DEVICES)
def test_gate_reads_halves(device):
    (x, x_plain), (grad, grad_plain) = halves((13, 11 * WIDTH), device, 1), halves((13, 9 * WIDTH), device, 2)
    assert_same([gate_forward(x, WIDTH, "single")], [gate_forward(x_plain, WIDTH, "single")])
    assert_same([gate_backward(grad, x, WIDTH, "single")], [gate_backward(grad_plain, x_plain, WIDTH, "single")])


@pytest.mark.parametrize("stored", ["halves", "float32"])
@pytest.mark.parametrize("device", DEVICES)
def test_readers_add_the_bias(device, stored):
    """A bias that a product leaves to be added is as good as added."""
    matrices = [random((13, columns * WIDTH), device, F32, i) for i, columns in enumerate((11, 9, 9, 3))]
    x, grad, z, z_m0 = (to_operand(m, "half") if stored == "halves" else plain_operand(m) for m in matrices)
    for columns, rows, width in ((5, x, 11), (3, z, 9), (3, z_m0, 3)):
        bias = random((columns * WIDTH,), device, F32, width)
        want = rows.dense() + torch.nn.functional.pad(bias, (0, (width - columns) * WIDTH))
        torch.testing.assert_close(dataclasses.replace(rows, bias=bias).dense(), want)
    left = dataclasses.replace(x, bias=random((5 * WIDTH,), device, F32, 6))
    added, grads = plain_operand(left.dense()), plain_operand(grad.dense())
    assert_same([gate_forward(left, WIDTH, "single")], [gate_forward(added, WIDTH, "single")])
    got, want = gate_backward(grad, left, WIDTH, "single"), gate_backward(grads, added, WIDTH, "single")
    assert_same([got], [want])
    vectors, edges = random_edges(1, 13, device, F32)
    weight, grad = random((13,), device, F32, 3), random((1, 9, WIDTH), device, F32, 4)
    for rows in (z, z_m0):
        left = dataclasses.replace(rows, bias=random((3 * WIDTH,), device, F32, 7))
        added = plain_operand(left.dense())
        sums = [rotate_back_sum_forward(t, vectors, weight, edges, WIDTH) for t in (left, added)]
        assert_same(sums[:1], sums[1:])
        got, want = (rotate_back_sum_backward(grad, t, vectors, weight, edges, "single") for t in (left, added))
        assert_same([*got[:2], got[2][None]], [*want[:2], want[2][None]])


@pytest.mark.parametrize("device", DEVICES)
def test_gather_reads_halves(device):
    vectors, edges = random_edges(1, 13, device, F32)
    x = random((1, 9, WIDTH), device, F32, 3)
    radial, radial_plain = halves((13, 12 * WIDTH), device, 4)
    got = gather_rotate_scale_forward(x, vectors, radial, edges, "single")
    assert_same([got], [gather_rotate_scale_forward(x, vectors, radial_plain, edges, "single")])
    slope, slope_plain = halves((13, 12 * WIDTH), device, 5)
    grad, grad_plain = halves((13, 18 * WIDTH), device, 6)
    sums = [torch.empty(2, 1, 9, WIDTH, device=device) for _ in range(2)]
    got, _ = gather_rotate_scale_backward(grad, x, vectors, radial, slope, edges, sums[0])
    want, _ = gather_rotate_scale_backward(grad_plain, x, vectors, radial_plain, slope_plain, edges, sums[1])
    assert_same([got, *sums[0]], [want, *sums[1]])


@pytest.mark.parametrize("coefficients", [3, 9])
@pytest.mark.parametrize("device", DEVICES)
def test_rotate_back_reads_halves(device, coefficients):
    vectors, edges = random_edges(1, 13, device, F32)
    weight, weight_slope = random((13,), device, F32, 1), random((13,), device, F32, 2)
    z, z_plain = halves((13, coefficients * WIDTH), device, 3)
    got = rotate_back_sum_forward(z, vectors, weight, edges, WIDTH)
    assert_same([got], [rotate_back_sum_forward(z_plain, vectors, weight, edges, WIDTH)])
    grad = random((1, 9, WIDTH), device, F32, 4)
    slope, slope_plain = halves((13, coefficients * WIDTH), device, 5) if coefficients == 3 else (None, None)
    got = rotate_back_sum_backward(grad, z, vectors, weight, edges, "single", weight_slope, slope)
    want = rotate_back_sum_backward(grad, z_plain, vectors, weight, edges, "single", weight_slope, slope_plain)
    assert_same([t for t in got if t is not None], [t for t in want if t is not None])
