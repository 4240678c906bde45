"""Sums of products of tangents, and the atom-wise MLP; `test_hessian.py` has the convolution within whole networks."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import convolution_tangent, reference
from ase_fastuma.kernels.atomwise import atomwise_weights
from ase_fastuma.kernels.atomwise_tangent import atomwise_tangent
from ase_fastuma.kernels.convolution_tangent import add_gram
from devices import DEVICES
from edge_graphs import random

F64 = torch.float64


@pytest.mark.parametrize("numbers", [1 << 24, 40])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 150])
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_gram(device, slices, num_rows, numbers, monkeypatch):
    monkeypatch.setattr(convolution_tangent, "_GRAM_NUMBERS", numbers)
    a, b = (random((4, num_rows, 10), device, F64, i) for i in range(2))
    a = a[..., :6] if slices else a[..., :6].contiguous()
    b = b[..., :6].contiguous()
    total = torch.ones(4, 4, device=device, dtype=F64)
    add_gram(total, a, b)
    torch.testing.assert_close(total, 1 + torch.einsum("krm,lrm->kl", a, b))


@pytest.mark.parametrize("device", DEVICES)
def test_atomwise(device):
    channels, hidden, num_nodes, num_directions = 5, 3, 4, 6

    def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return random(shape, device, F64, seed)

    weights = atomwise_weights(
        gates=normal((channels, 2 * hidden), 1),
        gates_bias=normal((2 * hidden,), 2),
        first=tuple(normal((channels, hidden), 3 + i) for i in range(3)),
        first_bias=normal((hidden,), 6),
        second=tuple(normal((hidden, channels), 7 + i) for i in range(3)),
        second_bias=normal((channels,), 10),
        kind="double",
    )
    x, grad = normal((num_nodes, 9, channels), 11), normal((num_nodes, 9, channels), 12)
    dx = normal((num_directions, num_nodes, 9, channels), 13)
    want, (curved,) = reference.second_order(weights.plain, [x], [dx], grad)
    half = torch.zeros(num_directions, num_directions, device=device, dtype=F64)
    found = atomwise_tangent(dx.transpose(1, 2).contiguous(), x, grad, weights, half)
    torch.testing.assert_close(found.transpose(1, 2), want)
    torch.testing.assert_close(half + half.T, dx.flatten(1) @ curved.flatten(1).T)
