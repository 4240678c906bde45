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

`_search_plain` states this in PyTorch and serves the CPU; `_search_triton` is the same search in kernels. All geometry
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

if TYPE_CHECKING:
    import numpy as np

# Bins are wider than the cutoff by this fraction; it covers the rounding of bin indices (1e-15 of a coordinate).
_BIN_MARGIN = 1e-6
# Thinnest periodic cell, as a fraction of the cutoff: about 1000 images along each axis, so bin counters fit int32.
_THINNEST = 1 / 500
# Bins are at most as many as the atoms, or this many: a step of the search visits 27 of them anyway.
_FEWEST_BINS = 27
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
class _Bins:
    """Bins of one cell, fixed on the host from nine numbers; three values each, one per lattice axis.

    The raw bins around a target in bin b are b + low, ..., b + low + visits - 1.
    """

    periodic: tuple[bool, ...]
    number: tuple[int, ...]
    low: tuple[int, ...]
    visits: tuple[int, ...]
    # Bins per unit of coordinate: fractional along periodic axes, A along open ones.
    density: tuple[float, ...]
    lattice: torch.Tensor  # float64 [3, 3] on the CPU, open axes replaced by unit vectors
    inverse: torch.Tensor  # float64 [3, 3] on the CPU, coordinates = x @ inverse


@dataclass(frozen=True)
class _Edges:
    """What a search finds: see NeighbourList; `most` is the largest number of edges into one atom, before a cap."""

    source: torch.Tensor
    target: torch.Tensor
    shift: torch.Tensor
    vectors: torch.Tensor
    row_start: torch.Tensor
    most: int
    shortest: float


def _lattice(cell: torch.Tensor, periodic: Sequence[bool]) -> torch.Tensor:
    """The cell with every open axis replaced by a unit vector at right angles to all other vectors."""
    if all(periodic):
        return cell
    lattice = cell.clone()
    vectors = cell[[axis for axis in range(3) if periodic[axis]]]
    complement = torch.linalg.qr(vectors.T, mode="complete").Q[:, len(vectors) :].T
    lattice[[axis for axis in range(3) if not periodic[axis]]] = complement
    return lattice


def _plan_bins(cell: torch.Tensor, periodic: tuple[bool, ...], cutoff: float, n_atoms: int) -> _Bins:
    """Choose the bins; raises ValueError for a periodic cell without volume."""
    lattice = _lattice(cell, periodic)
    faces = torch.stack([torch.linalg.cross(lattice[(a + 1) % 3], lattice[(a + 2) % 3]) for a in range(3)])
    volume = torch.dot(lattice[0], faces[0])
    heights = (volume.abs() / faces.norm(dim=1)).tolist()  # distance between opposite faces, A
    reach = cutoff * (1 + _BIN_MARGIN)
    for axis in range(3):
        if periodic[axis] and not heights[axis] >= cutoff * _THINNEST:  # `not`: NaN must fail too
            raise ValueError(
                f"cell: expected a height of at least {cutoff * _THINNEST:.3g} A along periodic axis {axis}, "
                f"got {heights[axis]:.3g} A"
            )
    # More bins than atoms only cost memory. Open axes share what the periodic ones leave.
    limit = max(n_atoms, _FEWEST_BINS)
    number = [max(1, min(limit, math.floor(heights[a] / reach))) if periodic[a] else 1 for a in range(3)]
    while math.prod(number) > limit:
        finest = number.index(max(number))
        number[finest] = (number[finest] + 1) // 2
    if not all(periodic):
        share = max(1, math.floor((limit / math.prod(number)) ** (1 / periodic.count(False)) + 1e-9))
        number = [number[a] if periodic[a] else share for a in range(3)]
    low, visits, density = [], [], []
    for axis in range(3):
        if periodic[axis]:
            images = math.ceil(reach * number[axis] / heights[axis])  # 1 unless the whole cell is thinner than reach
            low.append(-images)
            visits.append(2 * images + 1)
            density.append(float(number[axis]))
        else:  # bins repeat along the axis: none may be visited twice
            low.append(-1)
            visits.append(min(3, number[axis]))
            density.append(1 / reach)
    return _Bins(
        periodic=periodic,
        number=tuple(number),
        low=tuple(low),
        visits=tuple(visits),
        density=tuple(density),
        lattice=lattice,
        inverse=faces.T / volume,
    )


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


