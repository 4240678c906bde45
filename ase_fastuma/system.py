"""Atoms in, validated arrays out: everything that a backend sees of a structure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from ase.data import chemical_symbols
from ase.geometry import minkowski_reduce
from scipy.spatial import cKDTree

from ase_fastuma.settings import check_range

if TYPE_CHECKING:
    from ase import Atoms

MAX_ATOMIC_NUMBER = 99  # the embeddings of these models have 100 rows, the first unused

_REVERSED = np.array([[1.0], [1.0], [-1.0]])
# Cell vectors shorter than this (A), or closer to the plane of the others, span no cell.
_FLAT = 1e-3
# A cell with a vector so many times longer than the height along it gets shorter ones: searches for neighbours go
# through more images the closer together its faces are.
_SKEWED = 10.0
# Where float64 positions still tell 1e-7 A apart (A).
_FARTHEST = 1e9
COINCIDENT = 1e-3
"""Two atoms closer than this (A) are one atom given twice."""


@dataclass(frozen=True)
class System:
    """One structure as the backends see it; N atoms.

    | field | type | meaning |
    |---|---|---|
    | numbers | int64 [N] | atomic numbers, 1 to 99 |
    | positions | float64 [N, 3] | A, as given |
    | cell | float64 [3, 3] | A, rows are vectors; right-handed, little skewed, open axes completed (`from_atoms`) |
    | pbc | bool [3] | which axes are periodic |
    | task | str | task of the checkpoint |
    | charge, spin | int | total charge (e) and multiplicity |
    | volume | float | of `cell`, A^3 |
    | heights | float64 [3] | distances between opposite faces of `cell`, A |
    """

    numbers: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    task: str
    charge: int
    spin: int
    volume: float
    heights: np.ndarray

    @classmethod
    def from_atoms(cls, atoms: Atoms, task: str, charge: int, spin: int, cutoff: float) -> System:
        """Validate a structure and bring its geometry into the form that the models need; `atoms` is left alone.

        Vectors of open axes are replaced: orthogonal to the periodic ones, and longer than the structure by more than
        twice the cutoff (A), so that an open axis never carries an image whatever the user's cell holds there. Energy
        and forces do not depend on it; stress refers to the volume of this cell. A left-handed cell has one vector
        reversed, and a very skewed one the shortest vectors there are, which span the same lattice.

        Raises ValueError for no atoms, elements that the models do not know, positions or cells that are not finite,
        periodic axes without a vector of their own, and charges or spins out of range.
        """
        (system,) = systems_of([atoms], [(task, charge, spin)], cutoff)
        if isinstance(system, ValueError):
            raise system
        return system

    @cached_property
    def wrapped(self) -> np.ndarray:
        """Positions inside the cell: moved by lattice vectors along periodic axes, centred along open ones."""
        scaled = self.positions @ np.linalg.inv(self.cell)
        inside = scaled - np.floor(scaled)
        inside[inside == 1.0] = 0.0  # a tiny negative number
        centred = scaled + (0.5 - (scaled.min(axis=0) + scaled.max(axis=0)) / 2)
        return np.where(self.pbc, inside, centred) @ self.cell

    @cached_property
    def composition(self) -> tuple[tuple[int, int], ...]:
        """Reduced composition as (atomic number, count) pairs: equal for a cell and its supercells."""
        counts = np.bincount(self.numbers).tolist()
        divisor = math.gcd(*counts)
        return tuple((z, n // divisor) for z, n in enumerate(counts) if n)

    def estimated_edges(self, cutoff: float) -> float:
        """About how many pairs of neighbours (both directions) lie within the cutoff (A), from the density alone."""
        n = len(self.numbers)
        # Along an open axis the cell has 2 cutoffs + 1 A of vacuum, and atoms take up some A of their own. A cube with
        # the volume of the sphere within the cutoff stands for it, and ends where the atoms end.
        side = cutoff * (4 / 3 * math.pi) ** (1 / 3)
        occupied, reached, everything = self.volume, 1.0, True
        for height, periodic in zip(self.heights.tolist(), self.pbc.tolist(), strict=True):
            thickness = height - 2 * cutoff + 2.0
            occupied *= 1.0 if periodic else thickness / height
            reached *= side if periodic else min(side, thickness)
            everything &= not periodic
        neighbours = n * reached / occupied
        return n * (min(neighbours, n - 1) if everything else neighbours)

    def check_distinct(self) -> None:
        """Raise ValueError, naming both atoms, where two atoms coincide (periodic images included)."""
        height = self.heights
        scaled = np.linalg.solve(self.cell.T, self.wrapped.T).T
        # Periodic axes become circles, so that atoms on both sides of a face are neighbours; lengths stay near true.
        angle = 2 * np.pi * scaled[:, self.pbc]
        radius = height[self.pbc] / (2 * np.pi)
        parts = [radius * np.cos(angle), radius * np.sin(angle), (height * scaled)[:, ~self.pbc]]
        # Those coordinates differ by no more than the atoms are apart, each; in a skewed cell, by much less.
        pairs = cKDTree(np.hstack(parts)).query_pairs(math.sqrt(3) * COINCIDENT, output_type="ndarray")
        apart = scaled[pairs[:, 0]] - scaled[pairs[:, 1]]
        apart[:, self.pbc] -= np.round(apart[:, self.pbc])
        pairs = pairs[np.linalg.norm(apart @ self.cell, axis=1) < COINCIDENT]
        if len(pairs):
            first, second = min(pairs.tolist())
            raise ValueError(
                f"positions: atoms {first} and {second} coincide, expected them more than {COINCIDENT:g} A apart"
            )


def systems_of(
    structures: Sequence[Atoms], states: Sequence[tuple[str, int, int]], cutoff: float
) -> list[System | ValueError]:
    """The systems of many structures, each with its task, charge and spin, or the error that says why there is none.

    See `System.from_atoms`. A system does not depend on the others, bit for bit.
    """
    faults = {i: fault for i, atoms in enumerate(structures) if (fault := _fault(atoms, *states[i][1:])) is not None}
    chosen = [i for i in range(len(structures)) if i not in faults]
    arrays = _Arrays.of([structures[i] for i in chosen]) if chosen else None
    if arrays is not None and (found := arrays.faults()):
        faults |= {chosen[k]: fault for k, fault in found.items()}
        chosen = [i for i in chosen if i not in faults]
        arrays = _Arrays.of([structures[i] for i in chosen]) if chosen else None
    systems = iter(arrays.prepared(cutoff, [states[i] for i in chosen]) if arrays is not None else [])
    return [faults[i] if i in faults else next(systems) for i in range(len(structures))]


def _fault(atoms: Atoms, charge: int, spin: int) -> ValueError | None:
    """What shows for a structure alone: its arrays may not fit each other, nor be laid beside those of others."""
    if len(atoms) == 0:
        return ValueError("atoms: expected at least one atom, got none")
    numbers, positions = atoms.numbers, atoms.positions
    if positions.ndim != 2 or positions.shape[1] != 3:
        return ValueError(f"positions: expected shape [N, 3], got {list(positions.shape)}")
    if numbers.shape != positions.shape[:1]:
        return ValueError(f"numbers: expected one for each of {len(positions)} positions, got {list(numbers.shape)}")
    if numbers.dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):
            fractional = numbers != numbers.astype(np.int64)
        if fractional.any():
            return ValueError(f"numbers: expected integers, got {numbers[fractional].tolist()}")
    try:
        check_range("charge", charge)
        check_range("spin", spin)
    except ValueError as error:
        return error.with_traceback(None)
    return None


def spanned_volume(cell: np.ndarray) -> float:
    """Volume of a cell [3, 3] (A^3); 0 where its vectors span none but for rounding, or are no numbers."""
    lattice = _Lattices.of(np.array(cell, dtype=np.float64)[None])
    volume = abs(float(lattice.volumes[0]))
    return volume if math.isfinite(volume) and lattice.heights.min() > _FLAT else 0.0


class _Lattices(NamedTuple):
    """What is known of cells. The last are kept: most structures keep their cell.

    | field | meaning |
    |---|---|
    | volumes | A^3, negative of left-handed ones [S] |
    | heights | distances between opposite faces, A; NaN where a cell spans nothing [S, 3] |
    | skewed | whether a vector is `_SKEWED` times longer than the height along it [S] |
    | near | whether all numbers are up to `_FARTHEST` [S] |
    """

    volumes: np.ndarray
    heights: np.ndarray
    skewed: np.ndarray
    near: np.ndarray

    @classmethod
    def of(cls, cells: np.ndarray) -> _Lattices:
        """Of cells [S, 3, 3]."""
        return _lattices(cells.tobytes())


@lru_cache(maxsize=16)
def _lattices(cells: bytes) -> _Lattices:
    vectors = np.frombuffer(cells).reshape(-1, 3, 3)
    # What is wrong with a cell is for `faults` to say.
    with np.errstate(all="ignore"):
        volumes = np.linalg.det(vectors)
        areas = np.linalg.norm(_cross(vectors[:, [1, 2, 0]], vectors[:, [2, 0, 1]]), axis=2)
        heights = np.abs(volumes)[:, None] / areas
        skewed = (np.linalg.norm(vectors, axis=2) > _SKEWED * heights).any(axis=1)
        near = np.all(np.abs(vectors) <= _FARTHEST, axis=(1, 2))
        found = _Lattices(volumes, heights, skewed, near)
    for array in found:
        array.flags.writeable = False
    return found


@dataclass(frozen=True)
class _Arrays:
    """S structures, none of them empty, with N atoms in all, one after another: as they came."""

    numbers: np.ndarray  # [N]
    positions: np.ndarray  # [N, 3]
    cells: np.ndarray  # [S, 3, 3]
    pbc: np.ndarray  # [S, 3]
    starts: np.ndarray  # [S]
    sizes: np.ndarray  # [S]

    @classmethod
    def of(cls, structures: Sequence[Atoms]) -> _Arrays:
        sizes = np.array([len(atoms) for atoms in structures])
        return cls(
            np.concatenate([atoms.numbers for atoms in structures]).astype(np.int64, copy=False),
            np.concatenate([atoms.positions for atoms in structures]).astype(np.float64, copy=False),
            np.array([atoms.cell.array for atoms in structures], dtype=np.float64),
            np.array([atoms.pbc for atoms in structures], dtype=bool),
            np.cumsum(sizes) - sizes,
            sizes,
        )

    def _atoms(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i] + self.sizes[i])

    @cached_property
    def lattices(self) -> _Lattices:
        """Of the cells as they came."""
        return _Lattices.of(self.cells)

    def faults(self) -> dict[int, ValueError]:
        """What is wrong with which structure. Those that may be at fault are looked at one by one."""
        axes = self.pbc.sum(axis=1)
        # A vector of its own has every axis that is far from the plane of the others. NaN is not.
        sound = (self.lattices.heights > 2 * _FLAT).all(axis=1) & self.lattices.near
        doubtful = (axes > 0) & ~((axes == 3) & sound)
        near = np.abs(self.positions) <= _FARTHEST  # NaN is not
        if not (self.numbers.min() >= 1 and self.numbers.max() <= MAX_ATOMIC_NUMBER and near.all()):
            known = (self.numbers >= 1) & (self.numbers <= MAX_ATOMIC_NUMBER)
            doubtful |= ~np.logical_and.reduceat(known & near.all(axis=1), self.starts)
        found = {}
        for i in np.flatnonzero(doubtful).tolist():
            try:
                _check_atoms(self.numbers[self._atoms(i)], self.positions[self._atoms(i)])
                _check_cell(self.cells[i], self.pbc[i])
            except ValueError as error:
                found[i] = error.with_traceback(None)
        return found

    def prepared(self, cutoff: float, states: Sequence[tuple[str, int, int]]) -> list[System]:
        """The systems, of structures without faults."""
        cells, lattices = self.cells, self.lattices
        if not self.pbc.all():
            cells = self._completed(cutoff)
            lattices = _Lattices.of(cells)
        if lattices.skewed.any():
            cells = cells.copy()
            for i in np.flatnonzero(lattices.skewed).tolist():
                cells[i] = minkowski_reduce(cells[i], self.pbc[i])[0]
            lattices = _Lattices.of(cells)
        # A completed cell is right-handed; of others one vector is reversed.
        cells = np.where((lattices.volumes < 0)[:, None, None], _REVERSED * cells, cells)
        volumes = np.abs(lattices.volumes)
        return [
            System(
                self.numbers[atoms],
                self.positions[atoms],
                cells[i],
                self.pbc[i],
                *state,
                float(volumes[i]),
                lattices.heights[i],
            )
            for i, state in enumerate(states)
            for atoms in [self._atoms(i)]
        ]

    def _completed(self, cutoff: float) -> np.ndarray:
        """Cells whose open axes have vectors at right angles to all others, longer than the structure."""
        cells, count = self.cells.copy(), self.pbc.sum(axis=1)
        if (count == 0).any():
            extents = np.maximum.reduceat(self.positions, self.starts) - np.minimum.reduceat(
                self.positions, self.starts
            )
            cells[count == 0] = (extents[count == 0] + 2 * cutoff + 1.0)[:, None] * np.eye(3)
        for i in np.flatnonzero((count == 1) | (count == 2)).tolist():
            cells[i] = _complete(self.cells[i], self.pbc[i], self.positions[self._atoms(i)], cutoff)
        return cells


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[..., 3] x [..., 3]; np.cross is slow for a few vectors."""
    found = np.empty_like(a)
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        found[..., i] = a[..., j] * b[..., k] - a[..., k] * b[..., j]
    return found


