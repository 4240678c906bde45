"""Atoms to edges: the arrays that the fused engine reads on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ase_fastuma.kernels.neighbours import NeighbourList, neighbour_list
from ase_fastuma.kernels.neighbours import upload as upload_tensor
from ase_fastuma.system import COINCIDENT

if TYPE_CHECKING:
    from ase_fastuma.system import System


@dataclass(frozen=True)
class Graph:
    """One system on a device; N atoms, E edges.

    | field | type | meaning |
    |---|---|---|
    | numbers | int64 [N] | atomic numbers |
    | positions | float64 [N, 3] | A, as given |
    | cell | float64 [3, 3] | rows are the completed lattice vectors, A |
    | edges | NeighbourList | source, target, shift, vectors and both segment orders; its docstring has the table |
    """

    numbers: torch.Tensor
    positions: torch.Tensor
    cell: torch.Tensor
    edges: NeighbourList


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device, without waiting for the device."""
    return upload_tensor(torch.tensor(array), device)


def build_graph(system: System, cutoff: float, max_neighbours: int | None, device: torch.device) -> Graph:
    """Put a system on the device and find its edges (cutoff in A).

    One host synchronisation, and one more when the neighbour cap is active. Raises ValueError, naming both atoms, where
    two atoms or an atom and an image coincide.
    """
    positions = upload(system.positions, device)
    edges = neighbour_list(positions, torch.tensor(system.cell), [bool(p) for p in system.pbc], cutoff, max_neighbours)
    if edges.shortest < COINCIDENT:
        closest = edges.vectors.norm(dim=1).argmin()
        first, second = sorted((int(edges.source[closest]), int(edges.target[closest])))
        raise ValueError(
            f"positions: atoms {first} and {second} coincide, expected them more than {COINCIDENT:g} A apart"
        )
    return Graph(upload(system.numbers, device), positions, upload(system.cell, device), edges)
