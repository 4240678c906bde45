"""Section G of the cases from the field: the calculator as a good citizen of ASE and of Python."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import systems
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.io import read, write
from ase.mep import NEB
from ase.optimize import BFGS
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Positions of each evaluation that any calculator makes."""
    from ase_fastuma import calculator

    seen: list[np.ndarray] = []
    original = calculator.evaluate_one

    def counted(backend: Any, request: Any) -> Any:
        seen.append(request.system.positions)
        return original(backend, request)

    monkeypatch.setattr(calculator, "evaluate_one", counted)
    return seen


def attach(atoms: Atoms, calc: FastUMACalculator) -> Atoms:
    atoms.calc = calc
    return atoms


def test_G1_arrays_in_info(make: Callable, evaluations: list) -> None:
    atoms = attach(systems.nacl(), make())
    atoms.info["array"] = np.arange(3)
    energy = atoms.get_potential_energy()
    atoms.info["array"] = np.arange(4)
    assert atoms.get_potential_energy() == energy
    assert len(evaluations) == 1


def test_G2_other_keys_of_info_do_not_count(make: Callable, evaluations: list) -> None:
    atoms = attach(systems.water(), make())
    atoms.get_potential_energy()
    atoms.info["comment"] = "new"
    atoms.set_initial_charges([0.1, 0.2, -0.3])
    atoms.set_tags([1, 2, 3])
    assert atoms.calc.check_state(atoms) == []
    atoms.get_forces()
    assert len(evaluations) == 1
    atoms.info["charge"] = 1
    atoms.get_forces()
    assert len(evaluations) == 2


def test_G4_one_geometry_one_evaluation(make: Callable, evaluations: list) -> None:
    atoms = attach(systems.nacl(), make())
    atoms.get_potential_energy()
    atoms.get_forces()
    atoms.get_stress()
    atoms.get_potential_energies()
    same = attach(atoms.copy(), atoms.calc)
    same.get_forces()
    same.get_potential_energy(force_consistent=True)
    assert len(evaluations) == 1


def test_G5_a_small_move(make: Callable, evaluations: list) -> None:
    atoms = attach(systems.nacl(), make(precision="float64"))
    before = atoms.get_potential_energy()
    force = atoms.get_forces()[0, 0]
    atoms.positions[0, 0] += 1e-6
    change = atoms.get_potential_energy() - before
    assert len(evaluations) == 2
    assert change == pytest.approx(-force * 1e-6, rel=1e-2)


def test_G6_results_own_their_memory(make: Callable) -> None:
    atoms = attach(systems.nacl(), make())
    kept = atoms.get_forces(), atoms.get_stress(), atoms.calc.results["forces"]
    copies = [array.copy() for array in kept]
    atoms.rattle(0.1)
    atoms.get_forces()
    for array, before in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, before)
    handed_out = atoms.get_forces()
    handed_out[:] = 0
    assert np.abs(atoms.get_forces()).max() > 0


def test_G7_types(make: Callable) -> None:
    atoms = attach(systems.nacl(), make())
    assert type(atoms.get_potential_energy()) is float
    for array, shape in (
        (atoms.get_forces(), (8, 3)),
        (atoms.get_stress(), (6,)),
        (atoms.get_potential_energies(), (8,)),
    ):
        assert array.dtype == np.float64
        assert array.flags.c_contiguous
        assert array.shape == shape
    assert atoms.get_potential_energies().sum() == pytest.approx(atoms.get_potential_energy(), abs=1e-9)


def test_G8_free_energy(make: Callable) -> None:
    atoms = attach(systems.nacl(), make())
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()


def test_G10_precisions_side_by_side(make: Callable) -> None:
    double = [attach(systems.nacl(), make(precision="float64")).get_forces() for _ in range(1)]
    single = attach(systems.nacl(), make(precision="float32")).get_forces()
    double.append(attach(systems.nacl(), make(precision="float64")).get_forces())
    np.testing.assert_allclose(double[0], double[1], atol=1e-12)
    np.testing.assert_allclose(single, double[0], atol=SAME_STRUCTURE["accurate"]["forces"])
    assert np.abs(single - double[0]).max() > 0


def test_G11_pickle(make: Callable) -> None:
    atoms = attach(systems.nacl(), make(charge=0, spin=0))
    energy = atoms.get_potential_energy()
    data = pickle.dumps(atoms.calc)
    assert len(data) < 10_000
    restored = pickle.loads(data)
    assert restored._running is None  # nothing is loaded before it is needed
    assert restored.settings == atoms.calc.settings
    again = attach(atoms.copy(), restored).get_potential_energy()
    assert again == pytest.approx(energy, abs=len(atoms) * SAME_STRUCTURE["accurate"]["energy"])
    assert len(pickle.dumps(restored)) < 10_000


def test_G11_deepcopy_shares_weights(make: Callable, evaluations: list) -> None:
    atoms = attach(systems.nacl(), make())
    energy = atoms.get_potential_energy()
    twin = copy.deepcopy(atoms)
    assert twin.calc is not atoms.calc
    assert twin.calc._running.backend is atoms.calc._running.backend
    assert twin.get_potential_energy() == energy
    assert len(evaluations) == 1
    twin.rattle(0.1)
    twin.get_potential_energy()
    assert atoms.get_potential_energy() == energy
    assert len(evaluations) == 2