def _check_atoms(numbers: np.ndarray, positions: np.ndarray) -> None:
    unknown = np.unique(numbers[(numbers < 1) | (numbers > MAX_ATOMIC_NUMBER)])
    if len(unknown):
        symbols = [chemical_symbols[z] if 0 <= z < len(chemical_symbols) else f"Z={z}" for z in unknown]
        raise ValueError(
            f"numbers: expected elements H to {chemical_symbols[MAX_ATOMIC_NUMBER]}, got {', '.join(symbols)}"
        )
    bad = np.flatnonzero(~np.isfinite(positions).all(axis=1))
    if len(bad):
        shown = ", ".join(str(i) for i in bad[:10]) + (", ..." if len(bad) > 10 else "")
        raise ValueError(f"positions: expected finite numbers, got NaN or infinity for atoms {shown}")
    far = np.flatnonzero((np.abs(positions) > _FARTHEST).any(axis=1))
    if len(far):
        got = positions[far[0]].tolist()
        raise ValueError(f"positions: expected numbers up to {_FARTHEST:g} A, got {got} for atom {far[0]}")


def _check_cell(cell: np.ndarray, pbc: np.ndarray) -> None:
    if not np.isfinite(cell[pbc]).all():
        raise ValueError(f"cell: expected finite numbers, got {cell.tolist()}")
    if (np.abs(cell[pbc]) > _FARTHEST).any():
        raise ValueError(f"cell: expected numbers up to {_FARTHEST:g} A, got {cell.tolist()}")
    with np.errstate(under="ignore"):  # next to nothing is nothing
        _check_span(cell, pbc)


