"""Radial networks with their first two derivatives, for second derivatives of an energy.

The tables of :mod:`.radial` are cubics: right for values and slopes, but their curvature is not. So the networks
themselves are evaluated here, once for all directions and all layers of a model at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .radial import Radial


def hidden_with_curvature(distances: Tensor, pair: Tensor, radials: Sequence[Radial]) -> Tensor:
    """Hidden activations of L radial networks, their slopes (1/A) and curvatures (1/A^2): [L, 3, E, B].

    Args:
        distances: d [E] in A, float64.
        pair: index of each edge's pair of elements [E].
        radials: networks with the same Gaussians, as those of one model have.
    """

    def stacked(tensors: Sequence[Tensor]) -> Tensor:
        out = torch.stack(list(tensors))
        return out[:, None] if out.dim() == 2 else out  # a bias or a weight of a norm: for all edges

    layers = [r.layers for r in radials]
    exponent, dtype = layers[0].gaussian_exponent, layers[0].weight_distance.dtype
    offset = (distances[:, None] - layers[0].centres).to(dtype)
    value = torch.exp(exponent * offset**2)
    slope = 2 * exponent * offset * value
    curvature = 2 * exponent * (value + offset * slope)
    x = torch.cat([value, slope, curvature]) @ stacked([n.weight_distance for n in layers])
    x, dx, ddx = x.chunk(3, dim=1)
    x = x + torch.stack([r.pair_bias for r in radials])[:, pair]
    norms = [stacked([n.norm_first[i] for n in layers]) for i in range(2)]
    x = torch.cat(_norm_silu(x, dx, ddx, *norms), dim=1) @ stacked([n.weight_second for n in layers])
    x, dx, ddx = x.chunk(3, dim=1)
    x = x + stacked([n.bias_second for n in layers])
    norms = [stacked([n.norm_second[i] for n in layers]) for i in range(2)]
    return torch.stack(_norm_silu(x, dx, ddx, *norms), dim=1)


def _norm_silu(x: Tensor, dx: Tensor, ddx: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, then SiLU, of rows x [..., B] with derivatives dx and ddx along one direction."""
    x, dx, ddx = (t - t.mean(dim=-1, keepdim=True) for t in (x, dx, ddx))
    scale = (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    y, dy, ddy = x * scale, dx * scale, ddx * scale
    # The scale's own derivatives, over the scale: -m, and 3 m^2 less the mean of dy^2 + y ddy.
    m = (y * dy).mean(dim=-1, keepdim=True)
    n = 3 * m.square() - (dy.square() + y * ddy).mean(dim=-1, keepdim=True)
    y, dy, ddy = y, dy - m * y, ddy - 2 * m * dy + n * y
    y, dy, ddy = y * weight + bias, dy * weight, ddy * weight
    value, first, second = silu_with_derivatives(y)
    return value, first * dy, second * dy.square() + first * ddy


def silu_with_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU, its slope and its curvature."""
    s = x.sigmoid()
    return x * s, s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))


def envelope_curvature(distances: Tensor, cutoff: float) -> Tensor:
    """Second derivative of :func:`.reference.envelope` with respect to the distance (1/A^2)."""
    u = distances / cutoff
    return torch.where(u < 1, -210 / cutoff**2 * u**3 * (1 - u) * (2 - 3 * u), torch.zeros_like(u))
