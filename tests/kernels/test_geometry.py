"""Lengths, envelopes and element pairs against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.geometry import edge_geometry
from devices import DEVICES
from edge_graphs import random_edges

CUTOFF = 1.7  # no float32 number: a cutoff rounded to float32 shows in float64 results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (1, 1), (5, 23), (13, 300)])
@pytest.mark.parametrize("device", DEVICES)
def test_geometry_equals_the_reference(device, num_nodes, num_edges, dtype):
    vectors, edges = random_edges(num_nodes, num_edges, device, torch.float64)
    element = torch.arange(num_nodes, device=device) % 3
    got = edge_geometry(vectors, edges.source, edges.target, element, 3, CUTOFF, dtype)
    distances = vectors.norm(dim=1)
    assert got.vectors.equal(vectors.to(dtype))
    torch.testing.assert_close(got.distances, distances, rtol=1e-15, atol=0)
    assert got.pair.equal(element[edges.source] * 3 + element[edges.target])
    close = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(got.weight, reference.envelope(distances, CUTOFF).to(dtype), **close)
    torch.testing.assert_close(got.weight_slope, reference.envelope_slope(distances, CUTOFF).to(dtype), **close)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_beyond_the_cutoff(device):
    lengths = torch.tensor([0.5, 1.0, 1.0 + 1e-12, 3.0], dtype=torch.float64, device=device) * CUTOFF
    vectors = torch.zeros(4, 3, dtype=torch.float64, device=device)
    vectors[:, 1] = lengths
    zeros = torch.zeros(4, dtype=torch.int32, device=device)
    got = edge_geometry(
        vectors, zeros, zeros, torch.zeros(1, dtype=torch.int64, device=device), 1, CUTOFF, lengths.dtype
    )
    assert (got.weight[:1] > 0).all()
    assert not got.weight[1:].any()
    assert not got.weight_slope[1:].any()
