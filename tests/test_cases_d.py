"""Section D of the cases from the field: compositions, tasks, charge and spin."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import systems
import torch
from ase import Atoms
from ase.io import read, write
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator, general
from ase_fastuma.backend import Backend


def energy(atoms: Atoms, calc: FastUMACalculator, **info: object) -> float:
    """Energy of a copy of the structure."""
    atoms = atoms.copy()
    atoms.info |= info
    atoms.calc = calc
    return atoms.get_potential_energy()


def count_merges(calc: FastUMACalculator, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that says how often the calculator's backend has merged experts since."""
    backend: Backend = calc._start().backend
    name = "_merged" if backend.name == "general" else "_build_one"
    merges = []
    if backend.name == "fused":
        before = backend._networks._of_one.cache_info().misses
        return lambda: backend._networks._of_one.cache_info().misses - before
    original = getattr(backend, name)
    monkeypatch.setattr(backend, name, lambda system: merges.append(system) or original(system))
    return lambda: len(merges)


def test_D1_alternating_compositions(
    make: Callable, standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = {name: energy(atoms, make()) for name, atoms in (("NaCl", systems.nacl()), ("Cu", systems.copper()))}
    calc = make(Path(shutil.copy(standin, tmp_path)))  # a backend of its own, whose cache is empty
    merges = count_merges(calc, monkeypatch)
    for _ in range(10):
        calc.reset()
        assert energy(systems.nacl(), calc) == pytest.approx(
            fresh["NaCl"], abs=8 * SAME_STRUCTURE["accurate"]["energy"]
        )
        assert energy(systems.copper(), calc) == pytest.approx(
            fresh["Cu"], abs=4 * SAME_STRUCTURE["accurate"]["energy"]
        )
    assert merges() == 2


def test_D1_more_compositions_than_the_cache_holds(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "_CACHED_MODELS", 2)
    calc = make(precision="float64")
    pairs = [Atoms([8, z], [[0, 0, 0], [0, 0, 1.5]]) for z in (1, 6, 7)]
    first = [energy(atoms, calc) for atoms in pairs]
    calc.reset()
    assert [energy(atoms, calc) for atoms in pairs] == pytest.approx(first, abs=1e-9)
    assert len(set(np.round(first, 6))) == len(pairs)


def test_D5_tasks_have_their_own_defaults(make: Callable) -> None:
    atoms = systems.water()
    atoms.info["name"] = "water"
    omat, omol = make(task="omat"), make(task="omol")
    for calc, charge, spin in ((omat, 0, 0), (omol, 0, 1), (omat, 0, 0)):
        atoms.calc = calc
        atoms.get_potential_energy()
        assert (calc.parameters["charge"], calc.parameters["spin"]) == (charge, spin)
        assert atoms.info == {"name": "water"}
    assert abs(energy(atoms, omat) - energy(atoms, omol)) > 1e-3


def test_D6_charge_for_a_task_without_charges(make: Callable) -> None:
    calc = make(task="omat")
    with pytest.warns(UserWarning, match="charge = 2 and spin = 1 are used for task 'omat'") as caught:
        charged = energy(systems.nacl(), calc, charge=2, spin=1)
        energy(systems.nacl() * (1, 1, 2), calc, charge=2, spin=1)
    assert sum(w.category is UserWarning for w in caught) == 1
    assert abs(charged - energy(systems.nacl(), calc)) > 1e-3


@pytest.mark.parametrize("charge", [1, 1.0, np.int32(1), np.float64(1), np.array(1), np.array([1]), torch.tensor([1])])
def test_D7_integral_charges(make: Callable, charge: object) -> None:
    calc = make(task="omol")
    expected = energy(systems.water(), make(task="omol", charge=1, spin=2))
    assert energy(systems.water(), calc, charge=charge, spin=2) == pytest.approx(expected, abs=1e-5)
    assert calc.parameters["charge"] == 1


@pytest.mark.parametrize("name", ["charge", "spin"])
@pytest.mark.parametrize(
    ("value", "error"), [(0.5, ValueError), (np.nan, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_D7_other_charges_and_spins_are_refused(
    make: Callable, name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{name}: expected an integer, got {value!r}"):
        energy(systems.water(), make(task="omol"), **{name: value})
    with pytest.raises(error, match=f"{name}: expected an integer, got {value!r}"):
        make(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("charge", 101), ("charge", -101), ("spin", -1), ("spin", 101)])
def test_D7_charges_and_spins_out_of_range(make: Callable, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .* got {value}"):
        energy(systems.water(), make(task="omol"), **{name: value})
    with pytest.raises(ValueError, match=f"{name}: expected .* got {value}"):
        make(task="omol", **{name: value})


def test_D7_charge_from_extended_xyz(make: Callable, tmp_path: Path) -> None:
    atoms = systems.water()
    atoms.info |= {"charge": -1, "spin": 2}
    write(tmp_path / "anion.xyz", atoms)
    anion = read(tmp_path / "anion.xyz")
    assert energy(anion, make(task="omol")) == pytest.approx(energy(atoms, make(task="omol")), abs=1e-5)


def test_D7_the_argument_wins_over_info(make: Callable) -> None:
    calc = make(task="omol", charge=1, spin=2)
    assert energy(systems.water(), calc, charge=-1, spin=1) == pytest.approx(energy(systems.water(), calc), abs=1e-5)
    assert (calc.parameters["charge"], calc.parameters["spin"]) == (1, 2)


def test_D8_charge_states_are_merged_once(
    make: Callable, standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calc = make(Path(shutil.copy(standin, tmp_path)), task="omol")  # a backend of its own, whose cache is empty
    merges = count_merges(calc, monkeypatch)
    energies = []
    for _ in range(3):
        calc.reset()
        energies.append([energy(systems.water(), calc, charge=q, spin=1 + abs(q)) for q in (-1, 0, 1)])
    assert merges() == 3
    np.testing.assert_allclose(energies, np.broadcast_to(energies[0], (3, 3)), atol=1e-5)
    assert len(set(np.round(energies[0], 4))) == 3


def test_D_task_follows_the_structure(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    calc = make()
    with (
        caplog.at_level(logging.INFO, logger="ase_fastuma"),
        warnings.catch_warnings(action="error", category=UserWarning),
    ):
        for atoms, task in ((systems.water(), "omol"), (systems.nacl(), "omat"), (systems.slab(), "omat")):
            energy(atoms, calc)
            assert calc.parameters["task"] == task
            energy(atoms, calc)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("task")]
    assert said == ["task 'omol', since nothing is periodic", "task 'omat', since something is periodic"]
