"""Systems whose positions live on the device: evaluated there again and again as they move, with results left there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ase_fastuma.kernels.many_neighbours import Bins, EdgeRoom
from ase_fastuma.replay import EdgeInputs, capacity, record, spare
from ase_fastuma.system import COINCIDENT

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.engine import FusedBackend
    from ase_fastuma.pack import Members, Pack
    from ase_fastuma.system import System


# Evaluations before one is recorded, which costs some three: systems that are soon replaced are not worth it.
_PATIENCE = 8


class Resident:
    """N atoms in S systems of one task in the fused backend, which keep everything but their positions and cells.

    The host learns how many edges there are and whether results are finite, nothing else. Where launching a pass takes
    longer than running it, it is recorded as a CUDA graph, the neighbour list included (see `replay.py`).
    """

    @torch.inference_mode(False)
    def __init__(self, engine: FusedBackend, checkpoint: Checkpoint, systems: Sequence[System]) -> None:
        """Positions and cells of `systems` are not read."""
        self._engine, self._cutoff = engine, checkpoint.architecture.cutoff
        self._max_neighbours = checkpoint.architecture.max_neighbors
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
        self._recordings: dict[bool, _Recording] = {}
        self._evaluations = 0

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
        flat = self._run(positions.detach().double()[self._atoms], bins, derivatives)
        if flat is None:
            return None
        flat = flat * self._task.rmsd
        num_atoms = len(self._atoms)
        energies = torch.segment_reduce(flat[:num_atoms], "sum", lengths=self._pack.members.lengths, unsafe=True)
        results = {"energy": torch.empty_like(energies).index_copy_(0, self._place, energies) + self._constant}
        if derivatives:
            forces, virials = flat[num_atoms : 4 * num_atoms].view(-1, 3), flat[4 * num_atoms :].view(-1, 3, 3)
            results["forces"] = torch.empty_like(forces).index_copy_(0, self._atoms, forces)
            results["virial"] = torch.empty_like(virials).index_copy_(0, self._place, (virials + virials.mT) / 2)
        return results

    def _run(self, positions: Tensor, bins: Bins, derivatives: bool) -> Tensor | None:
        """What `FusedBackend.run_pack` gives; None where it is not finite."""
        recording = self._recordings.get(derivatives)
        if recording is not None:
            found = recording.run(positions, bins)
            if not found.fits:
                del self._recordings[derivatives]
            if found.complete:
                return recording.flat if found.finite else None
        inputs, members = self._pack.find(positions, bins, self._max_neighbours)
        flat = self._engine.step_pack(self._pack, inputs, members, derivatives)
        self._evaluations += 1
        room = capacity(inputs.num_edges)
        if self._evaluations > _PATIENCE and inputs.symmetric and self._engine.recordable(self._pack, room):
            step = functools.partial(self._engine.step_pack, self._pack, derivatives=derivatives)
            limits = _Limits(room, self._cutoff, self._max_neighbours)
            self._recordings[derivatives] = _Recording(self._pack, step, limits, positions, bins)
        return flat if flat.isfinite().all() else None


class _Limits(NamedTuple):
    """Edges that there is room for, the cutoff (A), and most edges into an atom."""

    room: int
    cutoff: float
    max_neighbours: int | None


class _Outcome(NamedTuple):
    """What is to be made of a replay: whether it saw all edges, whether its room still suits, and is it finite."""

    complete: bool
    fits: bool
    finite: bool


class _Recording:
    """Evaluations of a pack as a CUDA graph, with positions and bins to it and `flat` from it on the device."""

    def __init__(
        self, pack: Pack, step: Callable[[EdgeInputs, Members], Tensor], limits: _Limits, positions: Tensor, bins: Bins
    ) -> None:
        self._pack, self._step, self._limits = pack, step, limits
        self._room = EdgeRoom.of(limits.room, limits.cutoff, positions.device)
        self._positions, self._bins, self._given = positions.clone(), Bins(*(t.clone() for t in bins)), bins
        self.flat: Tensor
        with torch.cuda.device_of(positions):
            self._recorded = record(self._body)

    def _body(self) -> Tensor:
        inputs, members, summary = self._pack.find_within(self._positions, self._bins, self._room)
        self.flat = self._step(inputs, members)
        checks = torch.stack([self._bins.sound.all(), self.flat.isfinite().all()])
        return torch.cat([summary, checks.double()])

    def run(self, positions: Tensor, bins: Bins) -> _Outcome:
        """Evaluate; the results are in `flat` until the next run."""
        with torch.cuda.device_of(positions):
            self._positions.copy_(positions)
            if bins is not self._given:
                for mine, given in zip(self._bins, bins, strict=True):
                    mine.copy_(given)
                self._given = bins
            num_edges, most, shortest, sound, finite = self._recorded.run().tolist()
        limits = self._limits
        capped = limits.max_neighbours is not None and most > limits.max_neighbours
        complete = num_edges <= limits.room and not capped and bool(sound) and shortest >= COINCIDENT**2  # not NaN
        return _Outcome(complete, complete and limits.room - num_edges <= 3 * spare(int(num_edges)), bool(finite))