def _tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_G12_ten_calculators_share_weights(make: Callable) -> None:
    start = _tensor_bytes()
    calculators = [make(precision="float64", merge_mole=make().backend.name == "fused")]
    attach(systems.nacl(), calculators[0]).get_potential_energy()
    one = _tensor_bytes() - start
    for _ in range(9):
        calculators.append(FastUMACalculator(**_arguments(calculators[0])))
        attach(systems.nacl(), calculators[-1]).get_potential_energy()
    assert _tensor_bytes() - start < 1.2 * one
    assert len({id(calc._running.backend) for calc in calculators}) == 1


def _arguments(calc: FastUMACalculator) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(calc.settings)


def test_G13_neb_with_a_shared_calculator(make: Callable, evaluations: list) -> None:
    start = systems.water()
    end = start.copy()
    end.rotate(60, "y", center="COM")
    images = [start, *(start.copy() for _ in range(3)), end]
    calc = make()
    for image in images:
        image.calc = calc
    neb = NEB(images, allow_shared_calculator=True, method="improvedtangent")
    neb.interpolate()
    optimizer = BFGS(neb, logfile=None)
    for _ in optimizer.irun(fmax=0.0, steps=2):
        seen = {positions.tobytes() for positions in evaluations}
        assert len(evaluations) == len(seen)
        evaluations.clear()


def test_G14_devices_on_a_cpu(standin: Path) -> None:
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert FastUMACalculator(standin, device=device).parameters["device"] == "cpu"
    for device in ("tpu", "mps", "cuda:99"):
        with pytest.raises(ValueError, match=f"device: expected .* got '{device}'"):
            FastUMACalculator(standin, device=device)


@pytest.mark.gpu
def test_G14_devices(standin: Path) -> None:
    last = torch.cuda.device_count() - 1
    current = torch.cuda.current_device()
    for device, index in (("cuda", current), ("cuda:0", 0), (f"cuda:{last}", last), (torch.device("cuda", last), last)):
        calc = FastUMACalculator(standin, device=device)
        assert calc.parameters["device"] == f"cuda:{index}"
        torch.cuda.reset_peak_memory_stats(index)
        attach(systems.nacl(), calc).get_forces()
        assert torch.cuda.max_memory_allocated(index) > 0
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize("kind", ["read-only", "float32", "Fortran"])
def test_G15_positions_of_any_kind(make: Callable, kind: str) -> None:
    expected = attach(systems.nacl(), make()).get_forces()
    atoms = attach(systems.nacl(), make())
    positions = atoms.positions
    if kind == "read-only":
        positions.flags.writeable = False
    elif kind == "float32":
        positions = positions.astype(np.float32)
    else:
        positions = np.asfortranarray(positions)
    atoms.arrays["positions"] = positions
    np.testing.assert_allclose(atoms.get_forces(), expected, atol=2e-5)


@pytest.mark.parametrize("suffix", [".traj", ".extxyz", ".json"])
def test_G18_round_trip_through_files(make: Callable, tmp_path: Path, suffix: str) -> None:
    atoms = attach(systems.nacl(), make())
    atoms.info["label"] = "rock salt"
    atoms.set_initial_magnetic_moments(np.ones(8))
    expected = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    info = dict(atoms.info)
    write(tmp_path / f"frame{suffix}", atoms)
    assert atoms.info == info
    frame = read(tmp_path / f"frame{suffix}")
    assert frame.get_potential_energy() == pytest.approx(expected[0], abs=1e-6)
    np.testing.assert_allclose(frame.get_forces(), expected[1], atol=1e-6)
    np.testing.assert_allclose(frame.get_stress(), expected[2], atol=1e-6)


@pytest.mark.parametrize("task", ["omat", "omol"])
def test_G19_hessian_of_any_task(make: Callable, task: str) -> None:
    atoms = attach(systems.water(), make(task=task, precision="float64"))
    energy = atoms.get_potential_energy()
    hessian = atoms.calc.get_hessian(atoms)
    assert hessian.shape == (9, 9)
    assert atoms.calc.results["energy"] == energy
    step = 1e-4
    for column in range(9):
        forces = []
        for sign in (1, -1):
            moved = attach(atoms.copy(), atoms.calc)
            moved.positions.flat[column] += sign * step
            forces.append(moved.get_forces().ravel())
        np.testing.assert_allclose((forces[1] - forces[0]) / (2 * step), hessian[:, column], atol=1e-5)


def test_G_constraints_are_ases_business(make: Callable) -> None:
    atoms = attach(systems.nacl(), make())
    free = atoms.get_forces()
    atoms.set_constraint(FixAtoms([0]))
    np.testing.assert_array_equal(atoms.get_forces()[0], 0)
    np.testing.assert_array_equal(atoms.get_forces(apply_constraint=False), free)
