"""CUDA graphs: a small system's evaluation is hundreds of short kernels; the GPU runs them faster than Python launches.

A recording holds a whole evaluation, from atoms in host memory over the neighbour list to results in host memory. It
has room for somewhat more edges than were last seen, so that one serves a whole trajectory. Entries of that room past
the present edges are valid edges that no sum reaches.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ase_fastuma.graph import COINCIDENT
from ase_fastuma.kernels.neighbours import NUMBERS, EdgeRoom, search_numbers, search_within

if TYPE_CHECKING:
    import numpy as np

    from ase_fastuma.system import System


class EdgeInputs(NamedTuple):
    """What an evaluation reads on the device; N atoms, E edges sorted by target.

    | field | type | meaning |
    |---|---|---|
    | numbers | int64 [N] | atomic numbers |
    | target_start, source_start | int64 [N + 1] | first edge into, first entry of `by_source` out of, each atom |
    | vectors | float64 [E, 3] | x[source] - x[target], images included, A |
    | source, target | int32 [E] | atoms of each edge |
    | by_source | int64 [E] | edges in the order of their source atoms |
    """

    numbers: Tensor
    target_start: Tensor
    source_start: Tensor
    vectors: Tensor
    source: Tensor
    target: Tensor
    by_source: Tensor

    @property
    def num_edges(self) -> int:
        """E."""
        return self.vectors.shape[0]

    @property
    def symmetric(self) -> bool:
        """Whether each edge has its reverse: no neighbour cap has removed any."""
        return self.source_start is self.target_start


Step = Callable[[EdgeInputs], Tensor]


class Recorded(NamedTuple):
    """A CUDA graph, and where in pinned host memory it leaves what the host has to know."""

    graph: torch.cuda.CUDAGraph
    told: Tensor

    def run(self) -> Tensor:
        """Replay, wait for the end and return what is told; the next run overwrites it."""
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        return self.told


class GraphPool:
    """Makes recordings of which none runs beside another, in device memory that they share: what the largest takes.

    One that is no larger than one before finds its memory among its own. A larger one would find every block too small
    and put its own beside them, so that structures which grow step by step would fill the device: it begins anew, and
    all before it are forgotten.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        """`forget` drops every recording that was made here."""
        self._forget = forget
        self._largest = (0, 0)
        self._handle: Any = None  # torch keeps the type of its handles to itself
        self._stream: Any = None

    def record(self, body: Callable[[], Tensor], num_atoms: int, num_edges: int) -> Recorded:
        """Record what `body` does on the current device for so many atoms and edges; the host is told what it returns.

        The body runs once before, so that nothing compiles while recording.
        """
        self._make_room(num_atoms, num_edges)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            out = body()
            told = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            del out
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
            told.copy_(body(), non_blocking=True)
        return Recorded(graph, told)

    def _make_room(self, num_atoms: int, num_edges: int) -> None:
        largest = (max(num_atoms, self._largest[0]), max(num_edges, self._largest[1]))
        if largest == self._largest:
            return
        if self._handle is None:
            self._stream = torch.cuda.Stream()  # one, as torch hands out memory of a stream on that stream alone
        else:
            self._forget()
            torch.cuda.empty_cache()  # else what they held stays with this process
        self._largest, self._handle = largest, torch.cuda.graph_pool_handle()


def spare(num_edges: int) -> int:
    """Spare edges: for what a thermal trajectory adds and loses; no more, since they are worked on too."""
    return num_edges // 64 + 128


def capacity(num_edges: int) -> int:
    """Room for so many edges and the spare ones, in steps of 64."""
    return -(-(num_edges + spare(num_edges)) // 64) * 64


class _Recording:
    """One evaluation as a CUDA graph; numbers go in and out through pinned host memory."""

    def __init__(self, num_atoms: int, capacity: int, cutoff: float, device: torch.device) -> None:
        self.capacity = capacity
        self._cutoff, self._num_atoms = cutoff, num_atoms
        self._room = EdgeRoom.of(capacity, cutoff, device)
        self._input = torch.zeros(4 * num_atoms + NUMBERS, dtype=torch.float64).pin_memory()
        self._on_device = torch.empty_like(self._input, device=device)

    def fill(self, system: System) -> None:
        """Write a system where the graph reads it."""
        n, values = self._num_atoms, self._input.numpy()
        values[: 3 * n] = system.positions.ravel()
        values[3 * n : 4 * n] = system.numbers
        values[4 * n :] = search_numbers(system.cell, system.pbc.tolist(), self._cutoff, n)

    def record(self, step: Step, pool: GraphPool) -> None:
        """Record for the system that is filled in."""
        self._recorded = pool.record(functools.partial(self._body, step), self._num_atoms, self.capacity)

    def _body(self, step: Step) -> Tensor:
        n = self._num_atoms
        self._on_device.copy_(self._input, non_blocking=True)
        positions, numbers = self._on_device[: 3 * n].view(n, 3), self._on_device[3 * n : 4 * n].long()
        found = search_within(positions, self._on_device[4 * n :], self._room)
        room = self._room
        starts = (found.row_start, found.row_start)  # a complete list is symmetric
        flat = step(EdgeInputs(numbers, *starts, room.vectors, room.source, room.target, found.by_source))
        return torch.cat([flat, found.summary])

    def run(self) -> np.ndarray:
        """Evaluate what is filled in: the step's result, then the summary of the search."""
        return self._recorded.run().numpy().copy()


@dataclass
class _Entry:
    """Recordings of one key, and the number of edges seen last (None: not to be recorded)."""

    last: int | None = None
    recordings: list[_Recording] = field(default_factory=list)


class Replays:
    """Recordings of evaluations, each made the second time its key is seen; the least recently used give way."""

    def __init__(self, cutoff: float, max_neighbours: int | None, kept: int = 8) -> None:
        """For edges up to `cutoff` (A), at most `max_neighbours` into an atom; `kept` keys stay."""
        self._cutoff, self._max_neighbours, self._kept = cutoff, max_neighbours, kept
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._pool = GraphPool(self._forget)

    def _forget(self) -> None:
        for entry in self._entries.values():
            entry.recordings.clear()

    def saw(self, key: Hashable, num_edges: int) -> None:
        """Tell how many edges an evaluation had that ran without a recording, and should have one next time."""
        entry = self._entries.setdefault(key, _Entry())
        entry.last = num_edges
        self._entries.move_to_end(key)
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)

    def run(self, key: Hashable, system: System, device: torch.device, step: Step) -> np.ndarray | None:
        """What `step` returns for the system's edges, through a recording; None where none can serve.

        The key names all that the step reads besides its inputs. None for a key that is new, where the edges have
        outgrown the room, where the neighbour cap is active, and where atoms coincide.
        """
        entry = self._entries.get(key)
        if entry is None or entry.last is None:
            return None
        self._entries.move_to_end(key)
        fitting = [r for r in entry.recordings if 0 <= r.capacity - entry.last <= 3 * spare(entry.last)]
        if fitting:
            recording = min(fitting, key=lambda r: r.capacity)
            recording.fill(system)
        else:
            with torch.inference_mode(False):
                recording = _Recording(len(system.numbers), capacity(entry.last), self._cutoff, device)
                recording.fill(system)
                recording.record(step, self._pool)
            entry.recordings = [*entry.recordings[-3:], recording]
        out = recording.run()
        num_edges, most, shortest = out[-3:]
        capped = self._max_neighbours is not None and most > self._max_neighbours
        useless = capped or num_edges > recording.capacity
        entry.last = None if useless else int(num_edges)
        if useless or shortest < COINCIDENT**2:
            return None
        return out[:-3]
