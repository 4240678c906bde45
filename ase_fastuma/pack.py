"""Many systems of one task in one pass: their edges one after another, ordered by mixture of experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ase_fastuma.kernels.linear import RowGroups
from ase_fastuma.network import Mixture
from ase_fastuma.replay import EdgeInputs
from ase_fastuma.system import System


@dataclass(frozen=True)
class Members:
    """What a pass knows of its systems besides atoms and edges: of one, or of S with N atoms and G mixtures.

    Attributes:
        charge, spin: integers; in a pack [S, 1].
        lengths: atoms of each system [S], int64; None for a single one, like all that follows.
        mixture: index of each atom's mixture [N].
        edge_groups: edges of each mixture.
        atom_rows: all atoms as one group, so that an atom's numbers do not depend on how many there are.
    """

    charge: int | Tensor
    spin: int | Tensor
    lengths: Tensor | None = None
    mixture: Tensor | None = None
    edge_groups: RowGroups | None = None
    atom_rows: RowGroups | None = None


@dataclass(frozen=True)
class Pack:
    """Systems in the order in which a pass works on them.

    Attributes:
        order: index of each in the order in which they were given.
        sizes: their numbers of atoms.
        mixtures: the different mixtures among them.
        inputs: their atoms and edges; atomic numbers of mixture g are raised by g * Z, as `Network` wants them.
        members: the rest.
    """

    order: list[int]
    sizes: list[int]
    mixtures: tuple[Mixture, ...]
    inputs: EdgeInputs
    members: Members

    @classmethod
    def of(
        cls, systems: Sequence[System], mixtures: Sequence[Mixture], find: Callable[[System], EdgeInputs], numbers: int
    ) -> Pack:
        """Order systems by mixture and join their edges, which `find` finds.

        `numbers` is how many atomic numbers (Z) a network has weights for.
        """
        different = {mixture: g for g, mixture in enumerate(dict.fromkeys(mixtures))}
        order = sorted(range(len(systems)), key=lambda i: different[mixtures[i]])
        group_of = [different[mixtures[i]] for i in order]
        parts = [find(systems[i]) for i in order]
        device = parts[0].vectors.device
        sizes, edges = [len(p.numbers) for p in parts], [p.num_edges for p in parts]
        first_atoms, first_edges = ([0, *itertools.accumulate(n)] for n in (sizes, edges))

        def joined(name: str, offsets: Sequence[int] | None = None, ends: int | None = None) -> Tensor:
            tensors = [getattr(p, name) for p in parts]
            if ends is not None:  # starts of segments: the last one of a part is the first of the next
                tensors = [t[:-1] for t in tensors]
            if offsets is not None:
                tensors = [t + offset for t, offset in zip(tensors, offsets, strict=True)]
            if ends is not None:
                tensors.append(torch.tensor([ends], device=device))
            return torch.cat(tensors)

        inputs = EdgeInputs(
            joined("numbers", [g * numbers for g in group_of]),
            joined("target_start", first_edges[:-1], first_edges[-1]),
            joined("source_start", first_edges[:-1], first_edges[-1]),
            joined("vectors"),
            joined("source", first_atoms[:-1]),
            joined("target", first_atoms[:-1]),
            joined("by_source", first_edges[:-1]),
        )

        def uploaded(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        counts = np.bincount(group_of, weights=edges, minlength=len(different)).astype(int).tolist()
        lengths = uploaded(sizes)
        members = Members(
            charge=uploaded([systems[i].charge for i in order])[:, None],
            spin=uploaded([systems[i].spin for i in order])[:, None],
            lengths=lengths,
            mixture=uploaded(group_of).repeat_interleave(lengths, output_size=first_atoms[-1]),
            edge_groups=RowGroups([0, *itertools.accumulate(counts)], device),
            atom_rows=RowGroups([0, first_atoms[-1]], device),
        )
        return cls(order, sizes, tuple(different), inputs, members)

    def split(self, flat: np.ndarray, derivatives: bool) -> list[np.ndarray]:
        """Results of each system in the order in which they were given, from those of the pass.

        Both are energies, then with `derivatives` forces and virials, one after another.
        """
        num_atoms = sum(self.sizes)
        forces, virials = flat[num_atoms : 4 * num_atoms], flat[4 * num_atoms :]
        out: list[np.ndarray] = [flat] * len(self.order)
        first = 0
        for place, (i, size) in enumerate(zip(self.order, self.sizes, strict=True)):
            last = first + size
            parts = [flat[first:last]]
            if derivatives:
                parts += [forces[3 * first : 3 * last], virials[9 * place : 9 * place + 9]]
            out[i] = np.concatenate(parts)
            first = last
        return out
