"""Systems whose positions live on the device: evaluated there again and again as they move, with results left there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ase_fastuma.repeats import RepeatedPack

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.engine import FusedBackend
    from ase_fastuma.kernels.many_neighbours import Bins
    from ase_fastuma.system import System


# Evaluations before one is recorded, which costs some three: systems that are soon replaced are not worth it.
_PATIENCE = 8


class Resident:
    """N atoms in S systems of one task in the fused backend, which keep everything but their positions and cells.

    The host learns how many edges there are and whether results are finite, nothing else.
    """

    @torch.inference_mode(False)
    def __init__(self, engine: FusedBackend, checkpoint: Checkpoint, systems: Sequence[System]) -> None:
        """Positions and cells of `systems` are not read."""
        self._engine, self._cutoff = engine, checkpoint.architecture.cutoff
        self._pack = engine.pack(systems)
        self._task = checkpoint.tasks[systems[0].task]
        references = self._task.element_references
        constant = [0.0 if references is None else float(references[system.numbers].sum()) for system in systems]
        device = self._pack.numbers.device
        self._constant = torch.tensor(constant, dtype=torch.float64, device=device) + self._task.mean
        # Where the systems and atoms of the pack stand among those that were given.
        atoms = torch.arange(sum(len(system.numbers) for system in systems))
        parts = atoms.split([len(system.numbers) for system in systems])
        self._atoms = torch.cat([parts[i] for i in self._pack.order]).to(device)
        self._place = torch.tensor(self._pack.order).to(device)
        self._repeated = RepeatedPack(checkpoint.architecture, self._pack, _PATIENCE)

    @torch.inference_mode(False)
    def bins(self, cells: Tensor) -> Bins:
        """What `evaluate` needs of the cells [S, 3, 3] (rows, A): as long as those stay, so does this."""
        return self._pack.bins(cells.detach().double()[self._place], self._cutoff)

    @torch.inference_mode(False)
    def evaluate(self, positions: Tensor, bins: Bins, derivatives: bool) -> dict[str, Tensor] | None:
        """Results at positions [N, 3] (A), float64 on the device; None where something is not finite.

        | name | shape | meaning |
        |---|---|---|
        | energy | [S] | eV, element references included |
        | forces | [N, 3] | eV/A; with `derivatives` |
        | virial | [S, 3, 3] | eV, stress times volume; with `derivatives` |

        Raises ValueError for positions that are not finite, atoms that coincide and periodic cells without volume, and
        torch.OutOfMemoryError.
        """
        flat, finite = self._repeated.run(self._engine, positions.detach().double()[self._atoms], bins, derivatives)
        if not finite:
            return None
        flat = flat * self._task.rmsd
        num_atoms = len(self._atoms)
        energies = torch.segment_reduce(flat[:num_atoms], "sum", lengths=self._pack.systems.atoms, unsafe=True)
        results = {"energy": torch.empty_like(energies).index_copy_(0, self._place, energies) + self._constant}
        if derivatives:
            forces, virials = flat[num_atoms : 4 * num_atoms].view(-1, 3), flat[4 * num_atoms :].view(-1, 3, 3)
            results["forces"] = torch.empty_like(forces).index_copy_(0, self._atoms, forces)
            results["virial"] = torch.empty_like(virials).index_copy_(0, self._place, (virials + virials.mT) / 2)
        return results
