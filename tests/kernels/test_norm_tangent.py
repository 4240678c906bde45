"""Second derivatives of the norm: the kernel against the reference differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.norm_tangent import add_rms_norm_tangent
from devices import DEVICES
from edge_graphs import random
from tolerances import TOLERANCE

F64 = torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("num_directions", "num_nodes", "width"), [(5, 3, 6), (1, 1, 16), (2, 0, 3)])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_equals_the_reference(device, add, num_directions, num_nodes, width, dtype):
    total = random((num_nodes, 9, width), device, dtype, 1)
    weight, bias = random((3, width), device, dtype, 2), random((width,), device, dtype, 3)
    grad = random((num_nodes, 9, width), device, dtype, 4)
    dx, dy = (random((num_directions, 9, num_nodes, width), device, dtype, 5 + i) for i in range(2))
    summed = dx + dy if add else dx

    def plain(x):
        return reference.rms_norm(x, weight.double(), bias.double())

    tangents = summed.double().transpose(1, 2)
    want, (curved,) = reference.second_order(plain, [total.double()], [tangents], grad.double())
    outputs = add_rms_norm_tangent(dx, dy if add else None, total, weight, grad)
    for got, exact in zip(outputs, (tangents, want, curved), strict=True):
        torch.testing.assert_close(got.double().transpose(1, 2), exact, **TOLERANCE[dtype])
