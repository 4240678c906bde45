"""TorchSim's states through our backends: against the calculator, TorchSim's own checks, and dynamics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import standin as standin_module
import systems
import torch
from ase import Atoms
from ase.build import bulk, molecule
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchSim 0.3 uses torch.jit
    import torch_sim as ts
    from torch_sim.models.interface import validate_model_outputs

    from ase_fastuma.torchsim import FastUMAModel

NEW = hasattr(ts, "Integrator")  # TorchSim 0.6 rather than 0.3
NVE = ts.Integrator.nve if NEW else ts.nve

pytestmark = pytest.mark.filterwarnings("ignore:the energy of an isolated atom is an extrapolation:UserWarning")


@pytest.fixture
def model(make: Callable) -> Callable[..., FastUMAModel]:
    """`model(**settings)`: a model of the stand-in with forces and stress on each backend that this machine has."""
    return lambda *args, **settings: FastUMAModel(make(*args, **settings), compute_stress=True)


def state_of(structures: Sequence[Atoms], model: FastUMAModel) -> ts.SimState:
    return ts.initialize_state(list(structures), model.device, model.dtype)


def crystals() -> list[Atoms]:
    """Two mixtures in turn, a triclinic cell, an atom among its images, atoms outside their cell."""
    moved = systems.nacl()
    moved.positions[3] += 2 * moved.cell[0] - moved.cell[2]
    return [systems.nacl(), systems.copper(), moved, systems.triclinic(), bulk("Al", a=2.6)]


def molecules() -> list[Atoms]:
    """Two mixtures in turn, a lone atom in their midst, two atoms out of reach."""
    far = Atoms("ArAr", positions=[[0, 0, 0], [0, 0, 20]])
    return [systems.water(), molecule("NH3"), Atoms("He"), systems.water(), far]


def assert_equals_calculator(model: FastUMAModel, structures: Sequence[Atoms], calc: FastUMACalculator) -> None:
    """Each system of a state as if it were alone."""
    results = model(state_of(structures, model))
    tolerance = SAME_STRUCTURE["float64" if calc.settings.precision == "float64" else "mixed"]
    first = 0
    for i, atoms in enumerate(structures):
        atoms = atoms.copy()
        atoms.calc = calc
        last = first + len(atoms)
        energy = float(results["energy"][i])
        assert energy == pytest.approx(atoms.get_potential_energy(), abs=tolerance["energy"] * len(atoms))
        np.testing.assert_allclose(
            results["forces"][first:last].cpu(), atoms.get_forces(), rtol=0, atol=tolerance["forces"]
        )
        stress = atoms.get_stress(voigt=False) if atoms.pbc.any() and atoms.cell.volume else np.zeros((3, 3))
        np.testing.assert_allclose(results["stress"][i].cpu(), stress, rtol=0, atol=tolerance["stress"])
        first = last


@pytest.mark.parametrize("precision", ["float64", "accurate"])
@pytest.mark.parametrize("structures", [crystals(), molecules()], ids=["crystals", "molecules"])
def test_equal_to_the_calculator(make: Callable, model: Callable, structures: list[Atoms], precision: str) -> None:
    assert_equals_calculator(model(precision=precision), structures, make(precision=precision))


@pytest.mark.skipif(not NEW, reason="in TorchSim 0.3 all axes are periodic, or none")
def test_mixed_periodicity(make: Callable, model: Callable) -> None:
    tilted = systems.slab()
    tilted.cell[2] = [1.0, 2.0, 30.0]
    assert_equals_calculator(model(precision="float64"), [systems.slab(), tilted], make(precision="float64"))


def test_torchsims_own_checks(model: Callable) -> None:
    checked = model(precision="float64")
    validate_model_outputs(checked, checked.device, checked.dtype)


def test_only_what_is_computed(make: Callable) -> None:
    lean = FastUMAModel(make(), compute_forces=False, dtype=torch.float32)
    results = lean(state_of([systems.copper()], lean))
    assert {name: (value.shape, value.dtype) for name, value in results.items()} == {"energy": ((1,), torch.float32)}


def test_charge_and_spin(make: Callable, model: Callable) -> None:
    ions = [systems.water(), systems.water()]
    for atoms, charge in zip(ions, (-1, 1), strict=True):
        atoms.info |= {"charge": charge, "spin": 2}
    calc, charged = make(precision="float64"), model(precision="float64")
    state = state_of(ions, charged)
    if NEW:
        state.system_extras.update(charge=torch.tensor([-1, 1]), spin=torch.tensor([2, 2]))
    else:
        state.charge, state.spin = torch.tensor([-1.0, 1.0]), torch.tensor([2, 2])
    energies = charged(state)["energy"].tolist()
    assert energies == pytest.approx([calc.get_potential_energy(atoms) for atoms in ions], abs=1e-8)
    assert abs(energies[0] - energies[1]) > 1e-3
    fixed = model(precision="float64", charge=1, spin=2)  # settings come first
    assert fixed(state)["energy"].tolist() == pytest.approx([energies[1]] * 2, abs=1e-8)


def test_errors(make: Callable, model: Callable) -> None:
    good = systems.copper()
    coincident, infinite = good.copy(), good.copy()
    coincident.positions[2] = coincident.positions[1]
    infinite.positions[3, 1] = np.inf
    tested = model()
    for atoms, message in ((coincident, "atoms 1 and 2 coincide"), (infinite, "got NaN or infinity for atoms 3")):
        with pytest.raises(ValueError, match=message) as caught:
            tested(state_of([good, atoms], tested))
        assert caught.value.__notes__ == ["system 1 of the state"]
    with pytest.raises(TypeError, match="settings: expected none beside a calculator, got task"):
        FastUMAModel(make(), task="omol")
    with pytest.raises(ValueError, match=r"state: expected its tensors on .*, got meta"):
        tested(SimpleNamespace(positions=torch.empty(4, 3, device="meta")))


def test_output_that_is_not_finite(model: Callable, tmp_path: Path) -> None:
    content = standin_module.checkpoint(standin_module.model_config())
    content.ema_state_dict["module.backbone.sphere_embedding.weight"][29] = np.nan
    torch.save(content, tmp_path / "broken.pt")
    broken = model(tmp_path / "broken.pt")
    with pytest.raises(FloatingPointError, match="expected finite numbers from the model") as caught:
        broken(state_of([systems.nacl(), systems.copper()], broken))
    assert caught.value.__notes__ == ["system 1 of the state"]


def test_constant_energy(model: Callable) -> None:
    """Velocity Verlet conserves the energy of each system, to the square of the step."""
    moving, energies = model(precision="float64"), []

    def total(state: Any) -> torch.Tensor:
        kinetic = (state.momenta**2 / state.masses[:, None]).sum(1) / 2
        return state.energy + torch.zeros_like(state.energy).index_add(0, state.system_idx, kinetic)

    for steps in (1, 12):
        torch.manual_seed(1)
        start = state_of([systems.copper(), systems.nacl()], moving)
        if NEW:
            start.rng = 1
        end = ts.integrate(start, moving, integrator=NVE, n_steps=steps, temperature=900, timestep=0.001)
        energies.append((end.energy, total(end)))
    exchanged, drifted = (abs(late - early) for early, late in zip(*energies, strict=True))
    assert (exchanged > 1e-2).all()
    assert (drifted < 0.02 * exchanged).all()
