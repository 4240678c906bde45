"""Atoms in, validated arrays out: everything that a backend sees of a structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from ase.data import chemical_symbols
from scipy.spatial import cKDTree

if TYPE_CHECKING:
    from ase import Atoms

MAX_ATOMIC_NUMBER = 99  # the embeddings of these models have 100 rows, the first unused
CHARGES = (-100, 100)  # the range of the charge embedding
SPINS = (0, 100)

# Cell vectors shorter than this (A), or closer to the plane of the others, span no cell.
_FLAT = 1e-3
COINCIDENT = 1e-3
"""Two atoms closer than this (A) are one atom given twice."""


@dataclass(frozen=True)
class System:
    """One structure as the backends see it; N atoms.

    | field | type | meaning |
    |---|---|---|
    | numbers | int64 [N] | atomic numbers, 1 to 99 |
    | positions | float64 [N, 3] | A; wrapped along periodic axes, centred along open ones |
    | cell | float64 [3, 3] | A, rows are vectors; right-handed, open axes completed (see `from_atoms`) |
    | pbc | bool [3] | which axes are periodic |
    | task | str | task of the checkpoint |
    | charge, spin | int | total charge (e) and multiplicity |
    """

    numbers: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    task: str
    charge: int
    spin: int

    @classmethod
    def from_atoms(cls, atoms: Atoms, task: str, charge: int, spin: int, cutoff: float) -> System:
        """Validate a structure and bring its geometry into the form that the models need; `atoms` is left alone.

        Vectors of open axes are replaced: orthogonal to the periodic ones, and longer than the structure by more than
        twice the cutoff (A), so that an open axis never carries an image whatever the user's cell holds there. Energy
        and forces do not depend on it; stress refers to the volume of this cell. A left-handed cell has one vector
        reversed, which spans the same lattice.

        Raises ValueError for no atoms, elements that the models do not know, positions or cells that are not finite,
        periodic axes without a vector of their own, and charges or spins out of range.
        """
        numbers = np.array(atoms.numbers, dtype=np.int64)
        positions = np.array(atoms.positions, dtype=np.float64, order="C")
        cell = np.array(atoms.cell, dtype=np.float64, order="C")
        pbc = np.array(atoms.pbc, dtype=bool)
        _check_atoms(numbers, positions)
        _check_cell(cell, pbc)
        _check_range("charge", charge, CHARGES)
        _check_range("spin", spin, SPINS)
        cell = _complete(cell, pbc, positions, cutoff)
        return cls(numbers, _wrap(positions, cell, pbc), cell, pbc, task, charge, spin)

    @property
    def composition(self) -> tuple[tuple[int, int], ...]:
        """Reduced composition as (atomic number, count) pairs: equal for a cell and its supercells."""
        numbers, counts = np.unique(self.numbers, return_counts=True)
        counts = counts // np.gcd.reduce(counts)
        return tuple((int(z), int(n)) for z, n in zip(numbers, counts, strict=True))

    @property
    def volume(self) -> float:
        """Volume of `cell` in A^3."""
        return float(abs(np.linalg.det(self.cell)))

    @property
    def _heights(self) -> np.ndarray:
        """Distances between opposite faces of `cell` [3] in A."""
        return self.volume / np.linalg.norm(np.cross(self.cell[[1, 2, 0]], self.cell[[2, 0, 1]]), axis=1)

    def estimated_edges(self, cutoff: float) -> float:
        """About how many pairs of neighbours (both directions) lie within the cutoff (A), from the density alone."""
        n, open_heights = len(self.numbers), self._heights[~self.pbc]
        # Along an open axis the cell has 2 cutoffs + 1 A of vacuum, and atoms take up some A of their own. A cube with
        # the volume of the sphere within the cutoff stands for it, and ends where the atoms end.
        side = cutoff * (4 / 3 * np.pi) ** (1 / 3)
        thickness = open_heights - 2 * cutoff + 2.0
        occupied = self.volume * np.prod(thickness / open_heights)
        reached = side ** self.pbc.sum() * np.prod(np.minimum(side, thickness))
        neighbours = n * float(reached / occupied)
        return n * (neighbours if self.pbc.any() else min(neighbours, n - 1))

    def check_distinct(self) -> None:
        """Raise ValueError, naming both atoms, where two atoms coincide (periodic images included)."""
        height = self._heights
        scaled = np.linalg.solve(self.cell.T, self.positions.T).T
        # Periodic axes become circles, so that atoms on both sides of a face are neighbours; lengths stay near true.
        angle = 2 * np.pi * scaled[:, self.pbc]
        radius = height[self.pbc] / (2 * np.pi)
        parts = [radius * np.cos(angle), radius * np.sin(angle), (height * scaled)[:, ~self.pbc]]
        pairs = cKDTree(np.hstack(parts)).query_pairs(COINCIDENT)
        if pairs:
            first, second = min(pairs)
            raise ValueError(
                f"positions: atoms {first} and {second} coincide, expected them more than {COINCIDENT:g} A apart"
            )


def _check_atoms(numbers: np.ndarray, positions: np.ndarray) -> None:
    if len(numbers) == 0:
        raise ValueError("atoms: expected at least one atom, got none")
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


def _check_cell(cell: np.ndarray, pbc: np.ndarray) -> None:
    if not np.isfinite(cell[pbc]).all():
        raise ValueError(f"cell: expected finite numbers, got {cell.tolist()}")
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


def _check_range(name: str, value: int, allowed: tuple[int, int]) -> None:
    if not allowed[0] <= value <= allowed[1]:
        raise ValueError(f"{name}: expected {allowed[0]} to {allowed[1]}, got {value}")


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


def _wrap(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Move atoms into the cell along periodic axes and centre them along open ones: in float64, before any cast."""
    scaled = positions @ np.linalg.inv(cell)
    for axis, column in enumerate(scaled.T):
        if pbc[axis]:
            column -= np.floor(column)
            column[column == 1.0] = 0.0  # a tiny negative number
        else:
            column += 0.5 - (column.min() + column.max()) / 2
    return scaled @ cell
