"""Section H of the cases from the field: second derivatives."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import systems
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from tolerances import HESSIAN, SAME_STRUCTURE

from ase_fastuma import FastUMACalculator, evaluate
from ase_fastuma.engine import FusedBackend
from ase_fastuma.hessian import analytic_hessian
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

PRECISIONS = ["accurate", "float64"]


def differences_of_forces(atoms: Atoms, calc: object, step: float) -> np.ndarray:
    """The Hessian by central differences, one evaluation at a time: the plainest way there is."""
    columns = []
    for i in range(3 * len(atoms)):
        forces = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions.flat[i] += sign * step
            moved.calc = calc
            forces.append(moved.get_forces().ravel())
        columns.append((forces[1] - forces[0]) / (2 * step))
    return np.array(columns)


def of_the_other_backend(calc: FastUMACalculator, atoms: Atoms, make: Callable) -> np.ndarray:
    """In float64: of general mode for the fused backend, of the fused backend's plain form for general mode."""
    if calc.backend.name == "fused":
        return make("demo", precision="float64", backend="general").get_hessian(atoms)
    plain = FusedBackend(calc.checkpoint, Settings(device="cpu", precision="float64"), plain=True)
    system = System.from_atoms(atoms, *calc._state(atoms), calc.checkpoint.architecture.cutoff)
    return analytic_hessian(plain, system, np.arange(len(atoms)))


@pytest.mark.parametrize("atoms", [systems.water(), systems.copper()], ids=["water", "Cu"])
def test_H1_symmetric_and_equal_between_backends(make: Callable, atoms: Atoms) -> None:
    exact = of_the_other_backend(make("demo"), atoms, make)
    assert np.abs(exact).max() > 1
    for precision, tolerance in (("accurate", HESSIAN["accurate"]), ("float64", 1e-8 * np.abs(exact).max())):
        found = make("demo", precision=precision).get_hessian(atoms)
        np.testing.assert_array_equal(found, found.T)
        np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance, err_msg=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_H1_symmetric_before_it_is_made_so(make: Callable, precision: str) -> None:
    unit = np.eye(12).reshape(12, 4, 3)
    found = make("demo", precision=precision).hessian_vector_product(systems.copper(), unit).reshape(12, 12)
    assert np.abs(found - found.T).max() < 1e-5
    assert np.abs(found).max() > 1


