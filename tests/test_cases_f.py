"""Section F of the cases from the field: unusual and impossible input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import standin as standin_module
import systems
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator, evaluate


def test_F1_isolated_atom(make: Callable, standin: Path, tmp_path: Path) -> None:
    """A number, the same from every way to the model, and the same as in an empty box."""
    elsewhere = tmp_path / "elsewhere.pt"
    elsewhere.write_bytes(standin.read_bytes())
    energies = []
    for calc in (make(task="omol"), make(elsewhere, task="omol")):
        atom = Atoms("Cu", calculator=calc)
        with pytest.warns(UserWarning, match="energy of an isolated atom is an extrapolation"):
            energies.append(atom.get_potential_energy())
        np.testing.assert_array_equal(atom.get_forces(), np.zeros((1, 3)))
    box = Atoms("Cu", cell=[30, 30, 30], pbc=True, calculator=make(task="omol"))
    assert [*energies, box.get_potential_energy()] == pytest.approx([energies[0]] * 3, abs=1e-5)
    np.testing.assert_allclose(box.get_stress(), 0, atol=1e-12)


def test_F1_atoms_out_of_reach_of_each_other(make: Callable) -> None:
    pair = Atoms("CuAu", [[0, 0, 0], [0, 0, 50]], calculator=make(task="omol"))
    assert np.isfinite(pair.get_potential_energy())
    np.testing.assert_array_equal(pair.get_forces(), np.zeros((2, 3)))


@pytest.mark.filterwarnings("ignore:the energy of an isolated atom is an extrapolation:UserWarning")
@pytest.mark.parametrize("precision", ["accurate", "float64"])
def test_F2_batch_with_a_lone_atom(make: Callable, precision: str) -> None:
    structures = [systems.water(), Atoms("He"), molecule("CH4")]
    structures[2].rattle(0.1, seed=5)
    batch = evaluate(structures, make(precision=precision))
    tolerance = SAME_STRUCTURE[precision]
    for atoms, result in zip(structures, batch, strict=True):
        atoms.calc = make(precision=precision)
        assert result["energy"] == pytest.approx(atoms.get_potential_energy(), abs=len(atoms) * tolerance["energy"])
        np.testing.assert_allclose(result["forces"], atoms.get_forces(), rtol=0, atol=tolerance["forces"])
    np.testing.assert_array_equal(batch[1]["forces"], np.zeros((1, 3)))


@pytest.mark.parametrize("task", ["omat", "omol"])
def test_F4_two_atoms_at_one_place(make: Callable, task: str) -> None:
    atoms = systems.water()
    atoms.positions[2] = atoms.positions[0]
    atoms.calc = make(task=task)
    with pytest.raises(ValueError, match=r"atoms 0 and 2 (coincide|are 0 A apart)"):
        atoms.get_potential_energy()


def test_F4_two_atoms_at_images_of_one_place(make: Callable) -> None:
    atoms = systems.triclinic()
    atoms.positions[5] = atoms.positions[3] + 2 * atoms.cell[0] - atoms.cell[2]
    atoms.calc = make()
    with pytest.raises(ValueError, match="atoms 3 and 5 "):
        atoms.get_potential_energy()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_F5_positions_that_are_no_numbers(make: Callable, value: float) -> None:
    atoms = systems.nacl()
    atoms.calc = make(precision="float64")  # fairchem-core sums on a GPU in no fixed order
    expected = atoms.get_potential_energy()
    good = atoms.positions.copy()
    atoms.positions[3, 1] = value
    with pytest.raises(ValueError, match="positions: expected finite numbers, got NaN or infinity for atoms 3"):
        atoms.get_forces()
    assert atoms.calc.results == {}
    atoms.positions = good
    assert atoms.get_potential_energy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_F5_cell_that_is_no_number(make: Callable, value: float) -> None:
    atoms = systems.nacl()
    atoms.calc = make()
    atoms.cell[1, 1] = value
    with pytest.raises(ValueError, match="cell: expected finite numbers"):
        atoms.get_potential_energy()


def test_F6_elements_that_no_model_knows(make: Callable) -> None:
    atoms = Atoms("XCuFmLr", np.diag([0.0, 2.0, 4.0, 6.0])[:, :3], calculator=make())
    with pytest.raises(ValueError, match="numbers: expected elements H to Es, got X, Fm, Lr"):
        atoms.get_potential_energy()


def test_F7_no_atoms(make: Callable) -> None:
    with pytest.raises(ValueError, match="atoms: expected at least one atom"):
        Atoms(calculator=make()).get_potential_energy()


def test_F8_a_weight_that_is_no_number(make: Callable, tmp_path: Path) -> None:
    content = standin_module.checkpoint(standin_module.model_config())
    content.ema_state_dict["module.backbone.blocks.1.edge_wise.so2_conv_1.fc_m0.weights"][0, 0, 0] = np.nan
    torch.save(content, tmp_path / "broken.pt")
    calc: FastUMACalculator = make(tmp_path / "broken.pt")
    atoms = systems.nacl()
    atoms.calc = calc
    with pytest.raises(FloatingPointError, match="expected finite numbers from the model"):
        atoms.get_potential_energy()
    assert calc.results == {}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308])
def test_F5_open_axis_whose_vector_is_no_number(make: Callable, value: float) -> None:
    """Nothing reads it but the volume that stress would refer to: energy and forces as ever, no stress, no warning."""
    atoms = systems.slab()
    atoms.calc = make(precision="float64")  # fairchem-core's sums on a GPU differ from one time to the next in float32
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.cell[2, 2] = value
    with np.errstate(all="raise"):
        assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-5)
    np.testing.assert_allclose(atoms.get_forces(), forces, atol=1e-5)
    with pytest.raises(PropertyNotImplementedError, match="stress: expected a periodic structure whose cell has a"):
        atoms.get_stress()
    assert "stress" not in evaluate([atoms], atoms.calc, properties=["energy", "stress"])[0]


@pytest.mark.parametrize("value", [2e9, 1e160, 1e308])
def test_F5_farther_than_positions_can_tell(make: Callable, value: float) -> None:
    atoms = systems.copper()
    atoms.positions[1, 2] = value
    with (
        np.errstate(all="raise"),
        pytest.raises(ValueError, match=r"positions: expected numbers up to 1e\+09 A, got"),
    ):
        make().get_potential_energy(atoms)
    atoms = systems.copper()
    atoms.cell[1, 1] = value
    with np.errstate(all="raise"), pytest.raises(ValueError, match=r"cell: expected numbers up to 1e\+09 A, got"):
        make().get_potential_energy(atoms)


@pytest.mark.parametrize("kind", ["flat but for rounding", "next to nothing"])
def test_F5_volumes_of_rounding_give_no_stress(make: Callable, kind: str) -> None:
    atoms = systems.copper()
    atoms.pbc = [True, True, False]
    if kind == "next to nothing":
        atoms.cell.array[2, 2] = 1e-310
    else:
        atoms.cell.array[2] = 0.3 * atoms.cell.array[0] + 0.7 * atoms.cell.array[1]
        atoms.rotate(33, (1, 2, 3), rotate_cell=True)
    atoms.calc = make()
    assert np.isfinite(atoms.get_forces()).all()
    with pytest.raises(PropertyNotImplementedError, match="stress: expected a periodic structure whose cell has a"):
        atoms.get_stress()


def test_F5_cells_that_nothing_reads_raise_nothing(make: Callable) -> None:
    """Under NumPy's strictest settings too: products of numbers like these underflow."""
    atoms = molecule("H2", calculator=make())
    energy = atoms.get_potential_energy()
    atoms.cell[:] = 1e-120 * np.eye(3)
    with np.errstate(all="raise"):
        assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-6)
