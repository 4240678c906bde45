"""Section E of the cases from the field: cells, periodicity, stress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import systems
from ase import Atoms
from ase.build import bulk, fcc111, make_supercell, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_stress
from tolerances import SAME_STRUCTURE

import ase_fastuma

PRECISIONS = ["accurate", "float64"]


def evaluate(atoms: Atoms, calc: Any) -> tuple[float, np.ndarray]:
    """Energy per atom and forces of a copy of the structure."""
    atoms = atoms.copy()
    atoms.calc = calc
    return atoms.get_potential_energy() / len(atoms), atoms.get_forces()


def assert_same(first: Atoms, second: Atoms, make: Callable, precision: str, **settings: Any) -> None:
    """Both structures have the same energy per atom, and the same forces where they have the same atoms."""
    (e1, f1), (e2, f2) = (evaluate(atoms, make(precision=precision, **settings)) for atoms in (first, second))
    tolerance = SAME_STRUCTURE[precision]
    assert e1 == pytest.approx(e2, abs=tolerance["energy"])
    if len(first) == len(second):
        np.testing.assert_allclose(f1, f2, atol=tolerance["forces"])


def ice() -> Atoms:
    """Two water molecules in a periodic box: a stand-in for ice with its mixture of bonds and voids."""
    first, second = molecule("H2O"), molecule("H2O")
    second.rotate(70, "x")
    second.translate([2.3, 1.7, 1.9])
    box = first + second
    box.set_cell([4.4, 4.2, 4.6])
    box.pbc = True
    return box


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("atoms", [bulk("Cu"), bulk("MgO", "rocksalt", a=4.2), ice()], ids=["Cu", "MgO", "ice"])
def test_E1_extensive(make: Callable, atoms: Atoms, precision: str) -> None:
    assert_same(atoms, atoms.repeat((3, 2, 2)), make, precision)
    assert_same(atoms, atoms.repeat((1, 1, 2)), make, precision, model="demo")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_E2_open_axis_is_vacuum(make: Callable, precision: str) -> None:
    slab = systems.slab()
    padded = slab.copy()
    padded.center(vacuum=20, axis=2)
    padded.pbc = True
    assert_same(slab, padded, make, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_E2_batch_of_molecule_and_crystals(make: Callable, precision: str) -> None:
    structures = [systems.water(), systems.triclinic(), systems.slab(), ice()]
    tolerance = SAME_STRUCTURE[precision]
    for atoms, result in zip(structures, ase_fastuma.evaluate(structures, make(precision=precision)), strict=True):
        energy, forces = evaluate(atoms, make(precision=precision))
        assert result["energy"] / len(atoms) == pytest.approx(energy, abs=tolerance["energy"])
        np.testing.assert_allclose(result["forces"], forces, rtol=0, atol=tolerance["forces"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_E3_open_axes_are_completed(make: Callable, precision: str) -> None:
    slab = systems.slab()
    assert not slab.cell[2].any()
    padded = slab.copy()
    padded.center(vacuum=12, axis=2)
    assert_same(slab, padded, make, precision)

    wire = Atoms(
        "AuCu", [[0, 0, 0], [0.3, 0.1, 2.4]], cell=[[0, 0, 0], [0, 0, 0], [0, 0, 4.9]], pbc=[False, False, True]
    )
    boxed = wire.copy()
    boxed.set_cell([15, 16, 4.9])
    boxed.pbc = True
    assert_same(wire, boxed, make, precision)


@pytest.mark.parametrize("axis", range(3))
def test_E4_periodic_axis_without_vector(make: Callable, axis: int) -> None:
    cell = np.diag([4.0, 5.0, 6.0])
    cell[axis] = 0
    atoms = Atoms("Cu2", [[0, 0, 0], [1.5, 1.5, 1.5]], cell=cell, pbc=True)
    with pytest.raises(ValueError, match=f"axis {axis} is periodic and needs a vector"):
        evaluate(atoms, make())


def test_E5_no_cell_or_flat_cell(make: Callable) -> None:
    with pytest.raises(ValueError, match="axis 0 is periodic and needs a vector"):
        evaluate(Atoms("Cu", pbc=True), make())
    with pytest.raises(ValueError, match="linearly dependent at axis 1"):
        evaluate(Atoms("Cu", cell=[[3, 0, 0], [3, 0, 0], [0, 0, 3]], pbc=True), make())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cell", [np.eye(3), np.diag([2.0, 3.0, 2.5]), [[1, 0, 0], [1, 0, 0], [0, 0, 1]]])
def test_E6_cell_of_a_molecule_does_not_matter(make: Callable, cell: Any, precision: str) -> None:
    boxed = systems.water()
    boxed.set_cell(cell)
    assert_same(systems.water(), boxed, make, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shift", [40.0, -55.0])
def test_E7_slab_moved_along_its_open_axis(make: Callable, shift: float, precision: str) -> None:
    moved = systems.slab()
    moved.translate([0, 0, shift])
    assert_same(systems.slab(), moved, make, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_E8_positions_several_cells_away(make: Callable, precision: str) -> None:
    moved = systems.triclinic()
    moved.positions += np.random.default_rng(0).integers(-5, 6, (len(moved), 3)) @ moved.cell
    before = moved.positions.copy()
    assert_same(systems.triclinic(), moved, make, precision)
    moved.calc = make(precision=precision)
    moved.get_forces()
    np.testing.assert_array_equal(moved.positions, before)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_E9_left_handed_cell(make: Callable, precision: str) -> None:
    right, left = systems.triclinic(), systems.triclinic()
    left.set_cell(left.cell[[1, 0, 2]])
    assert left.cell.handedness == -right.cell.handedness
    assert_same(right, left, make, precision)
    for atoms in (right, left):
        atoms.calc = make(precision=precision)
    np.testing.assert_allclose(right.get_stress(), left.get_stress(), atol=SAME_STRUCTURE[precision]["stress"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("axes", [(1, 0), (2, 1)])
def test_E9_very_skewed_cell(make: Callable, axes: tuple[int, int], precision: str) -> None:
    """The same lattice, by vectors that are a hundred times as long and turned."""
    upright, skewed = systems.triclinic(), systems.triclinic()
    cell = upright.cell.array.copy()
    cell[axes[0]] += 100 * cell[axes[1]]
    skewed.set_cell(cell)
    assert_same(upright, skewed, make, precision)
    for atoms in (upright, skewed):
        atoms.calc = make(precision=precision)
    np.testing.assert_allclose(upright.get_stress(), skewed.get_stress(), atol=SAME_STRUCTURE[precision]["stress"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("a", [1.5, 2.0, 3.0, 4.0])
def test_E12_cells_smaller_than_the_cutoff(make: Callable, a: float, precision: str) -> None:
    atom = bulk("Al", a=a)
    assert_same(atom, atom.repeat(4), make, precision)
    if a > 2:
        assert_same(atom, atom.repeat(2), make, precision, model="demo")


def test_E12_needle_cell(make: Callable) -> None:
    cell = systems.copper()
    assert_same(cell, make_supercell(cell, np.diag([1, 1, 6])), make, "float64")


@pytest.mark.parametrize("vacuum", [4.0, 9.0])
def test_E14_stress_of_a_slab_refers_to_the_user_cell(make: Callable, vacuum: float) -> None:
    slab = systems.slab()
    slab.center(vacuum=vacuum, axis=2)
    slab.pbc = [True, True, False]
    slab.calc = make(precision="float64")
    np.testing.assert_allclose(slab.get_stress(), calculate_numerical_stress(slab, eps=1e-5), atol=1e-7)


@pytest.mark.parametrize("cell", [None, [5, 5, 5]])
def test_E15_stress_of_a_molecule(make: Callable, cell: Any) -> None:
    atoms = systems.water()
    if cell:
        atoms.set_cell(cell)
    atoms.calc = make()
    energy = atoms.get_potential_energy()
    with pytest.raises(PropertyNotImplementedError, match="expected a periodic structure"):
        atoms.get_stress()
    assert atoms.calc.results["energy"] == energy  # asking for what is not there costs nothing


def test_E15_stress_of_a_slab_without_volume(make: Callable) -> None:
    atoms = systems.slab()
    atoms.calc = make()
    with pytest.raises(PropertyNotImplementedError, match="whose cell has a volume"):
        atoms.get_stress()


def test_E16_change_of_the_cell_alone(make: Callable) -> None:
    atoms = systems.nacl()
    atoms.calc = make(precision="float64")
    before = atoms.get_potential_energy()
    atoms.set_cell(atoms.cell * 1.02)
    after = atoms.get_potential_energy()
    assert abs(after - before) > 1e-3
    assert after == pytest.approx(len(atoms) * evaluate(atoms, make(precision="float64"))[0], abs=1e-9)


def test_E17_stress_convention(make: Callable) -> None:
    atoms = systems.triclinic()
    atoms.calc = make(precision="float64")
    analytic = atoms.get_stress()
    np.testing.assert_allclose(analytic, calculate_numerical_stress(atoms, eps=1e-5), atol=1e-6)
    # An oracle of the convention by hand: stretching by eps_xy costs V * (2 sigma_xy) * eps_xy.
    strain, volume = 1e-5, atoms.get_volume()
    energies = []
    for sign in (1, -1):
        strained = atoms.copy()
        strained.set_cell(
            atoms.cell @ (np.eye(3) + sign * strain * np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])), scale_atoms=True
        )
        energies.append(evaluate(strained, make(precision="float64"))[0] * len(atoms))
    assert (energies[0] - energies[1]) / (2 * strain) == pytest.approx(2 * volume * analytic[5], rel=1e-4)


@pytest.mark.gpu
def test_E19_more_neighbours_than_the_cap(make: Callable) -> None:
    atoms = bulk("Al", a=1.85, cubic=True)  # 346 neighbours within 5 A, of which the model takes 300 and ties
    energy, forces = evaluate(atoms, make(precision="float64"))
    reference, reference_forces = evaluate(atoms, make(precision="float64", backend="general"))
    assert energy == pytest.approx(reference, abs=1e-9)
    np.testing.assert_allclose(forces, reference_forces, atol=1e-9)


def test_E_adsorbate_crossing_the_face(make: Callable) -> None:
    """A molecule that straddles a periodic face is one molecule."""
    slab = fcc111("Cu", (2, 2, 2), vacuum=6.0)
    slab += Atoms("CO", [[-0.4, 0.2, 9.2], [0.5, 0.1, 9.9]])
    wrapped = slab.copy()
    wrapped.wrap()
    assert not np.allclose(wrapped.positions, slab.positions)
    assert_same(slab, wrapped, make, "float64")
