"""Structures that are evaluated together: images of a path with a shared calculator, displaced cells for phonons."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import systems
from ase import Atoms
from ase.build import bulk
from ase.mep import NEB
from ase.optimize import BFGS
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator, evaluate
from ase_fastuma.evaluation import evaluate_one
from ase_fastuma.general import GeneralBackend


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many structures each pass of the general backend holds."""
    seen: list[int] = []
    original = GeneralBackend.evaluate_many

    def watched(self: Any, systems: Any, properties: Any) -> Any:
        seen.append(len(systems))
        return original(self, systems, properties)

    monkeypatch.setattr(GeneralBackend, "evaluate_many", watched)
    return seen


def hop() -> list[Atoms]:
    """Five images of an atom that moves into a vacancy next to it, in a crystal of 8 sites."""
    crystal = bulk("Cu", a=3.59) * 2
    start = crystal[1:]
    end = start.copy()
    end.positions[0] = crystal.positions[0]
    return [start, *(start.copy() for _ in range(3)), end]


def test_images_of_a_step_in_one_pass(passes: list[int]) -> None:
    images, calc = hop(), FastUMACalculator("demo", device="cpu")
    calc.share(images)
    neb = NEB(images, allow_shared_calculator=True, method="improvedtangent", k=0.1)
    neb.interpolate()
    steps = []
    for _ in BFGS(neb, logfile=None).irun(fmax=0.01, steps=3):
        steps.append([*passes])
        passes.clear()
    assert steps == [[5], [3], [3], [3]]

    energies = [image.get_potential_energy() for image in images]
    forces = [image.get_forces() for image in images]
    assert passes == []
    alone = FastUMACalculator("demo", device="cpu")
    for image, energy, force in zip(images, energies, forces, strict=True):
        twin = image.copy()
        twin.calc = alone
        assert twin.get_potential_energy() == pytest.approx(
            energy, abs=len(image) * SAME_STRUCTURE["accurate"]["energy"]
        )
        np.testing.assert_allclose(twin.get_forces(), force, rtol=0, atol=SAME_STRUCTURE["accurate"]["forces"])
    # The way back is the way there: the path is symmetric about its middle, where the barrier is.
    np.testing.assert_allclose(energies, energies[::-1], atol=1e-4)
    assert 0.3 < max(energies) - energies[0] < 2.0
    assert max(energies) == energies[2]


def test_more_images_than_are_kept_otherwise(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from ase_fastuma import calculator

    counted = []
    monkeypatch.setattr(calculator, "_KEPT_STRUCTURES", 2)
    monkeypatch.setattr(calculator, "evaluate_one", lambda *args: (counted.append(1), evaluate_one(*args))[1])
    images, calc = [systems.water() for _ in range(6)], make()
    for i, image in enumerate(images):
        image.positions[0, 2] += 0.02 * i
    calc.share(images)
    first = [image.get_potential_energy() for image in images]
    assert [image.get_potential_energy() for image in images] == first
    images[3].positions[0, 2] += 0.01
    assert [image.get_potential_energy() == before for image, before in zip(images, first, strict=True)].count(
        False
    ) == 1
    assert counted == [1]  # the one that moved; the others came from one pass


def test_a_companion_that_is_broken_is_its_own_problem(make: Callable) -> None:
    images = [systems.water(), systems.water(), systems.copper()]
    images[1].positions[0] = np.nan
    images[2].positions[1] = images[2].positions[0]
    make().share(images)
    assert np.isfinite(images[0].get_potential_energy())
    with pytest.raises(ValueError, match="NaN or infinity for atoms 0"):
        images[1].get_forces()
    with pytest.raises(ValueError, match="atoms 0 and 1 coincide"):
        images[2].get_forces()


def test_sharing_ends(make: Callable, passes: list[int]) -> None:
    calc = make(device="cpu", backend="general")
    images = [systems.water(), systems.copper()]
    calc.share(images)
    for twin in (copy.deepcopy(calc), pickle.loads(pickle.dumps(calc))):
        twin.calculate(systems.water())
    del images[1]
    gc.collect()  # a structure holds its calculator, which holds a copy of it
    images[0].get_forces()
    calc.share([])
    calc.calculate(systems.nacl())
    assert passes == [1, 1, 1, 1]


def test_displaced_cells_in_one_call(make: Callable) -> None:
    """Force constants from finite displacements are the Hessian."""
    calc, step = make("demo", precision="float64"), 1e-3
    cell = systems.copper()
    displaced = []
    for i in range(3 * len(cell)):
        for sign in (1, -1):
            moved = cell.copy()
            moved.positions.flat[i] += sign * step
            displaced.append(moved)
    forces = np.array([result["forces"] for result in evaluate(displaced, calc, properties=["forces"])])
    constants = (forces[1::2] - forces[::2]).reshape(12, 12) / (2 * step)
    np.testing.assert_allclose(constants, calc.get_hessian(cell), atol=1e-4)
    assert np.abs(constants).max() > 1
