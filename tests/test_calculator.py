"""The calculator's own interface: settings, parameters, report, plug-in, doctor."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import standin as standin_module
import systems
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError

import ase_fastuma
from ase_fastuma import FastUMACalculator, Settings, _plugin, doctor, evaluate, hub
from ase_fastuma.general import GeneralBackend


def test_public_names() -> None:
    assert set(dir(ase_fastuma)) >= {"FastUMACalculator", "Settings", "load_checkpoint", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ase_fastuma.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "fast"}, ValueError, r"backend: expected one of \['auto', 'fused', 'general'\], got 'fast'"),
        ({"precision": "double"}, ValueError, r"precision: expected one of .* got 'double'"),
        ({"merge_mole": 1}, TypeError, "merge_mole: expected True or False, got 1"),
        ({"task": 3}, TypeError, "task: expected a string, got 3"),
        ({"model": None}, TypeError, "model: expected a string, got None"),
        ({"spin": 1.5}, ValueError, r"spin: expected an integer, got 1\.5"),
    ],
)
def test_settings_are_checked(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Settings(**arguments)


def test_task_is_checked(standin: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task: expected one of \['omat', 'omol'\], got 'oc20'"):
        FastUMACalculator(standin, task="oc20", device="cpu")
    path = standin_module.write(tmp_path / "other.pt", tasks={"oc20": ("energy",), "omc": ("energy",)})
    atoms = systems.water()
    atoms.calc = FastUMACalculator(path, device="cpu")
    with pytest.raises(ValueError, match=r"task: expected one of \['oc20', 'omc'\], got None .* suggests 'omol'"):
        atoms.get_potential_energy()


def test_the_only_task_is_taken(tmp_path: Path) -> None:
    path = standin_module.write(tmp_path / "one.pt", tasks={"omat": ("energy", "forces")})
    atoms = systems.water()
    atoms.calc = FastUMACalculator(path, device="cpu")
    atoms.get_potential_energy()
    assert atoms.calc.parameters["task"] == "omat"


def test_fused_on_a_cpu_is_refused(standin: Path) -> None:
    with pytest.raises(ValueError, match=r"backend='fused': expected a CUDA device.*; merged experts"):
        FastUMACalculator(standin, device="cpu", backend="fused", merge_mole=False)


def test_parameters_are_what_runs(standin: Path) -> None:
    atoms = systems.nacl()
    atoms.calc = FastUMACalculator(str(standin), device="cpu", precision="fast")
    atoms.get_potential_energy()
    assert atoms.calc.parameters == {
        "model": str(standin),
        "task": "omat",
        "charge": 0,
        "spin": 0,
        "device": "cpu",
        "backend": "general",
        "precision": "float32",
        "merge_mole": True,
        "activation_checkpointing": False,
        "version": ase_fastuma.__version__,
    }
    assert atoms.calc.todict() == atoms.calc.parameters
    assert atoms.calc.settings.precision == "fast"
    assert atoms.calc.name == "fastuma"


def test_set(standin: Path) -> None:
    atoms = systems.water()
    calc = atoms.calc = FastUMACalculator(standin, device="cpu")
    neutral = atoms.get_potential_energy()
    assert calc.set() == {}
    assert calc.set(charge=None) == {}
    assert calc.results["energy"] == neutral
    assert calc.set(charge=1, spin=2) == {"charge": 1, "spin": 2}
    assert calc.results == {}
    assert abs(atoms.get_potential_energy() - neutral) > 1e-3
    with pytest.raises(TypeError, match="unexpected keyword"):
        calc.set(temperature=3)
    with pytest.raises(ValueError, match="task: expected one of"):
        calc.set(task="oc20")
    assert calc.settings.task is None
    assert atoms.get_potential_energy() != neutral


def test_threads_take_turns(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calculators of one checkpoint share a backend, which changes the process's switches while it runs."""
    running, at_once = [], []
    original = GeneralBackend._arithmetic

    @contextmanager
    def watched(backend: GeneralBackend, derivatives: bool) -> Iterator[None]:
        running.append(backend)
        at_once.append(len(running))
        time.sleep(0.02)
        with original(backend, derivatives):
            yield
        running.pop()

    monkeypatch.setattr(GeneralBackend, "_arithmetic", watched)
    water, wanted = systems.water(), []
    for work in (
        lambda calc: calc.get_forces(water),
        lambda calc: evaluate([water], calc)[0]["forces"],
        lambda calc: calc.get_hessian(water, [0]),
    ):
        wanted += [(work, work(FastUMACalculator(standin, device="cpu", precision="float64")))]
    with ThreadPoolExecutor(len(wanted)) as pool:
        calculators = [FastUMACalculator(standin, device="cpu", precision="float64") for _ in wanted]
        found = list(pool.map(lambda one, calc: one[0](calc), wanted, calculators))
    for got, (_, expected) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-10)
    assert at_once == [1] * 6