def _assign_plain(positions: torch.Tensor, bins: _Bins) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wrapped positions float64 [N, 3], cell turns taken off int32 [N, 3], bin along each axis int64 [N, 3]."""
    device = positions.device
    periodic = torch.tensor(bins.periodic, device=device)
    number = torch.tensor(bins.number, device=device)
    coordinates = _combine(positions, bins.inverse.to(device))
    turns = torch.where(periodic, coordinates.floor(), 0.0)
    wrapped = positions - _combine(turns, bins.lattice.to(device))
    scaled = ((coordinates - turns) * torch.tensor(bins.density, dtype=torch.float64, device=device)).floor()
    folded = torch.where(periodic, scaled, scaled - (scaled / number).floor() * number)
    # Rounding can bring a coordinate up to exactly 1: such an atom stays in the last bin.
    place = torch.minimum(folded.long().clamp(min=0), number - 1)
    return wrapped, turns.int(), place


def _search_plain(positions: torch.Tensor, bins: _Bins, cutoff: float, budget: int = 1 << 20) -> _Edges:
    """Find the edges in PyTorch; temporaries hold about `budget` candidate pairs."""
    device, n_atoms = positions.device, len(positions)
    number = torch.tensor(bins.number, device=device)
    periodic = torch.tensor(bins.periodic, device=device)
    lattice = bins.lattice.to(device)
    wrapped, turns, place = _assign_plain(positions, bins)
    strides = torch.tensor([bins.number[1] * bins.number[2], bins.number[2], 1], device=device)
    _, order, bin_start = _sort_by_bin((place * strides).sum(1).int(), math.prod(bins.number))
    offsets = torch.cartesian_prod(
        *(torch.arange(low, low + n, device=device) for low, n in zip(bins.low, bins.visits, strict=True))
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
        keep = ((_squared_length(vectors) <= cutoff * cutoff) & ~itself).nonzero().squeeze(1)
        source, target = source[keep], target[keep]
        shift = image[keep].int() - turns[source] + turns[target]
        found.append((source.int(), target.int(), shift, vectors[keep]))

    source, target, shift, vectors = (torch.cat(parts) for parts in zip(*found, strict=True))
    counts = torch.bincount(target, minlength=n_atoms)
    row_start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    shortest = math.sqrt(_squared_length(vectors).min()) if len(source) else math.inf
    return _Edges(source, target, shift, vectors, row_start, int(counts.max()), shortest)


# --- Triton ----------------------------------------------------------------------------------------------------------
#
# One program of one warp per target, so scans and reductions need no barrier. Its lanes hold 32 bins x 4 atoms: the 27
# bins around an atom are one step over the bins, a bin of condensed matter (about 20 atoms) five steps over its atoms,
# and the many one-atom images of a tiny cell fill the lanes as well. Launches have these shapes whatever the system.
_LANES = 128
_ATOMS_PER_BIN = 4
# No fused multiply-add: see the top of the file.
_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}

# Host numbers travel as two small tensors: a Triton scalar argument is at most float32 and may cause a compilation.
# box float64 [22]: lattice 0..8 (rows), inverse 9..17 (rows), density 18..20, cutoff^2 21
# grid int32 [12]: number 0..2, low 3..5, visits 6..8, periodic 9..11


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
def _assign_kernel(positions, box, grid, wrapped, turns, bins, n_atoms, BLOCK: tl.constexpr):
    """wrapped = x - floor(x @ inverse) @ lattice along periodic axes; bins = linear index of the bin."""
    atom = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n_atoms
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
    tl.store(bins + atom, (bin_0 * tl.load(grid + 1) + bin_1) * tl.load(grid + 2) + bin_2, mask=mask)


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
    number_1 = tl.load(grid + 1)
    number_2 = tl.load(grid + 2)
    visits_0 = tl.load(grid + 6)
    visits_1 = tl.load(grid + 7)
    visits_2 = tl.load(grid + 8)
    bin_0, image_0 = _visit_axis(home // (number_1 * number_2), visit // (visits_1 * visits_2), grid, 0)
    bin_1, image_1 = _visit_axis(home // number_2 % number_1, visit // visits_2 % visits_1, grid, 1)
    bin_2, image_2 = _visit_axis(home % number_2, visit % visits_2, grid, 2)
    visited = (bin_0 * number_1 + bin_1) * number_2 + bin_2
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
    wrapped, order, bins, bin_start, box, grid, counts, shortest, LANES: tl.constexpr, ATOMS_PER_BIN: tl.constexpr
):
    """counts[t] = number of edges into t, shortest[t] = least squared length of them (inf without edges)."""
    rank = tl.program_id(0)
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
    target = tl.load(order + rank)
    tl.store(counts + target, tl.sum(count))
    tl.store(shortest + target, tl.min(least))


@triton.jit(do_not_specialize=["capacity"])
def _fill_kernel(
    wrapped,
    order,
    bins,
    bin_start,
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
    LANES: tl.constexpr,
    ATOMS_PER_BIN: tl.constexpr,
):
    """Write the edges that _count_kernel counted, in the order of the visits; none beyond the capacity."""
    rank = tl.program_id(0)
    home = tl.load(bins + rank)
    atom_t = tl.load(order + rank)
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


_BOX_SIZE = 22


def _numbers(bins: _Bins, cutoff: float) -> list[float]:
    """box, then grid."""
    lattice, inverse = bins.lattice.flatten().tolist(), bins.inverse.flatten().tolist()
    box = [*lattice, *inverse, *bins.density, cutoff * cutoff]
    return [*box, *bins.number, *bins.low, *bins.visits, *bins.periodic]


def _box_and_grid(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers[:_BOX_SIZE], numbers[_BOX_SIZE:].int()


def _upload_bins(bins: _Bins, cutoff: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """box and grid, copied without waiting for the device."""
    numbers = torch.tensor(_numbers(bins, cutoff), dtype=torch.float64)
    return _box_and_grid(numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers)


def _assign_triton(
    positions: torch.Tensor, box: torch.Tensor, grid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wrapped positions float64 [N, 3], cell turns taken off int32 [N, 3], linear bin int32 [N]."""
    n_atoms = len(positions)
    wrapped = torch.empty_like(positions)
    turns = torch.empty_like(positions, dtype=torch.int32)
    atom_bins = torch.empty(n_atoms, dtype=torch.int32, device=positions.device)
    _assign_kernel[(triton.cdiv(n_atoms, _LANES),)](
        positions, box, grid, wrapped, turns, atom_bins, n_atoms, BLOCK=_LANES, **_LAUNCH
    )
    return wrapped, turns, atom_bins


