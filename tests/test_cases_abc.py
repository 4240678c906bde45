"""Sections A, B and C of the cases from the field: start-up, memory, errors and numbers."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin as standin_module
import systems
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.io import read, write
from ase.md.verlet import VelocityVerlet
from fresh_process import snapshot
from tolerances import FINITE_DIFFERENCE, SAME_STRUCTURE

from ase_fastuma import FastUMACalculator


def test_A5_import_is_light() -> None:
    script = (
        "import ase_fastuma, sys, json; print(json.dumps([m for m in ('torch', 'ase', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
    (line,) = (line for line in done.stderr.splitlines() if line.endswith("| ase_fastuma"))
    assert int(line.split("|")[1]) < 300_000  # microseconds


@pytest.mark.gpu
def test_A5_fused_imports_no_training_stack(standin: Path) -> None:
    script = f"""
import sys
from ase.build import bulk
from ase_fastuma import FastUMACalculator
atoms = bulk("Cu")
atoms.calc = FastUMACalculator({str(standin)!r}, backend="fused")
atoms.get_forces()
print([name for name in ("wandb", "hydra", "submitit", "torchtnt", "fairchem.core") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("hyper", [{"mmax": 1}, {"lmax": 3}], ids=["mmax=1", "lmax=3"])
def test_A8_checkpoints_outside_the_fused_backend(tmp_path: Path, hyper: dict[str, int], stock: Callable) -> None:
    path = standin_module.write(tmp_path / "other.pt", **hyper)
    name, value = next(iter(hyper.items()))
    with pytest.warns(UserWarning, match=f"needs lmax = mmax = 2 .*{name} = {value}") as caught:
        calc = FastUMACalculator(path)
        atoms = systems.nacl()
        atoms.calc = calc
        forces = atoms.get_forces()
    assert len(caught) == 1
    assert calc.backend.name == "general"
    energy, reference = stock(path, "omat", systems.nacl())
    assert atoms.get_potential_energy() == pytest.approx(energy, abs=len(atoms) * SAME_STRUCTURE["accurate"]["energy"])
    np.testing.assert_allclose(forces, reference, atol=SAME_STRUCTURE["accurate"]["forces"])


def test_B1_out_of_memory_stops_the_run(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    atoms = systems.copper()
    atoms.calc = make()
    backend = type(atoms.calc._running.backend)
    calls = []
    original = backend.evaluate

    def failing(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *args)

    monkeypatch.setattr(backend, "evaluate", failing)
    atoms.set_momenta(np.random.default_rng(0).normal(size=(4, 3)))
    with pytest.raises(MemoryError, match="out of memory for 4 atoms"):
        VelocityVerlet(atoms, timestep=units.fs).run(10)
    assert len(calls) == 3
    assert atoms.calc.results == {}
    atoms.get_forces()  # and the calculator works again


def test_B3_raw_predictions_hold_no_graph(make: Callable) -> None:
    atoms = systems.water()
    calc = make(task="omol")
    atoms.calc = calc
    atoms.get_forces()
    system, backend = calc._request(atoms, "omol", 0, 1).system, calc._running.backend

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    backend.evaluate(system, frozenset({"energy", "forces"}))  # a second time: what is recorded for reuse now exists

    before, on_device = live_tensors(), torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    kept = [backend.evaluate(system, frozenset({"energy", "forces"})) for _ in range(200)]
    assert live_tensors() == before
    assert (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0) == on_device
    assert all(type(value) is np.ndarray for prediction in kept for value in prediction.values())


def test_B5_second_derivatives_cost_nothing_unless_asked_for(make: Callable) -> None:
    """What autograd saves (on a GPU: the peak of the memory) is the same before and after a Hessian."""
    atoms, calc = systems.water(), make(task="omol")
    system, backend = calc._request(atoms, "omol", 0, 1).system, calc._running.backend
    on_cuda = calc.parameters["device"] != "cpu"

    def cost(work: Callable[[], Any]) -> int:
        if on_cuda:
            gc.collect()  # what is garbage already would be let go of at some moment of the work
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - before
        saved = [0]

        def count(tensor: torch.Tensor) -> torch.Tensor:
            saved[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            work()
        return saved[0]

    def first_order() -> list[int]:
        wanted = [frozenset({"energy"}), frozenset({"energy", "forces"})]
        return [cost(lambda names=names: backend.evaluate(system, names)) for names in wanted]

    for _ in range(3):  # until what is recorded for reuse exists
        before = first_order()
    of_hessian = cost(lambda: calc.get_hessian(atoms))
    assert first_order() == before
    assert of_hessian > 2 * before[1]
    if not on_cuda:
        assert before[0] == 0 < before[1]


def test_C4_large_supercell(make: Callable) -> None:
    atoms = bulk("Cu", a=5.2).repeat(10)  # so wide that only nearest neighbours are in reach: 12,000 edges
    atoms.rattle(0.05, seed=4)
    atoms.calc = make()
    large = atoms.repeat(2)
    large.calc = atoms.calc
    assert large.get_potential_energy() == pytest.approx(8 * atoms.get_potential_energy(), abs=1e-6 * len(large))


def test_C5_files_say_what_made_them(make: Callable, tmp_path: Path) -> None:
    atoms = systems.nacl()
    atoms.calc = make(precision="float64")
    atoms.get_potential_energy()
    write(tmp_path / "frame.traj", atoms)
    recorded = read(tmp_path / "frame.traj").calc.parameters
    assert recorded["precision"] == "float64"
    assert recorded["backend"] == atoms.calc.backend.name
    assert recorded == atoms.calc.parameters


@pytest.mark.parametrize("precision", ["float64", "accurate"])
@pytest.mark.parametrize("model", ["stand-in", "demo"])
def test_C6_forces_are_the_derivative_of_the_energy(make: Callable, model: str, precision: str) -> None:
    atoms = systems.nacl() if model == "stand-in" else systems.copper() * (1, 1, 2)
    atoms.calc = make(precision=precision) if model == "stand-in" else make(model, precision=precision)
    forces = atoms.get_forces()
    step = 1e-3 if precision == "accurate" else 1e-4  # at 1e-3 A, truncation alone exceeds what float64 is asked for
    for atom, axis in ((0, 0), (3, 1), (7, 2)):
        energies = []
        for sign in (1, -1):
            atoms.positions[atom, axis] += sign * step
            energies.append(atoms.get_potential_energy())
            atoms.positions[atom, axis] -= sign * step
        numeric = (energies[1] - energies[0]) / (2 * step)
        assert forces[atom, axis] == pytest.approx(numeric, abs=FINITE_DIFFERENCE[precision])


@pytest.mark.parametrize("allowed", ["highest", "high", "medium"])
def test_C11_global_state_is_left_as_it_was(make: Callable, allowed: str) -> None:
    inside = []
    torch.set_float32_matmul_precision(allowed)
    torch.set_default_dtype(torch.float64 if allowed == "high" else torch.float32)
    try:
        before = snapshot()
        atoms = systems.nacl()
        atoms.calc = make(precision="float32", merge_mole=make().backend.name == "fused")
        assert snapshot() == before
        single = atoms.get_forces()
        assert snapshot() == before
        atoms.positions[0] = np.nan
        with pytest.raises(ValueError, match="positions"):
            atoms.get_forces()
        assert snapshot() == before
        backend = type(atoms.calc._running.backend)
        if backend.__name__ == "GeneralBackend":
            module = atoms.calc._running.backend._template
            hook = module.register_forward_hook(lambda *_: inside.append(torch.backends.mkldnn.matmul.fp32_precision))
            atoms.positions = systems.nacl().positions
            atoms.get_forces()
            hook.remove()
            assert inside[0] in ("none", "ieee")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
    atoms = systems.nacl()
    atoms.calc = make(precision="float64")
    np.testing.assert_allclose(single, atoms.get_forces(), atol=SAME_STRUCTURE["accurate"]["forces"])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_C_callers_own_torch_modes_do_not_matter(make: Callable, mode: str) -> None:
    atoms = systems.nacl()
    atoms.calc = make()
    expected = atoms.get_forces()
    atoms.calc.reset()
    modes = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(atoms.calc.parameters["device"].split(":")[0], dtype=torch.bfloat16),
    }
    with modes[mode]():
        np.testing.assert_allclose(atoms.get_forces(), expected, atol=SAME_STRUCTURE["accurate"]["forces"])


def test_C_the_root_logger_stays_as_it_was(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairchem-core warns of large boxes through it, which sets it up to print."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    apart = Atoms("H2", [[0, 0, 0], [1500, 0, 0]], calculator=make())
    apart.get_potential_energy()
    assert root.handlers == []


def test_C_default_logging_is_our_own(standin: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ase_fastuma"), warnings.catch_warnings(action="error"):
        FastUMACalculator(standin, device="cpu")
    assert [record.name for record in caplog.records] == ["ase_fastuma.calculator"]
    assert "the fused backend needs a CUDA device" in caplog.text