def _check_span(cell: np.ndarray, pbc: np.ndarray) -> None:
    for axis in np.flatnonzero(pbc):
        if np.linalg.norm(cell[axis]) < _FLAT:
            raise ValueError(
                f"cell: axis {axis} is periodic and needs a vector, got {cell[axis].tolist()}; "
                f"set pbc[{axis}] to False or the cell"
            )
    # A vector spans nothing of its own where little is left of it after taking out the other periodic ones.
    basis: list[np.ndarray] = []
    for axis in np.flatnonzero(pbc):
        rest = cell[axis] - sum(((b @ cell[axis]) * b for b in basis), np.zeros(3))
        if np.linalg.norm(rest) < _FLAT:
            raise ValueError(f"cell: the periodic vectors are linearly dependent at axis {axis}, got {cell.tolist()}")
        basis.append(rest / np.linalg.norm(rest))


def _complete(cell: np.ndarray, pbc: np.ndarray, positions: np.ndarray, cutoff: float) -> np.ndarray:
    """Replace the vectors of open axes by ones orthogonal to the periodic vectors and to each other, right-handed."""
    cell = cell.copy()
    open_axes = np.flatnonzero(~pbc)
    if len(open_axes):
        # The last rows of the full Vt of the periodic vectors span what is orthogonal to them.
        directions = np.linalg.svd(cell[pbc])[2][pbc.sum() :] if pbc.any() else np.eye(3)
        for axis, direction in zip(open_axes, directions, strict=True):
            extent = np.ptp(positions @ direction)
            cell[axis] = direction * (extent + 2 * cutoff + 1.0)
    if np.linalg.det(cell) < 0:
        cell[open_axes[-1] if len(open_axes) else 2] *= -1
    return cell
