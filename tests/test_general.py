"""The general backend against fairchem-core's own calculator, an oracle that we did not write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import standin as standin_module
import systems
import torch
from ase import Atoms
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator, load_checkpoint
from ase_fastuma.checkpoint import CheckpointError
from ase_fastuma.general import GeneralBackend
from ase_fastuma.settings import Settings
from ase_fastuma.system import System


def assert_as_stock(calc: FastUMACalculator, stock: Callable, path: Path, task: str, atoms: Atoms) -> None:
    mine = atoms.copy()
    mine.calc = calc
    energy, forces = stock(path, task, atoms.copy())
    assert mine.get_potential_energy() == pytest.approx(energy, abs=len(atoms) * SAME_STRUCTURE["accurate"]["energy"])
    np.testing.assert_allclose(mine.get_forces(), forces, atol=SAME_STRUCTURE["accurate"]["forces"])
    assert np.abs(forces).max() > 1e-2


@pytest.mark.parametrize("options", [{}, {"merge_mole": False}, {"activation_checkpointing": True}], ids=str)
def test_crystal(standin: Path, stock: Callable, options: dict[str, bool]) -> None:
    calc = FastUMACalculator(standin, device="cpu", **options)
    assert_as_stock(calc, stock, standin, "omat", systems.triclinic())
    assert_as_stock(calc, stock, standin, "omat", systems.copper())


@pytest.mark.parametrize(("charge", "spin"), [(0, 1), (1, 2), (-2, 3)])
def test_charged_molecule(standin: Path, stock: Callable, charge: int, spin: int) -> None:
    atoms = systems.water()
    atoms.info |= {"charge": charge, "spin": spin}
    assert_as_stock(FastUMACalculator(standin, device="cpu"), stock, standin, "omol", atoms)


@pytest.mark.parametrize(
    "hyper",
    [
        {"act_type": "s2"},
        {"ff_type": "grid"},
        {"norm_type": "layer_norm_sh"},
        {"chg_spin_emb_type": "pos_emb"},
        {"spin_balanced_channels": [2, 3]},
        {"channels": 24},
    ],
    ids=str,
)
def test_hyper_parameters(tmp_path: Path, stock: Callable, hyper: dict) -> None:
    path = standin_module.write(tmp_path / "other.pt", **hyper)
    atoms = systems.water()
    atoms.info |= {"charge": 1, "spin": 2}
    calc = FastUMACalculator(path, device="cpu", backend="general")
    assert_as_stock(calc, stock, path, "omol", atoms)


@pytest.mark.parametrize("direct", [False, True], ids=["conservative", "direct"])
def test_esen(tmp_path: Path, stock: Callable, direct: bool) -> None:
    path = standin_module.write_esen(tmp_path / "esen.pt", direct)
    calc = FastUMACalculator(path, device="cpu", backend="general")
    assert calc.checkpoint.architecture.direct_forces is direct
    atoms = systems.water()
    atoms.info |= {"charge": -1, "spin": 2}
    assert_as_stock(calc, stock, path, "omol", atoms)


def test_mixing_of_uma_1_2_depends_on_the_size(tmp_path: Path) -> None:
    """That version counts a row of zeros in the mean over the atoms, so a supercell has other weights than its cell."""
    content = standin_module.checkpoint(standin_module.model_config())
    content.model_config["model_id"] = "UMA-S-1.2"
    torch.save(content, tmp_path / "uma-1.2.pt")
    calc = FastUMACalculator(tmp_path / "uma-1.2.pt", device="cpu", precision="float64")
    small, large = systems.copper(), systems.copper() * (2, 1, 1)
    for atoms in (small, large, small.copy()):
        atoms.calc = calc
    energy = small.get_potential_energy()
    assert abs(large.get_potential_energy() - 2 * energy) > 1e-3
    calc.reset()
    assert small.get_potential_energy() == energy


def test_only_what_is_asked_for(standin: Path) -> None:
    backend = GeneralBackend(load_checkpoint(standin), Settings(device="cpu"))
    system = System.from_atoms(systems.nacl(), "omat", 0, 0, cutoff=5.0)
    backend.prepare(system)
    for names in ({"energy"}, {"forces"}, {"energy", "stress"}, {"energies"}):
        assert backend.evaluate(system, frozenset(names)).keys() == names


def test_repeatable(standin: Path) -> None:
    results = []
    for _ in range(3):
        backend = GeneralBackend(load_checkpoint(standin), Settings(device="cpu"))
        system = System.from_atoms(systems.nacl(), "omat", 0, 0, cutoff=5.0)
        results.append(backend.evaluate(system, frozenset({"forces"}))["forces"])
    np.testing.assert_allclose(results[1:], np.broadcast_to(results[0], (2, 8, 3)), atol=1e-6)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    content = standin_module.checkpoint(standin_module.model_config())
    for i in range(8):
        content.ema_state_dict[f"module.backbone.extra_{i}"] = torch.zeros(1)
    del content.ema_state_dict["module.backbone.norm.affine_weight"]
    torch.save(content, tmp_path / "misfit.pt")
    message = r"weights do not fit .* missing backbone.norm.affine_weight, unknown backbone.extra_0, .* and 4 more"
    with pytest.raises(CheckpointError, match=message):
        FastUMACalculator(tmp_path / "misfit.pt", device="cpu")
