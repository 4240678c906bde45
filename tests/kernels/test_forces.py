"""Forces and virial from edge gradients: kernel against the formula, and the formula against autograd."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels.forces import forces_and_virial
from devices import DEVICES
from edge_graphs import SIZES, random, random_edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_nodes", "num_edges"), SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_equal_autograd(device, num_nodes, num_edges, dtype):
    _, edges = random_edges(num_nodes, num_edges, device, torch.float64)
    positions = random((num_nodes, 3), device, torch.float64, 1).requires_grad_()
    offsets = random((num_edges, 3), device, torch.float64, 2)
    strain = torch.zeros(3, 3, dtype=torch.float64, device=device, requires_grad=True)
    vectors = positions[edges.source] - positions[edges.target] + offsets
    gradient = random((num_edges, 3), device, dtype, 3)
    energy = ((vectors + vectors @ strain) * gradient.double()).sum()
    want_positions, want_strain = torch.autograd.grad(energy, (positions, strain))
    forces, virial = forces_and_virial(gradient, vectors.detach(), edges)
    torch.testing.assert_close(forces, -want_positions)
    torch.testing.assert_close(virial, want_strain)
