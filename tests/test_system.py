"""Structures as the backends see them."""

from __future__ import annotations

import re
from dataclasses import astuple

import numpy as np
import pytest
import systems
from ase import Atoms
from ase.build import bulk

from ase_fastuma.system import System, systems_of

CUTOFF = 5.0


def prepare(atoms: Atoms) -> System:
    return System.from_atoms(atoms, "omat", 0, 0, CUTOFF)


@pytest.mark.parametrize("pbc", list(np.ndindex(2, 2, 2)))
def test_geometry(pbc: tuple[int, int, int]) -> None:
    """Whatever the axes: right-handed, wrapped, centred, no image of an open axis in reach, distances kept."""
    atoms = systems.triclinic()
    atoms.pbc = pbc
    atoms.positions += 3.7 * atoms.cell[0] - 1.2 * atoms.cell[1] + 8.9
    before = atoms.copy()
    system = prepare(atoms)
    assert np.linalg.det(system.cell) > 0
    assert system.volume == pytest.approx(np.linalg.det(system.cell))
    np.testing.assert_array_equal(system.positions, atoms.positions)
    scaled = np.linalg.solve(system.cell.T, system.wrapped.T).T
    assert (scaled > -1e-12).all()
    assert (scaled < 1 + 1e-12).all()
    periodic = np.flatnonzero(pbc)
    np.testing.assert_array_equal(system.cell[periodic], atoms.cell[periodic])
    for axis in np.flatnonzero(~np.array(pbc, bool)):
        assert scaled[:, axis].min() + scaled[:, axis].max() == pytest.approx(1)
        others = np.delete(system.cell, axis, axis=0)
        np.testing.assert_allclose(others @ system.cell[axis], 0, atol=1e-9)
        length = np.linalg.norm(system.cell[axis])
        assert length * (1 - np.ptp(scaled[:, axis])) > 2 * CUTOFF
    # Atoms moved by lattice vectors of periodic axes only, and by one common shift.
    moved = system.wrapped - atoms.positions
    steps = np.linalg.solve(system.cell.T, (moved - moved[0]).T).T
    np.testing.assert_allclose(steps[:, periodic], np.round(steps[:, periodic]), atol=1e-9)
    np.testing.assert_allclose(np.delete(steps, periodic, axis=1), 0, atol=1e-9)
    np.testing.assert_array_equal(atoms.positions, before.positions)
    np.testing.assert_array_equal(atoms.cell, before.cell)


def test_a_tiny_negative_coordinate_is_inside() -> None:
    system = prepare(Atoms("Cu", [[-1e-18, 0, 0]], cell=[3, 3, 3], pbc=True))
    np.testing.assert_array_equal(system.wrapped, np.zeros((1, 3)))


def test_composition_is_reduced() -> None:
    cell = bulk("MgO", "rocksalt", a=4.2)
    assert prepare(cell).composition == prepare(cell.repeat((2, 3, 1))).composition == ((8, 1), (12, 1))
    assert prepare(systems.water()).composition == ((1, 2), (8, 1))


@pytest.mark.parametrize("pbc", [True, False, [True, True, False]])
def test_distinct_atoms_pass(pbc: object) -> None:
    atoms = systems.triclinic()
    atoms.pbc = pbc
    prepare(atoms).check_distinct()
    prepare(Atoms("Cu")).check_distinct()


@pytest.mark.parametrize("apart", [2.0, 1.5e-3])
def test_distinct_atoms_in_a_skewed_cell_pass(apart: float) -> None:
    """The same lattice as a cube's, whose faces are a thousandth of its length apart in the skewed cell."""
    skewed = np.array([[1, 0, 0], [4000, 1, 0], [0, 0, 1]]) * 4.0
    prepare(Atoms("Na2", [[0, 0, 0], [apart, 0, 0]], cell=skewed, pbc=True)).check_distinct()
    with pytest.raises(ValueError, match="atoms 0 and 1 coincide"):
        prepare(Atoms("Na2", [[0, 0, 0], [4 + 4e-4, 0, 0]], cell=skewed, pbc=True)).check_distinct()


@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False), (False, True, True)])
@pytest.mark.parametrize("turn", [1, -1])
def test_very_skewed_cells_get_short_vectors(pbc: tuple[bool, bool, bool], turn: int) -> None:
    """They span the same lattice; cells that are less skewed stay as they are."""
    upright = systems.triclinic()
    upright.pbc = pbc
    skewed = upright.copy()
    shear = np.array([[1, 0, 0], [300, 1, 0], [0, 0, 1]]) if pbc[0] else np.array([[1, 0, 0], [0, 1, 300], [0, 0, 1]])
    skewed.cell[:] = turn * shear @ upright.cell.array
    found, expected = prepare(skewed), prepare(upright)
    assert np.linalg.norm(found.cell, axis=1).max() < 1.01 * np.linalg.norm(expected.cell, axis=1).max()
    periodic = np.flatnonzero(pbc)
    steps = np.linalg.solve(expected.cell.T, found.cell[periodic].T).T
    np.testing.assert_allclose(steps, np.round(steps), rtol=0, atol=1e-9)
    assert np.linalg.det(found.cell) == pytest.approx(expected.volume, rel=1e-9)
    assert found.volume == pytest.approx(expected.volume, rel=1e-9)
    np.testing.assert_array_equal(expected.cell[periodic], upright.cell.array[periodic])


@pytest.mark.parametrize("axis", range(3))
def test_atoms_that_meet_across_a_face(axis: int) -> None:
    cell = systems.triclinic().cell
    positions = np.array([[0.5, 0.5, 0.5], [0.3, 0.4, 0.2], [0.3, 0.4, 0.2]])
    positions[1:, axis] = 1e-6, 1 - 1e-6
    atoms = Atoms("Cu3", positions @ cell, cell=cell, pbc=True)
    with pytest.raises(ValueError, match="atoms 1 and 2 coincide"):
        prepare(atoms).check_distinct()
    atoms.pbc[axis] = False
    prepare(atoms).check_distinct()


def test_many_at_once_are_each_as_if_alone() -> None:
    """Bitwise; faults in their places, each with its own message."""
    wire, film, flat = systems.triclinic(), systems.triclinic(), systems.triclinic()
    wire.pbc, film.pbc = [False, True, False], [True, False, True]
    flat.cell[1] = 2 * flat.cell[0]
    swapped = systems.triclinic()
    swapped.set_cell(swapped.cell[[1, 0, 2]])
    lost = systems.water()
    lost.positions[1, 1] = np.nan
    structures = [systems.water(), Atoms(), film, swapped, lost, wire, Atoms("X"), systems.copper(), flat, Atoms("He")]
    states = [("omat", i, 0) for i in range(len(structures) - 1)] + [("omat", 101, 0)]
    found = systems_of(structures, states, CUTOFF)
    assert [i for i, one in enumerate(found) if isinstance(one, ValueError)] == [1, 4, 6, 8, 9]
    for atoms, state, got in zip(structures, states, found, strict=True):
        if isinstance(got, ValueError):
            with pytest.raises(ValueError, match=re.escape(str(got))):
                System.from_atoms(atoms, *state, CUTOFF)
        else:
            alone = System.from_atoms(atoms, *state, CUTOFF)
            assert all(np.array_equal(a, b) for a, b in zip(astuple(got), astuple(alone), strict=True))
    assert systems_of([], [], CUTOFF) == []