def test_calculation_on_request_only(standin: Path) -> None:
    calc = FastUMACalculator(standin, device="cpu")
    assert calc.get_property("energy", systems.nacl(), allow_calculation=False) is None
    assert calc.calculation_required(systems.nacl(), ["energy"])
    calc.calculate(systems.nacl(), ["energy"])
    assert not calc.calculation_required(systems.nacl(), ["energy", "forces"])
    with pytest.raises(PropertyNotImplementedError, match="dipole"):
        calc.get_property("dipole", systems.nacl())
    fresh = FastUMACalculator(standin, device="cpu")
    for method in (fresh.calculate, fresh.get_hessian):
        with pytest.raises(ValueError, match="expected a structure, got None"):
            method()


def test_many_structures_are_kept_but_not_all(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ase_fastuma import calculator

    monkeypatch.setattr(calculator, "_KEPT_ATOMS", 12)
    calc = FastUMACalculator(standin, device="cpu")
    for shift in range(6):
        atoms = systems.water()
        atoms.positions[0, 2] += 0.01 * shift
        calc.calculate(atoms)
    assert len(calc._recent) == 4


def test_direct_forces(tmp_path: Path) -> None:
    path = standin_module.write_esen(tmp_path / "direct.pt", direct=True)
    with pytest.warns(UserWarning, match="needs conservative forces"):
        calc = FastUMACalculator(path, device="cpu")
    box = Atoms("Cu", cell=[4, 4, 4], pbc=True, calculator=calc)
    box.get_forces()
    with pytest.raises(
        PropertyNotImplementedError, match=r"stress: not among the properties of task 'omol' of direct.pt"
    ):
        box.get_stress()
    with pytest.raises(PropertyNotImplementedError, match="hessian: not among the properties"):
        calc.get_hessian(box)


def test_report(standin: Path) -> None:
    calc = FastUMACalculator(standin, device="cpu", precision="float64")
    text = calc.report()
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "general (the fused backend needs a CUDA device (the device is cpu))" in lines["backend"]
    assert "UMA-S-1.2.1, tasks omat, omol" in lines["model"]
    assert "chosen with the first structure" in lines["task"]
    assert "float64" in lines["precision"]
    for package in ("torch", "fairchem-core", "ase ", "Python"):
        assert package in lines["versions"]


def test_doctor(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "broken.pt").write_bytes(b"nonsense")
    monkeypatch.setattr(hub, "cached", lambda name: standin if name == "uma-m-1p1" else None)
    monkeypatch.setattr(doctor, "cached", hub.cached)
    assert doctor.main(["doctor", str(tmp_path / "broken.pt"), str(tmp_path / "missing.pt")]) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    assert "uma-m-1p1" in out
    assert "tasks omat, omol" in out
    assert "unusable: " in out
    assert "neither a file nor a registered name" in out


def test_doctor_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ase_fastuma.doctor", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ase_fastuma.__version__


def test_plugin() -> None:
    (plugin,) = _plugin.__ase_plugins__
    assert plugin.implementation is FastUMACalculator


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["accurate", "fast"])
def test_ten_calculators_on_one_gpu(standin: Path, precision: str) -> None:
    """Steps of ten structures in turn, recorded ones too, are those of each alone, bit for bit."""

    def steps(seed: int) -> Iterator[np.ndarray]:
        atoms = systems.nacl() if seed % 2 else systems.copper() * (2, 1, 1)
        atoms.calc = FastUMACalculator(standin, task="omat", device="cuda", precision=precision)
        for step in range(5):
            atoms.rattle(0.02, seed=10 * seed + step)
            yield atoms.get_forces()

    alone = [list(steps(seed)) for seed in range(10)]
    in_turn = zip(*zip(*map(steps, range(10)), strict=True), strict=True)
    for one, other in zip(alone, in_turn, strict=True):
        np.testing.assert_array_equal(one, other)
