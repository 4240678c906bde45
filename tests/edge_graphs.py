"""Random graphs and functions that do not depend on the roll about an edge, for the tests of edge operations."""

from __future__ import annotations

import torch
from ase_fastuma.kernels.edge import EdgeList, sorted_edges
from ase_fastuma.kernels.layout import RADIAL_OF_M_MAJOR
from torch import Tensor

SIZES = [(1, 0), (1, 1), (3, 7), (5, 23), (13, 32)]
"""Atoms and edges: none, one, primes, a power of two."""


def random_edges(num_nodes: int, num_edges: int, device: str, dtype: torch.dtype) -> tuple[Tensor, EdgeList]:
    """Edge vectors [E, 3] and indices; the first edges lie along +y, -y and z, where frames are special."""
    generator = torch.Generator().manual_seed(num_edges)
    target = torch.randint(num_nodes, (num_edges,), generator=generator).sort().values
    source = torch.randint(num_nodes, (num_edges,), generator=generator)
    vectors = torch.randn(num_edges, 3, generator=generator, dtype=torch.float64)
    special = torch.tensor([[0.0, 1.3, 0.0], [0.0, -0.7, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    vectors[:3] = special[: min(3, num_edges)]
    return vectors.to(device, dtype), sorted_edges(source.to(device), target.to(device), num_nodes)


def random(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def roll_invariant(y: Tensor, seed: int = 1) -> Tensor:
    """A scalar of edge features y [E, 9, W], m-major, that no roll about an edge changes."""
    weights = random((y.shape[0], 6, y.shape[2]), str(y.device), y.dtype, seed).abs()
    return (weights[:, list(RADIAL_OF_M_MAJOR)] * y.square()).sum()


def roll_equivariant(y: Tensor, seed: int = 2) -> Tensor:
    """Edge features of which a roll about an edge turns the +m and -m coefficients as it turns those of y."""
    weights = random((y.shape[0], 6, y.shape[2]), str(y.device), y.dtype, seed)
    return weights[:, list(RADIAL_OF_M_MAJOR)] * y
