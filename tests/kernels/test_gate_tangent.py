"""Second derivatives of gates: the kernel against the references differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.gate_tangent import NUM_HEAD, atomwise_gate_tangent, gate_tangent
from devices import DEVICES
from edge_graphs import random
from tolerances import TOLERANCE

F64 = torch.float64


def atomwise_gate(x: torch.Tensor) -> torch.Tensor:
    """The gate within the atom-wise MLP, [11, N, H] -> [9, N, H]."""
    gates = torch.nn.functional.silu(x[:2]).sigmoid()
    return torch.cat([torch.nn.functional.silu(x[2:3]), gates[:1] * x[3:6], gates[1:] * x[6:]])


def bilinear(t: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """t_k S'' t_j [K, K] from rows [K, M] of t's heads and halves."""
    product = t.double().flatten(1) @ half.double().flatten(1).T
    return product + product.T


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("num_directions", "num_rows", "width"), [(5, 3, 6), (1, 2, 16), (2, 0, 3)])
@pytest.mark.parametrize("atoms", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_equals_the_reference(device, atoms, num_directions, num_rows, width, dtype):
    order = (1, 0, 2) if atoms else (0, 1, 2)  # where the rows stand
    x = random((num_rows, 11, width), device, dtype, 1).permute(order).contiguous()
    t = random((num_directions, num_rows, 11, width), device, dtype, 2)
    t = t.permute(0, *(1 + i for i in order)).contiguous()
    grad = random((num_rows, 9, width), device, dtype, 3).permute(order).contiguous()
    function = atomwise_gate if atoms else reference.gate
    want, (curved,) = reference.second_order(function, [x.double()], [t.double()], grad.double())
    if atoms:
        out, half = atomwise_gate_tangent(t, x, grad)
        head = t[:, :NUM_HEAD]
    else:
        kind = "double" if dtype == F64 else "split"
        stored, half = gate_tangent(t.flatten(2), x.flatten(1), grad.flatten(1), kind)
        out, head = stored.dense().view(want.shape), t.flatten(2)[..., : NUM_HEAD * width]
    torch.testing.assert_close(out.double(), want, **TOLERANCE[dtype])
    expected = t.double().flatten(1) @ curved.flatten(1).T
    torch.testing.assert_close(bilinear(head, half), expected, **{k: 10 * v for k, v in TOLERANCE[dtype].items()})
