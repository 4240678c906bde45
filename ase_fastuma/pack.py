"""Many systems of one task in one pass: one after another, ordered by mixture of experts."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ase_fastuma.graph import upload
from ase_fastuma.kernels.linear import RowGroups
from ase_fastuma.kernels.many_neighbours import (
    Bins,
    EdgeRoom,
    NeighbourLists,
    Systems,
    bins_of,
    neighbour_lists,
    neighbour_lists_within,
)
from ase_fastuma.network import Mixture
from ase_fastuma.replay import EdgeInputs
from ase_fastuma.system import COINCIDENT, System


@dataclass(frozen=True)
class Members:
    """What a pass knows of its systems besides atoms and edges: of one, or of S with N atoms and G mixtures.

    Attributes:
        charge, spin: integers; in a pack [S].
        systems: which atoms belong to which system; None for a single one, like all that follows.
        mixture: index of each atom's mixture [N].
        edge_groups: edges of each mixture.
        atom_rows: all atoms as one group, so that an atom's numbers do not depend on how many there are.
    """

    charge: int | Tensor
    spin: int | Tensor
    systems: Systems | None = None
    mixture: Tensor | None = None
    edge_groups: RowGroups | None = None
    atom_rows: RowGroups | None = None


@dataclass(frozen=True)
class Pack:
    """Systems in the order in which a pass works on them: all that stays as it is when their atoms move.

    Attributes:
        order: index of each in the order in which they were given.
        mixtures: the different mixtures among them.
        starts: first system of each mixture, and the number of systems.
        first_atoms: first atom of each mixture [G], int64.
        numbers: atomic numbers [N]; those of mixture g are raised by g * Z, as `Network` wants them.
        pbc: which axes are periodic [S, 3].
        members: the rest, but for the edges of each mixture.
    """

    order: list[int]
    mixtures: tuple[Mixture, ...]
    starts: list[int]
    first_atoms: Tensor
    numbers: Tensor
    pbc: Tensor
    members: Members

    @property
    def systems(self) -> Systems:
        """Which atoms belong to which system."""
        assert self.members.systems is not None  # None stands for a single system outside of packs
        return self.members.systems

    @classmethod
    def of(cls, systems: Sequence[System], mixtures: Sequence[Mixture], numbers: int, device: torch.device) -> Pack:
        """Order systems by mixture, on a device. `numbers` is how many atomic numbers (Z) a network has weights for."""
        different = {mixture: g for g, mixture in enumerate(dict.fromkeys(mixtures))}
        order = sorted(range(len(systems)), key=lambda i: different[mixtures[i]])
        group_of = [different[mixtures[i]] for i in order]
        ordered = [systems[i] for i in order]
        sizes = [len(system.numbers) for system in ordered]

        def uploaded(values: object) -> Tensor:
            return upload(np.asarray(values), device)

        packed, num_atoms = Systems.of(sizes, device), sum(sizes)
        members = Members(
            charge=uploaded([system.charge for system in ordered]),
            spin=uploaded([system.spin for system in ordered]),
            systems=packed,
            mixture=uploaded(group_of).repeat_interleave(packed.atoms, output_size=num_atoms),
            atom_rows=RowGroups([0, num_atoms], device),
        )
        starts = [*(group_of.index(g) for g in range(len(different))), len(order)]
        raised = [system.numbers + g * numbers for system, g in zip(ordered, group_of, strict=True)]
        return cls(
            order=order,
            mixtures=tuple(different),
            starts=starts,
            first_atoms=uploaded([packed.starts[system] for system in starts[:-1]]),
            numbers=uploaded(np.concatenate(raised)),
            pbc=uploaded(np.stack([system.pbc for system in ordered])),
            members=members,
        )

    def bins(self, cells: Tensor, cutoff: float) -> Bins:
        """What `find` needs of the systems' cells, float64 [S, 3, 3] (A), and the cutoff (A)."""
        return bins_of(cells, self.pbc, self.systems, cutoff)

    def find(self, positions: Tensor, bins: Bins, max_neighbours: int | None) -> tuple[EdgeInputs, Members]:
        """Find the edges of all systems at their positions, float64 [N, 3] (A).

        Waits once for the device, and twice more where the neighbour cap is active. Raises ValueError, naming both
        atoms, where two atoms or an atom and an image coincide.
        """
        found = neighbour_lists(positions, bins, self.systems, max_neighbours)
        edges = found.edges
        if edges.shortest < COINCIDENT:
            raise self._coincidence(found)
        inputs = EdgeInputs(
            self.numbers,
            edges.row_start,
            edges.source_row_start,
            edges.vectors,
            edges.source,
            edges.target,
            edges.by_source,
        )
        groups = RowGroups([found.starts[system] for system in self.starts], positions.device)
        return inputs, dataclasses.replace(self.members, edge_groups=groups)

    def find_within(self, positions: Tensor, bins: Bins, room: EdgeRoom) -> tuple[EdgeInputs, Members, Tensor]:
        """`find` in kernels, in a room of fixed size (OUTPUT), without waiting for the device.

        The last result is the search's summary: number of edges, most edges into one atom, least squared length. What
        is beyond the edges found counts towards the last mixture.
        """
        found = neighbour_lists_within(positions, bins, self.systems, room)
        starts = (found.row_start, found.row_start)  # a complete list is symmetric
        inputs = EdgeInputs(self.numbers, *starts, room.vectors, room.source, room.target, found.by_source)
        capacity = len(room.source)
        firsts = found.row_start[self.first_atoms]
        groups = RowGroups(torch.cat([firsts, torch.full_like(firsts[:1], capacity)]), positions.device, capacity)
        return inputs, dataclasses.replace(self.members, edge_groups=groups), found.summary

    def _coincidence(self, found: NeighbourLists) -> ValueError:
        closest = int(found.edges.vectors.norm(dim=1).argmin())
        system = bisect_right(found.starts, closest) - 1
        ends = found.edges.source[closest], found.edges.target[closest]
        first, second = sorted(int(atom) - self.systems.starts[system] for atom in ends)
        of = f" of system {self.order[system]}" if len(self.order) > 1 else ""
        return ValueError(
            f"positions: atoms {first} and {second}{of} coincide, expected them more than {COINCIDENT:g} A apart"
        )
