"""Neighbour lists of many systems at once: the search of `neighbours.py`, bins of all systems numbered through.

One sequence of launches and one host synchronisation serve all systems, whose atoms follow one another. What is found
in a system does not depend on the others, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._binning import FEWEST_BINS, Bins, plan
from .neighbours import EdgeRoom, Edges, FoundEdges, NeighbourList, assemble, count, fill, search_plain, within


@dataclass(frozen=True)
class Systems:
    """Which atoms belong to which of S systems: what a search needs that does not change when atoms move.

    Attributes:
        sizes: atoms of each system, at least one.
        starts: first atom of each system, and the number of atoms [S + 1]; `first_atom` has them on the device, int64.
        of_atom: system of each atom [N], int32.
        atoms, first_bin: atoms of each system, bins of those before it [S], int64.
        num_bins: bins of all systems, at most.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    first_atom: Tensor
    of_atom: Tensor
    atoms: Tensor
    first_bin: Tensor
    num_bins: int

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Systems:
        """Systems of these sizes on a device."""
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes: expected at least one system and one atom in each, got {list(sizes)}")
        starts = (0, *itertools.accumulate(sizes))
        first_bins = (0, *itertools.accumulate(max(size, FEWEST_BINS) for size in sizes))
        atoms = torch.tensor(sizes)
        of_atom = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(atoms)
        moved = (tensor.to(device) for tensor in (torch.tensor(starts), of_atom, atoms, torch.tensor(first_bins[:-1])))
        return cls(tuple(sizes), starts, *moved, first_bins[-1])


class NeighbourLists(NamedTuple):
    """What `neighbour_lists` finds.

    | field | type | meaning |
    |---|---|---|
    | edges | NeighbourList | the edges of all systems, atoms and edges numbered through |
    | starts | list of S + 1 | first edge of each system, and the number of edges |
    """

    edges: NeighbourList
    starts: list[int]


def bins_of(cells: Tensor, pbc: Tensor, systems: Systems, cutoff: float) -> Bins:
    """What a search needs of the systems' cells: as long as those stay, so does this. Does not wait for the device.

    cells: float64 [S, 3, 3], rows are lattice vectors, A; vectors of open axes are not read. pbc: bool [S, 3].
    cutoff: A. Raises TypeError and ValueError for another dtype, shape or cutoff.
    """
    num_systems = len(systems.sizes)
    for name, tensor, dtype, shape in (
        ("cells", cells, torch.float64, (num_systems, 3, 3)),
        ("pbc", pbc, torch.bool, (num_systems, 3)),
    ):
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise ValueError(f"cutoff: expected a positive length in A, got {cutoff}")
    return plan(cells, pbc, cutoff, systems.atoms, systems.first_bin)


@torch.no_grad()
def neighbour_lists(
    positions: Tensor, bins: Bins, systems: Systems, max_neighbours: int | None = None
) -> NeighbourLists:
    """All edges within the cutoff of `bins`, of each system those that `neighbour_list` finds.

    positions: float64 [N, 3], A, of all systems. One host synchronisation, and two more where the cap is active.

    Raises TypeError for another dtype, ValueError for a wrong shape or cap, for positions that are not finite and
    for periodic cells without volume.
    """
    if positions.dtype != torch.float64:
        raise TypeError(f"positions: expected torch.float64, got {positions.dtype}")
    if positions.shape != (systems.starts[-1], 3):
        raise ValueError(f"positions: expected shape {[systems.starts[-1], 3]}, got {list(positions.shape)}")
    if max_neighbours is not None and max_neighbours < 1:
        raise ValueError(f"max_neighbours: expected None or at least 1, got {max_neighbours}")
    search = _search_triton if positions.is_cuda else _search_plain
    found, starts = search(positions.contiguous(), bins, systems)
    edges = assemble(found, max_neighbours)
    if edges.capped:
        starts = edges.row_start[systems.first_atom].tolist()
    return NeighbourLists(edges, starts)


@torch.no_grad()
def neighbour_lists_within(positions: Tensor, bins: Bins, systems: Systems, room: EdgeRoom) -> FoundEdges:
    """`neighbour_lists` in kernels, without waiting for the device, so that a CUDA graph may hold it; see there.

    The edges go into `room` (OUTPUT). They mean nothing where `bins.sound` does not hold, or where the least length is
    NaN: then a position is not finite.
    """
    return within(count(positions, bins.box, bins.grid, systems.num_bins, systems.of_atom), room)


def _search_triton(positions: Tensor, bins: Bins, systems: Systems) -> tuple[Edges, list[int]]:
    """Find the edges in kernels."""
    with torch.cuda.device_of(positions):  # Triton launches on the current device
        counted = count(positions, bins.box, bins.grid, systems.num_bins, systems.of_atom)
        starts = counted.row_start[systems.first_atom]
        told = torch.cat([starts.double(), counted.summary, bins.sound.all().double()[None]])
        *starts, _, most, least, sound = told.tolist()  # the one synchronisation
        if not sound:
            bins.check()
        if math.isnan(least):
            check_finite(positions)
        starts = [int(start) for start in starts]
        return fill(counted, starts[-1], int(most), least), starts


def _search_plain(positions: Tensor, bins: Bins, systems: Systems) -> tuple[Edges, list[int]]:
    """Find the edges system by system in PyTorch."""
    bins.check()
    check_finite(positions)
    parts = [
        search_plain(positions[first:last], Bins(*(field[i : i + 1] for field in bins)))
        for i, (first, last) in enumerate(itertools.pairwise(systems.starts))
    ]
    starts = [0, *itertools.accumulate(len(part.source) for part in parts)]
    row_starts = [part.row_start[:-1] + start for part, start in zip(parts, starts, strict=False)]
    joined = Edges(
        source=torch.cat([part.source + first for part, first in zip(parts, systems.starts, strict=False)]),
        target=torch.cat([part.target + first for part, first in zip(parts, systems.starts, strict=False)]),
        shift=torch.cat([part.shift for part in parts]),
        vectors=torch.cat([part.vectors for part in parts]),
        row_start=torch.cat([*row_starts, torch.tensor(starts[-1:], device=positions.device)]),
        most=max(part.most for part in parts),
        shortest=min(part.shortest for part in parts),
    )
    return joined, starts


def check_finite(positions: Tensor) -> None:
    """Raise ValueError where positions are not finite, naming atoms. Waits for the device."""
    bad = (~positions.isfinite().all(1)).nonzero().flatten().tolist()
    if bad:
        shown = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
        raise ValueError(f"positions: expected finite numbers, got NaN or infinity for atoms {shown}")
