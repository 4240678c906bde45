"""Neighbour list: every pair of atoms, periodic images included, within a cutoff.

An edge s -> t with lattice shift n has the vector  r = x_s - x_t + n @ cell  and belongs to the list when |r| <= cutoff
and it does not join an atom to itself (s = t and n = 0). Edges are sorted by target.

Method (O(N + E) memory for any cell):

1. Wrap the atoms into the cell and assign each to a bin at least one cutoff wide. A cell thinner than that is one bin
   along the axis. An open axis has no box, so its bins repeat: distant atoms may share a bin, and their distance
   rejects them.
2. Sort the atoms by bin (stable, so the order never depends on a launch).
3. For each target visit the surrounding bins. Along a periodic axis a bin index that leaves the cell comes back with an
   image number, so small cells and large ones take the same path: a small cell visits one bin under many images.
4. Count, take the cumulative sum, read the number of edges (the one host synchronisation), fill.

`search_plain` states this in PyTorch and serves the CPU; `_search_triton` is the same search in kernels. All geometry
is float64 with the same operations in the same order and no fused multiply-add. Both therefore decide every pair alike,
also one that lies exactly on the cutoff, and r(s -> t) is bitwise -r(t -> s): an uncapped list is exactly symmetric.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from ._binning import BOX, FEWEST_BINS, GRID, Bins, plan
from ._launch import cdiv

if TYPE_CHECKING:
    import numpy as np

NUMBERS = BOX.value + GRID.value
"""How many numbers `search_numbers` gives."""

# An atom past the cap keeps neighbours up to this much (A^2) beyond the squared distance of the first one past it, so a
# shell of equal distances is never split. UMA's models are trained with this rule.
_SHELL_TOLERANCE = 0.01


@dataclass(frozen=True)
class NeighbourList:
    """Edges within the cutoff, sorted by target; N atoms, E edges, on the device of the positions.

    | field | type | meaning |
    |---|---|---|
    | source, target | int32 [E] | edge source -> target |
    | shift | int32 [E, 3] | lattice shift n of the source's image |
    | vectors | float64 [E, 3] | x[source] - x[target] + shift @ cell, A |
    | row_start | int64 [N + 1] | edges into atom t are row_start[t] : row_start[t + 1] |
    | by_source | int64 [E] | permutation that sorts the edges by source, stable |
    | source_row_start | int64 [N + 1] | edges out of atom s: by_source[source_row_start[s] : source_row_start[s + 1]] |
    | capped | bool | the neighbour cap removed edges, so a reverse edge may be missing |
    | shortest | float | length of the shortest edge, A; inf without edges |
    """

    source: torch.Tensor
    target: torch.Tensor
    shift: torch.Tensor
    vectors: torch.Tensor
    row_start: torch.Tensor
    by_source: torch.Tensor
    source_row_start: torch.Tensor
    capped: bool
    shortest: float


@dataclass(frozen=True)
class Edges:
    """What a search finds: see NeighbourList; `most` is the largest number of edges into one atom, before a cap."""

    source: torch.Tensor
    target: torch.Tensor
    shift: torch.Tensor
    vectors: torch.Tensor
    row_start: torch.Tensor
    most: int
    shortest: float


def _plan_bins(cell: torch.Tensor, periodic: Sequence[bool], cutoff: float, n_atoms: int) -> Bins:
    """The bins of one system on the CPU; raises ValueError for a periodic cell without volume."""
    atoms = torch.tensor([n_atoms])
    bins = plan(cell.cpu()[None], torch.tensor([list(periodic)]), cutoff, atoms, torch.zeros_like(atoms))
    bins.check()
    return bins


def _sort_by_bin(bins: torch.Tensor, n_bins: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 [N] -> sorted bins int32 [N], order int64 [N], and bin_start int64 [n_bins + 1]."""
    sorted_bins, order = torch.sort(bins, stable=True)
    edges_of_bins = torch.arange(n_bins + 1, dtype=torch.int32, device=bins.device)
    return sorted_bins, order, torch.searchsorted(sorted_bins, edges_of_bins)


