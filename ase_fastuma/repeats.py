"""Packs that are evaluated again and again while atoms move: small ones as CUDA graphs, neighbour list included."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ase_fastuma.graph import upload
from ase_fastuma.kernels.many_neighbours import Bins, EdgeRoom
from ase_fastuma.replay import EdgeInputs, GraphPool, capacity, spare
from ase_fastuma.system import COINCIDENT

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Architecture
    from ase_fastuma.engine import FusedBackend
    from ase_fastuma.network import Network
    from ase_fastuma.pack import Members, Pack
    from ase_fastuma.system import System


class RepeatedPack:
    """A pack in the fused backend. Where launching a pass takes longer than running it, the pass is recorded."""

    def __init__(self, architecture: Architecture, pack: Pack, patience: int, pool: GraphPool | None = None) -> None:
        """Record after so many evaluations (it costs some three), with memory from this pool or one of its own."""
        self.pack = pack
        self._architecture, self._patience = architecture, patience
        self._pool = pool or GraphPool(self.forget)
        self._evaluations = 0
        self._recordings: dict[bool, _Recording] = {}

    def forget(self) -> None:
        """Drop what is recorded."""
        self._recordings.clear()

    def run(self, engine: FusedBackend, positions: Tensor, bins: Bins, derivatives: bool) -> tuple[Tensor, bool]:
        """What the engine's `step_pack` gives, which stays until the next run, and whether all of it is finite."""
        recording = self._recordings.get(derivatives)
        if recording is not None:
            found = recording.run(positions, bins)
            if not found.fits:
                del self._recordings[derivatives]
            if found.complete:
                return recording.flat, found.finite
        cutoff, max_neighbours = self._architecture.cutoff, self._architecture.max_neighbors
        inputs, members = self.pack.find(positions, bins, max_neighbours)
        flat = engine.step_pack(self.pack, inputs, members, derivatives)
        self._evaluations += 1
        room = capacity(inputs.num_edges)
        if self._evaluations > self._patience and inputs.symmetric and engine.recordable(self.pack, room):
            step = functools.partial(engine.step_pack, self.pack, derivatives=derivatives)
            limits, weights = _Limits(room, cutoff, max_neighbours), engine.weights_of(self.pack)
            recording = _Recording(self.pack, step, limits, positions, bins, weights, self._pool)
            self._recordings[derivatives] = recording
        return flat, bool(flat.isfinite().all())


class HostPack:
    """A repeated pack with positions and cells from the host, and results to it."""

    def __init__(self, repeated: RepeatedPack, cutoff: float) -> None:
        self.repeated, self._cutoff = repeated, cutoff
        self.order = repeated.pack.order
        self._cells: bytes | None = None
        self._bins: Bins

    def run(self, engine: FusedBackend, ordered: Sequence[System], derivatives: bool) -> tuple[np.ndarray, bool]:
        """`RepeatedPack.run` for systems in the order of the pack."""
        device = self.repeated.pack.numbers.device
        cells = np.stack([system.cell for system in ordered])
        # Vectors of open axes make no difference, and change with the atoms.
        key = np.where(np.stack([system.pbc for system in ordered])[:, :, None], cells, 0.0).tobytes()
        if key != self._cells:
            self._bins, self._cells = self.repeated.pack.bins(upload(cells, device), self._cutoff), key
        positions = upload(np.concatenate([system.positions for system in ordered]), device)
        flat, finite = self.repeated.run(engine, positions, self._bins, derivatives)
        return flat.cpu().numpy(), finite


class Repeats:
    """Packs of systems on the host that may come again, as images of a path do; the least recently used give way."""

    def __init__(self, architecture: Architecture, kept: int = 4, patience: int = 2) -> None:
        self._architecture, self._kept, self._patience = architecture, kept, patience
        self._packs: OrderedDict[tuple, HostPack] = OrderedDict()
        self._pool = GraphPool(self._forget)

    def _forget(self) -> None:
        for pack in self._packs.values():
            pack.repeated.forget()

    def of(self, engine: FusedBackend, systems: Sequence[System]) -> HostPack:
        """The pack of systems of one task: the same as long as only positions and cells differ."""
        key = (systems[0].task, *((s.numbers.tobytes(), s.pbc.tobytes(), s.charge, s.spin) for s in systems))
        found = self._packs.get(key)
        if found is None:
            repeated = RepeatedPack(self._architecture, engine.pack(systems), self._patience, self._pool)
            found = self._packs[key] = HostPack(repeated, self._architecture.cutoff)
        self._packs.move_to_end(key)
        while len(self._packs) > self._kept:
            self._packs.popitem(last=False)
        return found


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
        self,
        pack: Pack,
        step: Callable[[EdgeInputs, Members], Tensor],
        limits: _Limits,
        positions: Tensor,
        bins: Bins,
        weights: Network,
        pool: GraphPool,
    ) -> None:
        self._limits, self._weights = limits, weights  # which the graph reads, whether others still know them or not
        self._room = EdgeRoom.of(limits.room, limits.cutoff, positions.device)
        self._positions, self._bins, self._given = positions.clone(), Bins(*(t.clone() for t in bins)), bins
        self.flat: Tensor
        with torch.cuda.device_of(positions):
            self._recorded = pool.record(functools.partial(self._body, pack, step), len(positions), limits.room)

    def _body(self, pack: Pack, step: Callable[[EdgeInputs, Members], Tensor]) -> Tensor:
        inputs, members, summary = pack.find_within(self._positions, self._bins, self._room)
        self.flat = step(inputs, members)
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
