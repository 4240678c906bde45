"""Curvatures of radial networks and of the envelope against differences of their slopes."""

from __future__ import annotations

import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.radial import Radial, network_with_slope
from ase_fastuma.kernels.radial_tangent import envelope_curvature, hidden_with_curvature
from edge_graphs import random

CUTOFF = 6.0
STEP = 1e-6


def network(seed: int, width: int = 4) -> Radial:
    def normal(shape: tuple[int, ...], i: int) -> torch.Tensor:
        return random(shape, "cpu", torch.float64, seed + i)

    layers = reference.RadialLayers(
        centres=torch.linspace(0, CUTOFF, 32, dtype=torch.float64),
        gaussian_exponent=-3.3,
        weight_distance=0.3 * normal((32, width), 1),
        norm_first=(1 + 0.1 * normal((width,), 2), 0.1 * normal((width,), 3)),
        weight_second=normal((width, width), 4) / width**0.5,
        bias_second=0.1 * normal((width,), 5),
        norm_second=(1 + 0.1 * normal((width,), 6), 0.1 * normal((width,), 7)),
    )
    return Radial(0.5 * normal((3, width), 8), layers, None)


def test_curvatures_are_the_derivatives_of_slopes():
    radials = [network(0), network(100)]
    distances, pair = torch.tensor([0.7, 2.9, 5.8, 3.1], dtype=torch.float64), torch.tensor([0, 2, 1, 1])
    found = hidden_with_curvature(distances, pair, radials)
    assert found.shape == (2, 3, 4, 4)
    for radial, (value, slope, curvature) in zip(radials, found, strict=True):
        at = [network_with_slope(distances + d, radial.pair_bias, pair, radial.layers) for d in (-STEP, 0, STEP)]
        torch.testing.assert_close(value, at[1][0])
        torch.testing.assert_close(slope, at[1][1])
        torch.testing.assert_close(curvature, (at[2][1] - at[0][1]) / (2 * STEP), rtol=1e-7, atol=1e-8)


def test_curvature_of_the_envelope():
    distances = torch.tensor([0.3, 2.9, 5.9, 6.5], dtype=torch.float64)
    slopes = [reference.envelope_slope(distances + d, CUTOFF) for d in (-STEP, STEP)]
    want = (slopes[1] - slopes[0]) / (2 * STEP)
    torch.testing.assert_close(envelope_curvature(distances, CUTOFF), want, rtol=1e-7, atol=1e-8)
