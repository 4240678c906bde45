"""What all tests share: a stand-in checkpoint, calculators on every backend, uninitialised memory as NaN."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of workers side by side wait for each other; read by torch

import numpy as np
import pytest
import torch
from ase import Atoms

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors; read when Triton is imported

import interpreter
import standin as standin_module

import ase_fastuma
from ase_fastuma import general

interpreter.patch_language_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if "gpu" in item.keywords]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small UMA with random weights and the tasks omat and omol."""
    return standin_module.write(tmp_path_factory.mktemp("standin") / "standin.pt")


@pytest.fixture(
    params=[
        pytest.param({"device": "cpu"}, id="general-cpu"),
        pytest.param({"device": "cuda", "backend": "fused"}, id="fused", marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "backend": "general"}, id="general-cuda", marks=pytest.mark.gpu),
    ]
)
def make(request: pytest.FixtureRequest, standin: Path) -> Callable[..., ase_fastuma.FastUMACalculator]:
    """`make(**settings)`: a calculator of the stand-in on each backend that this machine has."""

    def make_calculator(model: Any = standin, **settings: Any) -> ase_fastuma.FastUMACalculator:
        return ase_fastuma.FastUMACalculator(model, **(request.param | settings))

    return make_calculator


@pytest.fixture(scope="session")
def stock() -> Callable[..., tuple[float, np.ndarray]]:
    """`stock(path, task, atoms)`: energy and forces from fairchem-core's own calculator, an oracle we did not write."""

    def evaluate(path: Path, task: str, atoms: Atoms) -> tuple[float, np.ndarray]:
        general.import_fairchem()
        from fairchem.core.calculate.ase_calculator import FAIRChemCalculator

        with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="index_reduce")
            patch.setenv("CURRENT_DEVICE_TYPE", "cpu")  # the calculator sets it
            atoms.calc = FAIRChemCalculator.from_model_checkpoint(str(path), task, "batch", device="cpu")
            return atoms.get_potential_energy(), atoms.get_forces()

    return evaluate


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin return NaN, so that an output that was never written shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def _working_folder_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests run in a folder of their own and leave it as it was, unless they use `tmp_path` themselves."""
    folder = tmp_path / "working-folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert os.listdir(folder) == []