def _count(
    positions: torch.Tensor, box: torch.Tensor, grid: torch.Tensor, n_bins: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """What _fill_kernel reads, cell turns, row_start, and float64 [3]: edges, most edges into one atom, least d^2."""
    n_atoms = len(positions)
    wrapped, turns, atom_bins = _assign_triton(positions, box, grid)
    sorted_bins, order, bin_start = _sort_by_bin(atom_bins, n_bins)
    search = (wrapped.index_select(0, order), order, sorted_bins, bin_start, box, grid)
    counts = torch.empty(n_atoms, dtype=torch.int32, device=positions.device)
    shortest = torch.empty(n_atoms, dtype=torch.float64, device=positions.device)
    _count_kernel[(n_atoms,)](*search, counts, shortest, LANES=_LANES, ATOMS_PER_BIN=_ATOMS_PER_BIN, **_LAUNCH)
    row_start = torch.zeros(n_atoms + 1, dtype=torch.int64, device=positions.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=row_start[1:])
    # float64 holds these integers exactly.
    summary = torch.stack([row_start[-1].double(), counts.max().double(), shortest.min()])
    return search, turns, row_start, summary


def _search_triton(positions: torch.Tensor, bins: _Bins, cutoff: float) -> _Edges:
    """Find the edges in kernels; one host synchronisation."""
    device, n_atoms = positions.device, len(positions)
    with torch.cuda.device_of(positions):  # Triton launches on the current device
        box, grid = _upload_bins(bins, cutoff, device)
        search, turns, row_start, summary = _count(positions, box, grid, math.prod(bins.number))
        n_edges, most, least = summary.tolist()  # the one synchronisation
        n_edges = int(n_edges)
        source = torch.empty(n_edges, dtype=torch.int32, device=device)
        target = torch.empty(n_edges, dtype=torch.int32, device=device)
        shift = torch.empty(n_edges, 3, dtype=torch.int32, device=device)
        vectors = torch.empty(n_edges, 3, dtype=torch.float64, device=device)
        out = (source, target, shift, vectors, n_edges)
        tile = {"LANES": _LANES, "ATOMS_PER_BIN": _ATOMS_PER_BIN}
        _fill_kernel[(n_atoms,)](*search, turns, row_start, *out, SHIFT=True, **tile, **_LAUNCH)
    return _Edges(source, target, shift, vectors, row_start, int(most), math.sqrt(least))


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
    cell = torch.tensor(rows, dtype=torch.float64).view(3, 3)
    return tuple(_numbers(_plan_bins(cell, pbc, cutoff, n_atoms), cutoff))


def search_numbers(cell: np.ndarray, pbc: Sequence[bool], cutoff: float, n_atoms: int) -> tuple[float, ...]:
    """The 34 numbers that `search_within` reads besides positions: what follows from the cell ([3, 3], A) and cutoff.

    Raises ValueError for a periodic cell without volume.
    """
    periodic = tuple(bool(p) for p in pbc)
    rows = [x for row, p in zip(cell.tolist(), periodic, strict=True) for x in (row if p else (0.0, 0.0, 0.0))]
    return _planned(tuple(rows), periodic, cutoff, n_atoms)


@torch.no_grad()
def search_within(positions: torch.Tensor, numbers: torch.Tensor, room: EdgeRoom) -> FoundEdges:
    """Find all edges on the device without a word to the host, so that a CUDA graph may hold the search.

    positions: float64 [N, 3], A. numbers: float64 [34], from `search_numbers`, on the device. room: OUTPUT, the edges.
    """
    n_atoms, capacity = len(positions), len(room.source)
    box, grid = _box_and_grid(numbers)
    search, turns, row_start, summary = _count(positions, box, grid, max(n_atoms, _FEWEST_BINS))
    out = (room.source, room.target, None, room.vectors, capacity)
    tile = {"LANES": _LANES, "ATOMS_PER_BIN": _ATOMS_PER_BIN}
    _fill_kernel[(n_atoms,)](*search, turns, row_start, *out, SHIFT=False, **tile, **_LAUNCH)
    row_start = row_start.clamp(max=capacity)
    found = torch.arange(capacity, device=positions.device) < row_start[-1]
    by_source = torch.sort(torch.where(found, room.source, n_atoms), stable=True).indices
    return FoundEdges(row_start, by_source, summary)


# --- public ----------------------------------------------------------------------------------------------------------


def _nearest(edges: _Edges, max_neighbours: int) -> torch.Tensor:
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


def _keep(edges: _Edges, kept: torch.Tensor) -> _Edges:
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
    bins = _plan_bins(cell.cpu(), tuple(bool(p) for p in pbc), cutoff, len(positions))
    search = _search_triton if positions.is_cuda else _search_plain
    return _assemble(search(positions.contiguous(), bins, cutoff), max_neighbours)


def _assemble(edges: _Edges, max_neighbours: int | None) -> NeighbourList:
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
