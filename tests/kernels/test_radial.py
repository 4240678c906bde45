"""Radial tables against the networks they stand for."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.radial import look_up, network_with_slope, tabulate
from devices import DEVICES
from edge_graphs import random

CUTOFF = 6.0


def network(device, width=16, pairs=3):
    norm = (1 + 0.1 * random((width,), device, torch.float64, 3), 0.1 * random((width,), device, torch.float64, 4))
    return 0.5 * random((pairs, width), device, torch.float64, 5), reference.RadialLayers(
        centres=torch.linspace(0, CUTOFF, 32, device=device, dtype=torch.float64),
        gaussian_exponent=-3.3,
        weight_distance=0.3 * random((32, width), device, torch.float64, 1),
        norm_first=norm,
        weight_second=random((width, width), device, torch.float64, 2) / width**0.5,
        bias_second=norm[1],
        norm_second=norm,
    )


@pytest.mark.parametrize("num_edges", [1, 37])
@pytest.mark.parametrize("kind", ["single", "split", "half"])
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_slopes_equal_the_network(device, kind, num_edges):
    pair_bias, layers = network(device)
    distances = torch.linspace(0.4, CUTOFF, num_edges, device=device, dtype=torch.float64)
    pair = torch.arange(num_edges, device=device) % 3
    value, slope = look_up(distances, pair, tabulate(pair_bias, layers, CUTOFF), kind, with_slope=True)
    want_value, want_slope = network_with_slope(distances, pair_bias, pair, layers)
    tolerance = 1e-3 if kind == "half" else 1e-6
    torch.testing.assert_close(
        value.dense().double(), want_value, rtol=0, atol=tolerance * want_value.abs().max().item()
    )
    scale = want_slope.abs().max().item()
    torch.testing.assert_close(slope.dense().double(), want_slope, rtol=0, atol=max(tolerance, 1e-5) * scale)


def test_slopes_are_the_derivatives_of_the_network():
    pair_bias, layers = network("cpu", width=4)
    distances = torch.tensor([0.7, 2.9, 5.8], dtype=torch.float64)
    pair = torch.tensor([0, 2, 1])
    step = 1e-6
    ahead, _ = network_with_slope(distances + step, pair_bias, pair, layers)
    behind, _ = network_with_slope(distances - step, pair_bias, pair, layers)
    _, slope = network_with_slope(distances, pair_bias, pair, layers)
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-8)