@pytest.mark.parametrize("atoms", [systems.water(), systems.slab()[[0, 3, 7]]], ids=["molecule", "slab"])
def test_H1_derivative_of_the_forces(make: Callable, atoms: Atoms) -> None:
    calc = make(precision="float64")
    want = differences_of_forces(atoms, calc, 1e-4)
    np.testing.assert_allclose(calc.get_hessian(atoms), want, atol=HESSIAN["float64"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_H1_moving_everything_costs_nothing(make: Callable, precision: str) -> None:
    """Translations of a crystal (the acoustic sum rule) and, where forces vanish, rotations of a molecule."""
    calc = make("demo", precision=precision)
    crystal = calc.get_hessian(systems.copper()).reshape(4, 3, 4, 3)
    assert np.abs(crystal.sum(axis=2)).max() < HESSIAN[precision]

    water = systems.water()
    water.calc = make("demo", precision="float64")
    assert BFGS(water, logfile=None).run(fmax=1e-6, steps=100)
    turns = [np.cross(axis, water.positions - water.get_center_of_mass()) for axis in np.eye(3)]
    products = calc.hessian_vector_product(water, [*np.ones((1, 3, 1)) * np.eye(3)[:, None], *turns])
    assert np.abs(products).max() < HESSIAN[precision]
    assert np.abs(calc.get_hessian(water)).max() > 10


def test_H1_demo_has_the_curvature_of_emt(make: Callable) -> None:
    """The demo potential was trained on EMT's forces: a crystal's Hessian is EMT's within some per cent."""
    crystal = bulk("Cu", a=3.59, cubic=True)
    emt = differences_of_forces(crystal, EMT(), 1e-3)
    found = make("demo").get_hessian(crystal)
    assert np.abs(found - emt).max() < 0.05 * np.abs(emt).max()


def test_H2_forces_cost_the_same_afterwards(make: Callable) -> None:
    calc, atoms, other = make(), systems.nacl(), systems.nacl()
    atoms.calc, other.calc = calc, make()

    def fastest() -> list[float]:
        """Of this calculator and of one that never sees a Hessian, in turn: other work on the machine slows both."""
        times = []
        for _ in range(8):
            for structure in (atoms, other):
                structure.calc.reset()
                start = time.perf_counter()
                structure.get_forces()
                times.append(time.perf_counter() - start)
        return [min(times[::2]), min(times[1::2])]

    def on_device() -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    forces = atoms.get_forces()
    fastest()
    for _ in range(2):  # at first what is kept of any evaluation, and then a recording, begins to exist
        calc.get_hessian(atoms)
    tensors, memory = live_tensors(), on_device()
    for _ in range(3):
        calc.get_hessian(atoms)
        calc.hessian_vector_product(atoms, np.ones((2, 8, 3)))
    assert live_tensors() == tensors
    assert on_device() == memory
    after, without = fastest()
    assert after < 2 * without  # a graph for second derivatives alone takes longer
    np.testing.assert_allclose(atoms.get_forces(), forces, atol=SAME_STRUCTURE["accurate"]["forces"])


@pytest.mark.parametrize("method", ["analytic", "finite-difference"])
def test_H4_indices_are_the_block_of_the_whole(make: Callable, method: str) -> None:
    calc, atoms = make(precision="float64"), systems.nacl()
    whole = calc.get_hessian(atoms, method=method).reshape(8, 3, 8, 3)
    chosen = [6, 1, 3]
    block = calc.get_hessian(atoms, chosen, method)
    assert block.shape == (9, 9)
    np.testing.assert_allclose(block.reshape(3, 3, 3, 3), whole[chosen][:, :, chosen], atol=1e-9)


def test_H5_hessian_function_of_a_saddle_search(make: Callable) -> None:
    """What Sella asks of its `hessian_function`, as the atoms move."""
    calc = make(precision="float64")
    atoms = systems.water()
    atoms.calc = calc
    hessian_function = calc.get_hessian
    for _ in range(2):
        forces = atoms.get_forces()
        found = hessian_function(atoms)
        assert found.shape == (9, 9)
        assert found.dtype == np.float64
        assert atoms.calc.results["forces"] is not None
        np.testing.assert_allclose(found, differences_of_forces(atoms, calc, 1e-4), atol=HESSIAN["float64"])
        np.testing.assert_array_equal(atoms.get_forces(), forces)
        atoms.positions += 0.1 * np.random.default_rng(0).normal(size=(3, 3))


def displaced_supercells(cell: Atoms, size: int) -> tuple[Any, list[Atoms]]:
    phonopy = pytest.importorskip("phonopy")
    primitive = phonopy.structure.atoms.PhonopyAtoms(
        symbols=cell.symbols, cell=cell.cell, scaled_positions=cell.get_scaled_positions()
    )
    phonon = phonopy.Phonopy(primitive, supercell_matrix=[size] * 3, primitive_matrix="F", log_level=0)
    phonon.generate_displacements(distance=0.01)
    supercells = phonon.supercells_with_displacements
    return phonon, [Atoms(s.symbols, cell=s.cell, scaled_positions=s.scaled_positions, pbc=True) for s in supercells]


@pytest.mark.parametrize(("element", "a"), [("Cu", 3.59), ("Al", 3.99)])
def test_H6_acoustic_branches_at_gamma(make: Callable, element: str, a: float) -> None:
    """In the default precision, without symmetrisation of the force constants."""
    phonon, supercells = displaced_supercells(bulk(element, a=a, cubic=True), 2)
    phonon.forces = [result["forces"] for result in evaluate(supercells, make("demo"), properties=["forces"])]
    phonon.produce_force_constants()
    phonon.run_qpoints([[0, 0, 0], [0.5, 0.5, 0]])
    at_gamma, at_the_boundary = phonon.qpoints.frequencies
    assert np.abs(at_gamma).max() < 0.02  # THz
    assert at_the_boundary.min() > 1


def test_H7_primitive_cell_then_displaced_supercells(make: Callable) -> None:
    """One calculator for all of a phonon calculation gives what a fresh one gives for each structure."""
    calc, cell = make("demo"), bulk("Cu", cubic=True)
    cell.calc = calc
    assert BFGS(FrechetCellFilter(cell), logfile=None).run(fmax=0.01, steps=30)
    _, supercells = displaced_supercells(cell, 2)
    together = evaluate(supercells, calc, properties=["forces"])
    for atoms, result in zip(supercells, together, strict=True):
        atoms.calc = calc
        alone = atoms.get_forces()
        atoms.calc = make("demo")
        np.testing.assert_allclose(atoms.get_forces(), alone, atol=SAME_STRUCTURE["accurate"]["forces"])
        np.testing.assert_allclose(result["forces"], alone, atol=SAME_STRUCTURE["accurate"]["forces"])
    primitive = bulk("Cu")
    constants = calc.get_hessian(primitive)  # and back to another cell
    np.testing.assert_allclose(constants, make("demo").get_hessian(primitive), atol=HESSIAN["accurate"])