# --- plain PyTorch ---------------------------------------------------------------------------------------------------


def _combine(coefficients: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """coefficients [n, 3] @ rows [3, 3], rounded after every operation (a matrix product may fuse them)."""
    c = coefficients.to(rows.dtype)
    return c[:, 0:1] * rows[0] + c[:, 1:2] * rows[1] + c[:, 2:3] * rows[2]


def _squared_length(vectors: torch.Tensor) -> torch.Tensor:
    """[n, 3] -> [n], rounded after every operation."""
    x, y, z = vectors.unbind(1)
    return x * x + y * y + z * z


def _assign_plain(
    positions: torch.Tensor, box: torch.Tensor, grid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wrapped positions float64 [N, 3], cell turns taken off int32 [N, 3], bin along each axis int64 [N, 3]."""
    lattice, inverse, density = box[:9].view(3, 3), box[9:18].view(3, 3), box[18:21]
    number, periodic = grid[:3], grid[9:12].bool()
    coordinates = _combine(positions, inverse)
    turns = torch.where(periodic, coordinates.floor(), 0.0)
    wrapped = positions - _combine(turns, lattice)
    scaled = ((coordinates - turns) * density).floor()
    folded = torch.where(periodic, scaled, scaled - (scaled / number).floor() * number)
    # Rounding can bring a coordinate up to exactly 1: such an atom stays in the last bin.
    place = torch.minimum(folded.long().clamp(min=0), number.long() - 1)
    return wrapped, turns.int(), place


def search_plain(positions: torch.Tensor, bins: Bins, budget: int = 1 << 20) -> Edges:
    """Find the edges of one system in PyTorch; temporaries hold about `budget` candidate pairs."""
    device, n_atoms = positions.device, len(positions)
    box, grid = bins.box[0].to(device), bins.grid[0].to(device)
    lattice, (number, low, visits, periodic) = box[:9].view(3, 3), grid[:12].long().view(4, 3)
    wrapped, turns, place = _assign_plain(positions, box, grid)
    strides = torch.stack([number[1] * number[2], number[2], torch.ones_like(number[2])])
    _, order, bin_start = _sort_by_bin((place * strides).sum(1).int(), int(number.prod()))
    offsets = torch.cartesian_prod(
        *(torch.arange(first, first + n, device=device) for first, n in zip(low.tolist(), visits.tolist(), strict=True))
    )
    fullest = int(bin_start.diff().max())
    step = max(1, budget // (len(offsets) * fullest))

    found = []
    for begin in range(0, n_atoms, step):
        raw = (place[begin : begin + step, None] + offsets).reshape(-1, 3)  # [T * Q, 3]
        image = raw.div(number, rounding_mode="floor")
        visited = ((raw - image * number) * strides).sum(1)
        image = image * periodic
        first = bin_start[visited]
        length = bin_start[visited + 1] - first
        visit = torch.repeat_interleave(torch.arange(len(visited), device=device), length)
        within = torch.arange(len(visit), device=device) - (length.cumsum(0) - length)[visit]
        source = order[first[visit] + within]
        target = begin + visit // len(offsets)
        image = image[visit]
        vectors = (wrapped[source] - wrapped[target]) + _combine(image, lattice)
        itself = (source == target) & (image == 0).all(1)
        keep = ((_squared_length(vectors) <= box[21]) & ~itself).nonzero().squeeze(1)
        source, target = source[keep], target[keep]
        shift = image[keep].int() - turns[source] + turns[target]
        found.append((source.int(), target.int(), shift, vectors[keep]))

    source, target, shift, vectors = (torch.cat(parts) for parts in zip(*found, strict=True))
    counts = torch.bincount(target, minlength=n_atoms)
    row_start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    shortest = math.sqrt(_squared_length(vectors).min()) if len(source) else math.inf
    return Edges(source, target, shift, vectors, row_start, int(counts.max()), shortest)


# --- Triton ----------------------------------------------------------------------------------------------------------
#
# One program of one warp per target, so scans and reductions need no barrier. Its lanes hold 32 bins x 4 atoms: the 27
# bins around an atom are one step over the bins, a bin of condensed matter (about 20 atoms) five steps over its atoms,
# and the many one-atom images of a tiny cell fill the lanes as well. Launches have these shapes whatever the system.
_LANES = 128
_ATOMS_PER_BIN = 4
# No fused multiply-add: see the top of the file.
_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}

# Bins come as two tensors, box and grid: see _binning.py. With MANY systems, the atoms of each take its rows of them.


@triton.jit
def _combine_column(a, b, c, rows, column: tl.constexpr):
    """Component `column` of (a, b, c) @ rows."""
    return a * tl.load(rows + column) + b * tl.load(rows + 3 + column) + c * tl.load(rows + 6 + column)


@triton.jit
def _squared(x, y, z):
    return x * x + y * y + z * z


@triton.jit
def _assign_axis(coordinate, box, grid, axis: tl.constexpr):
    """Cell turns (float64) and bin index (int32) of a coordinate along one axis."""
    number = tl.load(grid + axis)
    periodic = tl.load(grid + 9 + axis) != 0
    turn = tl.where(periodic, tl.floor(coordinate), 0.0)
    scaled = tl.floor((coordinate - turn) * tl.load(box + 18 + axis))
    folded = tl.where(periodic, scaled, scaled - tl.floor(scaled / number.to(tl.float64)) * number)
    return turn, tl.minimum(tl.maximum(folded.to(tl.int32), 0), number - 1)


@triton.jit(do_not_specialize=["n_atoms"])
def _assign_kernel(
    positions, system, box, grid, wrapped, turns, bins, n_atoms, MANY: tl.constexpr, BLOCK: tl.constexpr
):
    """wrapped = x - floor(x @ inverse) @ lattice along periodic axes; bins = linear index of the bin."""
    atom = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n_atoms
    if MANY:
        of_atom = tl.load(system + atom, mask=mask, other=0)
        box += of_atom * BOX
        grid += of_atom * GRID
    x = tl.load(positions + atom * 3, mask=mask, other=0.0)
    y = tl.load(positions + atom * 3 + 1, mask=mask, other=0.0)
    z = tl.load(positions + atom * 3 + 2, mask=mask, other=0.0)
    inverse = box + 9
    turn_0, bin_0 = _assign_axis(_combine_column(x, y, z, inverse, 0), box, grid, 0)
    turn_1, bin_1 = _assign_axis(_combine_column(x, y, z, inverse, 1), box, grid, 1)
    turn_2, bin_2 = _assign_axis(_combine_column(x, y, z, inverse, 2), box, grid, 2)
    tl.store(wrapped + atom * 3, x - _combine_column(turn_0, turn_1, turn_2, box, 0), mask=mask)
    tl.store(wrapped + atom * 3 + 1, y - _combine_column(turn_0, turn_1, turn_2, box, 1), mask=mask)
    tl.store(wrapped + atom * 3 + 2, z - _combine_column(turn_0, turn_1, turn_2, box, 2), mask=mask)
    tl.store(turns + atom * 3, turn_0.to(tl.int32), mask=mask)
    tl.store(turns + atom * 3 + 1, turn_1.to(tl.int32), mask=mask)
    tl.store(turns + atom * 3 + 2, turn_2.to(tl.int32), mask=mask)
    linear = (bin_0 * tl.load(grid + 1) + bin_1) * tl.load(grid + 2) + bin_2
    tl.store(bins + atom, tl.load(grid + 12) + linear, mask=mask)


@triton.jit
def _visit_axis(place, step, grid, axis: tl.constexpr):
    """Bin index and image number of the step-th raw bin around `place` along one axis."""
    number = tl.load(grid + axis)
    low = tl.load(grid + 3 + axis)
    ahead = place + low + step - low * number  # never negative, so that division rounds down
    return ahead % number, (ahead // number + low) * tl.load(grid + 9 + axis)


@triton.jit
def _visit(home, visit, bin_start, grid):
    """Atoms first : last (ranks by bin) and image numbers of the visit-th raw bin around bin `home`."""
    first_bin = tl.load(grid + 12)
    home -= first_bin
    number_1 = tl.load(grid + 1)
    number_2 = tl.load(grid + 2)
    visits_0 = tl.load(grid + 6)
    visits_1 = tl.load(grid + 7)
    visits_2 = tl.load(grid + 8)
    bin_0, image_0 = _visit_axis(home // (number_1 * number_2), visit // (visits_1 * visits_2), grid, 0)
    bin_1, image_1 = _visit_axis(home // number_2 % number_1, visit // visits_2 % visits_1, grid, 1)
    bin_2, image_2 = _visit_axis(home % number_2, visit % visits_2, grid, 2)
    visited = first_bin + (bin_0 * number_1 + bin_1) * number_2 + bin_2
    mask = visit < visits_0 * visits_1 * visits_2
    first = tl.load(bin_start + visited, mask=mask, other=0).to(tl.int32)
    last = tl.load(bin_start + visited + 1, mask=mask, other=0).to(tl.int32)
    return first, last, image_0, image_1, image_2


@triton.jit
def _pair(wrapped, box, rank, other, mask, image_0, image_1, image_2):
    """Whether other -> rank (ranks by bin) is an edge, and its vector and squared length."""
    target = wrapped + rank.to(tl.int64) * 3
    source = wrapped + other.to(tl.int64) * 3
    n_0 = image_0.to(tl.float64)
    n_1 = image_1.to(tl.float64)
    n_2 = image_2.to(tl.float64)
    x = tl.load(source, mask=mask, other=0.0) - tl.load(target) + _combine_column(n_0, n_1, n_2, box, 0)
    y = tl.load(source + 1, mask=mask, other=0.0) - tl.load(target + 1) + _combine_column(n_0, n_1, n_2, box, 1)
    z = tl.load(source + 2, mask=mask, other=0.0) - tl.load(target + 2) + _combine_column(n_0, n_1, n_2, box, 2)
    squared = _squared(x, y, z)
    itself = (other == rank) & (image_0 == 0) & (image_1 == 0) & (image_2 == 0)
    return mask & (squared <= tl.load(box + 21)) & (itself == 0), x, y, z, squared


@triton.jit
def _count_kernel(
    wrapped,
    order,
    bins,
    bin_start,
    system,
    box,
    grid,
    counts,
    shortest,
    MANY: tl.constexpr,
    LANES: tl.constexpr,
    ATOMS_PER_BIN: tl.constexpr,
):
    """counts[t] = number of edges into t, shortest[t] = least squared length of them.

    Without edges, the length is infinite; of an atom whose place is not finite, NaN.
    """
    rank = tl.program_id(0)
    target = tl.load(order + rank)
    if MANY:
        of_atom = tl.load(system + target)
        box += of_atom * BOX
        grid += of_atom * GRID
    home = tl.load(bins + rank)
    lane = tl.arange(0, LANES)
    n_visits = tl.load(grid + 6) * tl.load(grid + 7) * tl.load(grid + 8)
    count = tl.zeros([LANES], dtype=tl.int32)
    least = tl.full([LANES], float("inf"), dtype=tl.float64)
    for visit in range(0, n_visits, LANES // ATOMS_PER_BIN):
        first, last, image_0, image_1, image_2 = _visit(home, visit + lane // ATOMS_PER_BIN, bin_start, grid)
        for atom in range(0, tl.max(last - first), ATOMS_PER_BIN):
            other = first + atom + lane % ATOMS_PER_BIN
            edge, _, _, _, squared = _pair(wrapped, box, rank, other, other < last, image_0, image_1, image_2)
            count += edge.to(tl.int32)
            least = tl.minimum(least, tl.where(edge, squared, float("inf")))
    place = wrapped + rank.to(tl.int64) * 3
    extent = tl.abs(tl.load(place)) + tl.abs(tl.load(place + 1)) + tl.abs(tl.load(place + 2))
    tl.store(counts + target, tl.sum(count))
    tl.store(shortest + target, tl.where(extent < float("inf"), tl.min(least), float("nan")))


@triton.jit(do_not_specialize=["capacity"])
def _fill_kernel(
    wrapped,
    order,
    bins,
    bin_start,
    system,
    box,
    grid,
    turns,
    row_start,
    source,
    target,
    shift,
    vectors,
    capacity,
    SHIFT: tl.constexpr,
    MANY: tl.constexpr,
    LANES: tl.constexpr,
    ATOMS_PER_BIN: tl.constexpr,
):
    """Write the edges that _count_kernel counted, in the order of the visits; none beyond the capacity."""
    rank = tl.program_id(0)
    atom_t = tl.load(order + rank)
    if MANY:
        of_atom = tl.load(system + atom_t)
        box += of_atom * BOX
        grid += of_atom * GRID
    home = tl.load(bins + rank)
    slot = tl.load(row_start + atom_t)  # int64
    lane = tl.arange(0, LANES)
    n_visits = tl.load(grid + 6) * tl.load(grid + 7) * tl.load(grid + 8)
    for visit in range(0, n_visits, LANES // ATOMS_PER_BIN):
        first, last, image_0, image_1, image_2 = _visit(home, visit + lane // ATOMS_PER_BIN, bin_start, grid)
        for atom in range(0, tl.max(last - first), ATOMS_PER_BIN):
            other = first + atom + lane % ATOMS_PER_BIN
            edge, x, y, z, _ = _pair(wrapped, box, rank, other, other < last, image_0, image_1, image_2)
            one = edge.to(tl.int32)
            out = slot + tl.cumsum(one) - one
            slot += tl.sum(one)
            edge = edge & (out < capacity)
            atom_s = tl.load(order + other, mask=edge, other=0)
            tl.store(source + out, atom_s.to(tl.int32), mask=edge)
            tl.store(target + out, tl.zeros([LANES], dtype=tl.int32) + atom_t.to(tl.int32), mask=edge)
            if SHIFT:
                turn_s = turns + atom_s * 3
                turn_t = turns + atom_t * 3
                shift_0 = image_0 - tl.load(turn_s, mask=edge, other=0) + tl.load(turn_t)
                shift_1 = image_1 - tl.load(turn_s + 1, mask=edge, other=0) + tl.load(turn_t + 1)
                shift_2 = image_2 - tl.load(turn_s + 2, mask=edge, other=0) + tl.load(turn_t + 2)
                tl.store(shift + out * 3, shift_0, mask=edge)
                tl.store(shift + out * 3 + 1, shift_1, mask=edge)
                tl.store(shift + out * 3 + 2, shift_2, mask=edge)
            tl.store(vectors + out * 3, x, mask=edge)
            tl.store(vectors + out * 3 + 1, y, mask=edge)
            tl.store(vectors + out * 3 + 2, z, mask=edge)


def _assign_triton(
    positions: torch.Tensor, box: torch.Tensor, grid: torch.Tensor, system: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wrapped positions float64 [N, 3], cell turns taken off int32 [N, 3], linear bin int32 [N]."""
    n_atoms = len(positions)
    wrapped = torch.empty_like(positions)
    turns = torch.empty_like(positions, dtype=torch.int32)
    atom_bins = torch.empty(n_atoms, dtype=torch.int32, device=positions.device)
    many = system is not None
    _assign_kernel[(cdiv(n_atoms, _LANES),)](
        positions, system, box, grid, wrapped, turns, atom_bins, n_atoms, MANY=many, BLOCK=_LANES, **_LAUNCH
    )
    return wrapped, turns, atom_bins


class Counted(NamedTuple):
    """Edges that are counted but not yet written.

    | field | type | meaning |
    |---|---|---|
    | search | | what _fill_kernel reads first |
    | many | bool | whether these are edges of many systems |
    | row_start | int64 [N + 1] | edges into each atom |
    | summary | float64 [3] | edges, most edges into one atom, least squared length (A^2) |
    """

    search: tuple[torch.Tensor | None, ...]
    many: bool
    row_start: torch.Tensor
    summary: torch.Tensor

    def fill(self, out: tuple[torch.Tensor | None, ...], capacity: int, shift: bool) -> None:
        """Write them: source, target, shift and vectors, none beyond the capacity."""
        tile = {"LANES": _LANES, "ATOMS_PER_BIN": _ATOMS_PER_BIN}
        _fill_kernel[(len(self.row_start) - 1,)](
            *self.search, self.row_start, *out, capacity, SHIFT=shift, MANY=self.many, **tile, **_LAUNCH
        )


def count(
    positions: torch.Tensor, box: torch.Tensor, grid: torch.Tensor, n_bins: int, system: torch.Tensor | None = None
) -> Counted:
    """Count the edges of one system, or of many, in which each atom belongs to `system` int32 [N]."""
    n_atoms, many = len(positions), system is not None
    wrapped, turns, atom_bins = _assign_triton(positions, box, grid, system)
    sorted_bins, order, bin_start = _sort_by_bin(atom_bins, n_bins)
    search = (wrapped.index_select(0, order), order, sorted_bins, bin_start, system, box, grid)
    counts = torch.empty(n_atoms, dtype=torch.int32, device=positions.device)
    shortest = torch.empty(n_atoms, dtype=torch.float64, device=positions.device)
    tile = {"LANES": _LANES, "ATOMS_PER_BIN": _ATOMS_PER_BIN}
    _count_kernel[(n_atoms,)](*search, counts, shortest, MANY=many, **tile, **_LAUNCH)
    row_start = torch.zeros(n_atoms + 1, dtype=torch.int64, device=positions.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=row_start[1:])
    # float64 holds these integers exactly.
    summary = torch.stack([row_start[-1].double(), counts.max().double(), shortest.min()])
    return Counted((*search, turns), many, row_start, summary)


def _search_triton(positions: torch.Tensor, bins: Bins) -> Edges:
    """Find the edges of one system in kernels; bins on the CPU, one host synchronisation."""
    with torch.cuda.device_of(positions):  # Triton launches on the current device
        box, grid = (upload(tensor, positions.device) for tensor in (bins.box, bins.grid))
        counted = count(positions, box, grid, int(bins.number.prod()))
        n_edges, most, least = counted.summary.tolist()  # the one synchronisation
        return fill(counted, int(n_edges), int(most), least)


def fill(counted: Counted, n_edges: int, most: int, least: float) -> Edges:
    """Write the edges, of which the host knows how many there are."""
    device = counted.row_start.device
    source = torch.empty(n_edges, dtype=torch.int32, device=device)
    target = torch.empty(n_edges, dtype=torch.int32, device=device)
    shift = torch.empty(n_edges, 3, dtype=torch.int32, device=device)
    vectors = torch.empty(n_edges, 3, dtype=torch.float64, device=device)
    counted.fill((source, target, shift, vectors), n_edges, shift=True)
    return Edges(source, target, shift, vectors, counted.row_start, most, math.sqrt(least))


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to the device, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# --- without waiting for the device ----------------------------------------------------------------------------------


class EdgeRoom(NamedTuple):
    """Room for edges that a search on the device writes, kept from one search to the next.

    | field | type | meaning |
    |---|---|---|
    | source, target | int32 [capacity] | edge source -> target |
    | vectors | float64 [capacity, 3] | x[source] - x[target], images included, A |

    Entries past the edges found are left as they were: they start as self-edges of atom 0 at the cutoff.
    """

    source: torch.Tensor
    target: torch.Tensor
    vectors: torch.Tensor

    @classmethod
    def of(cls, capacity: int, cutoff: float, device: torch.device) -> EdgeRoom:
        """Room on a device; `cutoff` (A) is the length of the edges it starts with."""
        atoms = torch.zeros(2, capacity, dtype=torch.int32, device=device)
        vectors = torch.zeros(capacity, 3, dtype=torch.float64, device=device)
        vectors[:, 1] = cutoff
        return cls(atoms[0], atoms[1], vectors)


class FoundEdges(NamedTuple):
    """What `search_within` found beside the edges themselves.

    | field | type | meaning |
    |---|---|---|
    | row_start | int64 [N + 1] | edges into, and entries of `by_source` out of, each atom; none beyond the capacity |
    | by_source | int64 [capacity] | the edges found in the order of their sources, then the rest |
    | summary | float64 [3] | number of edges, most edges into one atom, least squared length (A^2; inf without any) |

    The edges are complete where their number is within the capacity.
    """

    row_start: torch.Tensor
    by_source: torch.Tensor
    summary: torch.Tensor


@functools.lru_cache(maxsize=64)
def _planned(rows: tuple[float, ...], pbc: tuple[bool, ...], cutoff: float, n_atoms: int) -> tuple[float, ...]:
    bins = _plan_bins(torch.tensor(rows, dtype=torch.float64).view(3, 3), pbc, cutoff, n_atoms)
    return tuple(bins.box[0].tolist() + bins.grid[0].tolist())


def search_numbers(cell: np.ndarray, pbc: Sequence[bool], cutoff: float, n_atoms: int) -> tuple[float, ...]:
    """What `search_within` reads besides positions, `NUMBERS` of them: what follows from cell ([3, 3], A) and cutoff.

    Raises ValueError for a periodic cell without volume.
    """
    periodic = tuple(bool(p) for p in pbc)
    rows = [x for row, p in zip(cell.tolist(), periodic, strict=True) for x in (row if p else (0.0, 0.0, 0.0))]
    return _planned(tuple(rows), periodic, cutoff, n_atoms)


@torch.no_grad()
def search_within(positions: torch.Tensor, numbers: torch.Tensor, room: EdgeRoom) -> FoundEdges:
    """Find all edges on the device without a word to the host, so that a CUDA graph may hold the search.

    positions: float64 [N, 3], A. numbers: float64 [NUMBERS], from `search_numbers`, on the device. room: OUTPUT, the
    edges.
    """
    box, grid = numbers[: BOX.value], numbers[BOX.value :].int()
    return within(count(positions, box, grid, max(len(positions), FEWEST_BINS)), room)


def within(counted: Counted, room: EdgeRoom) -> FoundEdges:
    """Write counted edges into a room (OUTPUT), without waiting for the device."""
    capacity, n_atoms = len(room.source), len(counted.row_start) - 1
    counted.fill((room.source, room.target, None, room.vectors), capacity, shift=False)
    row_start = counted.row_start.clamp(max=capacity)
    found = torch.arange(capacity, device=row_start.device) < row_start[-1]
    by_source = torch.sort(torch.where(found, room.source, n_atoms), stable=True).indices
    return FoundEdges(row_start, by_source, counted.summary)


# --- public ----------------------------------------------------------------------------------------------------------


def _nearest(edges: Edges, max_neighbours: int) -> torch.Tensor:
    """Indices (ascending) of the edges that the cap keeps.

    An atom with more than `max_neighbours` edges keeps those with d^2 <= d_k^2 + tolerance, where d_k is the length of
    its first edge past the cap.
    """
    squared = _squared_length(edges.vectors)
    by_length = torch.argsort(squared, stable=True)
    by_length = by_length[torch.argsort(edges.target[by_length], stable=True)]  # by target, then by length
    first_past = (edges.row_start[:-1] + max_neighbours).clamp(max=len(squared) - 1)
    limit = squared[by_length[first_past]] + _SHELL_TOLERANCE
    limit = torch.where(edges.row_start.diff() > max_neighbours, limit, math.inf)
    return (squared <= limit[edges.target]).nonzero().squeeze(1)


def _keep(edges: Edges, kept: torch.Tensor) -> Edges:
    """The edges at the ascending indices `kept`."""
    return replace(
        edges,
        source=edges.source[kept],
        target=edges.target[kept],
        shift=edges.shift[kept],
        vectors=edges.vectors[kept],
        row_start=torch.searchsorted(kept, edges.row_start),
    )


def _check(
    positions: torch.Tensor, cell: torch.Tensor, pbc: Sequence[bool], cutoff: float, max_neighbours: int | None
) -> None:
    for name, tensor in (("positions", positions), ("cell", cell)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64:
            raise TypeError(f"{name}: expected a float64 tensor, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if positions.ndim != 2 or positions.shape[0] < 1 or positions.shape[1] != 3:
        raise ValueError(f"positions: expected shape [N, 3] with N >= 1, got {list(positions.shape)}")
    if cell.shape != (3, 3):
        raise ValueError(f"cell: expected shape [3, 3], got {list(cell.shape)}")
    if len(pbc) != 3:
        raise ValueError(f"pbc: expected three booleans, got {len(pbc)}")
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise ValueError(f"cutoff: expected a positive length in A, got {cutoff}")
    if max_neighbours is not None and max_neighbours < 1:
        raise ValueError(f"max_neighbours: expected None or at least 1, got {max_neighbours}")


@torch.no_grad()
def neighbour_list(
    positions: torch.Tensor,
    cell: torch.Tensor,
    pbc: Sequence[bool],
    cutoff: float,
    max_neighbours: int | None = None,
) -> NeighbourList:
    """All edges of length at most `cutoff`; see NeighbourList for the fields.

    positions: float64 [N, 3], A; need not be wrapped, shifts refer to them as given. CUDA runs the kernels.
    cell: float64 [3, 3], rows are lattice vectors, A, any handedness; vectors of open axes are not read. Best on
        the CPU: the bins are planned on the host, and a CUDA cell costs a synchronisation.
    pbc: three booleans. cutoff: A.
    max_neighbours: atoms with more edges keep the nearest ones and the whole shell that the cap falls into, so the
        list may lose its symmetry (`capped`). None keeps every edge. An active cap costs one synchronisation more.

    The order of the edges is a function of the geometry alone. Raises TypeError for a dtype other than float64,
    ValueError for a wrong shape, cutoff or cap and for a periodic cell without volume.
    """
    _check(positions, cell, pbc, cutoff, max_neighbours)
    bins = _plan_bins(cell, [bool(p) for p in pbc], cutoff, len(positions))
    search = _search_triton if positions.is_cuda else search_plain
    return assemble(search(positions.contiguous(), bins), max_neighbours)


def assemble(edges: Edges, max_neighbours: int | None) -> NeighbourList:
    """Apply the cap and add the order by source."""
    n_edges = len(edges.source)
    if max_neighbours is not None and edges.most > max_neighbours:
        edges = _keep(edges, _nearest(edges, max_neighbours))
    capped = len(edges.source) < n_edges
    # A stable sort moves about 100 bytes per edge, a search for each reverse edge in its row over 1000.
    by_source = torch.sort(edges.source, stable=True)
    if capped:
        atoms = torch.arange(len(edges.row_start), dtype=torch.int32, device=edges.source.device)
        source_row_start = torch.searchsorted(by_source.values, atoms)
    else:
        source_row_start = edges.row_start
    return NeighbourList(
        source=edges.source,
        target=edges.target,
        shift=edges.shift,
        vectors=edges.vectors,
        row_start=edges.row_start,
        by_source=by_source.indices,
        source_row_start=source_row_start,
        capped=capped,
        shortest=edges.shortest,
    )
