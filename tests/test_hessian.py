"""Second derivatives: both backends against each other, products against the matrix, files, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import standin as standin_module
import systems
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.singlepoint import SinglePointCalculator
from devices import DEVICES
from tolerances import HESSIAN

from ase_fastuma import FastUMACalculator, curvature, finite_differences, hessian
from ase_fastuma.checkpoint import load_checkpoint
from ase_fastuma.engine import FusedBackend
from ase_fastuma.evaluation import evaluate_products
from ase_fastuma.general import GeneralBackend
from ase_fastuma.hessian import analytic_hessian, chosen_atoms
from ase_fastuma.replay import EdgeInputs, GraphPool
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

CUTOFF = 5.0
STRUCTURES = {
    "molecule": (systems.water(), "omol", 1, 2),
    "salt": (systems.nacl()[[0, 1]], "omat", 0, 0),
    "one atom, many images": (bulk("Al", a=3.2), "omat", 0, 0),
    "lone atom": (Atoms("He"), "omol", 0, 1),
    "two far atoms": (Atoms("ArAr", positions=[[0, 0, 0], [0, 0, 20]]), "omol", 0, 1),
}


def whole(backend: FusedBackend | GeneralBackend, atoms: Atoms, task: str, charge: int, spin: int) -> np.ndarray:
    return analytic_hessian(backend, System.from_atoms(atoms, task, charge, spin, CUTOFF), np.arange(len(atoms)))


def settings(device: str = "cpu", precision: str = "float64", **others: object) -> Settings:
    return Settings(device=device, precision=precision, **others)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("device", DEVICES)
def test_fused_equals_general_mode(standin: Path, name: str, device: str) -> None:
    """By products of the plain form on the CPU, through the kernels on a GPU."""
    checkpoint = load_checkpoint(standin)
    want = whole(GeneralBackend(checkpoint, settings()), *STRUCTURES[name])
    got = whole(FusedBackend(checkpoint, settings(device), plain=device == "cpu"), *STRUCTURES[name])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-8 * np.abs(want).max())
    if name in ("molecule", "salt"):
        assert np.abs(want).max() > 0.1


@pytest.mark.parametrize("precision", ["accurate", "fast", "float32"])
@pytest.mark.parametrize("device", DEVICES)
def test_float32_modes(standin: Path, device: str, precision: str) -> None:
    checkpoint = load_checkpoint(standin)
    want = whole(GeneralBackend(checkpoint, settings()), *STRUCTURES["molecule"])
    got = whole(FusedBackend(checkpoint, settings(device, precision), plain=device == "cpu"), *STRUCTURES["molecule"])
    np.testing.assert_allclose(got, want, rtol=0, atol=HESSIAN["accurate"])


@pytest.mark.parametrize(
    ("hyper", "rows"),
    [({"spin_balanced_channels": [2]}, 1), ({"act_type": "s2", "charge_balanced_channels": []}, 100)],
    ids=["atom after atom", "all edges at once"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_through_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, hyper: dict, rows: int
) -> None:
    """On a CPU interpreted, hence so small."""
    checkpoint = load_checkpoint(standin_module.write(tmp_path / "small.pt", channels=4, layers=1, **hyper))
    atoms = Atoms("OH", positions=[[0.1, 0.2, -0.1], [0.4, 0.8, 0.3]])
    want = whole(GeneralBackend(checkpoint, settings()), atoms, "omol", -1, 1)
    assert np.abs(want).max() > 0.01
    monkeypatch.setattr(curvature, "_ROWS", rows)
    got = whole(FusedBackend(checkpoint, settings(device)), atoms, "omol", -1, 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


class Eager(NamedTuple):
    """Stands for a CUDA graph where there is none: it reads what the recorded body read, and runs that again."""

    body: Callable[[], torch.Tensor]

    def run(self) -> torch.Tensor:
        return self.body()


def test_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made the second time, of the structure that is there then; those least used give way."""
    recorded, calls = [], []

    def record(_: GraphPool, body: Callable[[], torch.Tensor], *size: int) -> Eager:
        recorded.append(body)
        return Eager(body)

    def body(inputs: EdgeInputs) -> torch.Tensor:
        calls.append(inputs)
        return inputs.vectors.sum(dim=0)

    def edges(count: int) -> EdgeInputs:
        numbers = [torch.randint(9, (count,)) for _ in range(6)]
        return EdgeInputs(*numbers[:3], torch.rand(count, 3), *numbers[3:])

    monkeypatch.setattr(GraphPool, "record", record)
    recordings = curvature.Recordings(kept=2)
    assert recordings.run("a", edges(3), body) is None
    assert recordings.run("a", edges(4), body) is None
    for made in (1, 1, 1):
        given = edges(3)
        np.testing.assert_array_equal(recordings.run("a", given, body), given.vectors.sum(dim=0))
        assert len(recorded) == made
        assert all((own == there).all() and own is not there for own, there in zip(calls[-1], given, strict=True))
    assert recordings.run("b", edges(3), body) is None  # for which ("a", 4 edges) gives way
    assert recordings.run("a", edges(4), body) is None
    assert recordings.run("b", edges(3), body) is not None
    assert len(recorded) == 2


@pytest.mark.gpu
def test_recorded_hessians_repeat_bitwise(standin: Path) -> None:
    backend, atoms = FusedBackend(load_checkpoint(standin), settings("cuda", "accurate")), systems.water()
    first = [whole(backend, atoms, "omol", 0, 1)]
    moved = atoms.copy()
    moved.positions[0] += 0.05
    second = [whole(backend, moved, "omol", 0, 1)]
    for _ in range(2):
        first.append(whole(backend, atoms, "omol", 0, 1))
        second.append(whole(backend, moved, "omol", 0, 1))
    assert all((found == first[0]).all() for found in first)
    assert all((found == second[0]).all() for found in second)
    assert np.abs(first[0] - second[0]).max() > 1e-3


@pytest.mark.parametrize(
    "hyper",
    [
        {"act_type": "s2"},
        {"ff_type": "grid"},
        {"norm_type": "layer_norm_sh"},
        {"lmax": 3},
        {"spin_balanced_channels": [2]},
    ],
    ids=str,
)
def test_other_architectures(tmp_path: Path, hyper: dict) -> None:
    """Each against differences of its own forces; the fused backend against general mode where it can run."""
    checkpoint = load_checkpoint(standin_module.write(tmp_path / "other.pt", layers=1, **hyper))
    calc = FastUMACalculator(tmp_path / "other.pt", device="cpu", precision="float64", backend="general")
    atoms = systems.water()
    exact = calc.get_hessian(atoms)
    numeric = calc.get_hessian(atoms, method="finite-difference", step=5e-4)  # the grid of s2 is noise for smaller ones
    np.testing.assert_allclose(exact, numeric, atol=HESSIAN["float64"])
    if hyper.keys() & {"act_type", "spin_balanced_channels"}:
        plain = whole(FusedBackend(checkpoint, settings(), plain=True), atoms, "omol", 0, 1)
        np.testing.assert_allclose(plain, exact, atol=1e-8)


@pytest.mark.parametrize("options", [{"merge_mole": False}, {"activation_checkpointing": True}], ids=str)
def test_options_of_general_mode(standin: Path, options: dict) -> None:
    atoms = systems.water()
    want = FastUMACalculator(standin, device="cpu", precision="float64").get_hessian(atoms)
    got = FastUMACalculator(standin, device="cpu", precision="float64", **options).get_hessian(atoms)
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_products(make: Callable) -> None:
    """A product is the derivative of the forces along its direction, and linear; the matrix is made of products."""
    calc, atoms = make(precision="float64"), systems.nacl()
    vectors = np.random.default_rng(0).normal(size=(5, 8, 3))
    found = calc.hessian_vector_product(atoms, vectors)
    assert found.shape == (5, 8, 3)
    assert found.dtype == np.float64
    for vector, product in zip(vectors[:2], found, strict=False):
        forces = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions += sign * 1e-5 * vector
            moved.calc = calc
            forces.append(moved.get_forces())
        np.testing.assert_allclose(product, (forces[1] - forces[0]) / 2e-5, atol=HESSIAN["float64"])
    np.testing.assert_allclose(
        calc.hessian_vector_product(atoms, 2 * vectors[:1] - vectors[1:2]), 2 * found[:1] - found[1:2]
    )
    matrix = calc.get_hessian(atoms)
    np.testing.assert_allclose(found.reshape(5, 24), vectors.reshape(5, 24) @ matrix, atol=1e-10)
    assert calc.hessian_vector_product(atoms, np.empty((0, 8, 3))).shape == (0, 8, 3)


def test_number_of_directions_at_once_changes_nothing(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, atoms = FusedBackend(load_checkpoint(standin), settings(), plain=True), systems.water()
    system = System.from_atoms(atoms, "omol", 0, 1, CUTOFF)
    directions, passes = np.random.default_rng(0).normal(size=(7, 3, 3)), []
    original = torch.autograd.grad

    def counting(*args: object, **options: object) -> object:
        passes.extend([len(args[2])] if options.get("is_grads_batched") else [])
        return original(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    want = evaluate_products(backend, system, directions)
    assert passes == [7]
    numbers = 6 * 16 * 2  # edges, channels, layers
    monkeypatch.setitem(hessian._PASS_BYTES, "cpu", 3.5 * hessian._NUMBERS_OF_AN_EDGE * 8 * numbers)
    np.testing.assert_allclose(evaluate_products(backend, system, directions), want, atol=1e-12)
    assert passes == [7, 3, 3, 1]
    monkeypatch.setitem(hessian._PASS_BYTES, "cpu", 1)
    np.testing.assert_allclose(evaluate_products(backend, system, directions), want, atol=1e-12)
    assert passes == [7, 3, 3, 1, *[1] * 7]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("backend", [GeneralBackend, functools.partial(FusedBackend, plain=True)])
def test_callers_own_torch_modes_do_not_matter(tmp_path: Path, backend: Callable, mode: Callable) -> None:
    """Nor while the checkpoint is loaded and the backend made."""
    path = standin_module.write(tmp_path / "standin.pt", layers=1)
    system = System.from_atoms(systems.water(), "omol", 0, 1, CUTOFF)
    with mode():
        made = backend(load_checkpoint(path), settings())
        made.prepare(system)
        got = analytic_hessian(made, system, np.arange(3))
        forces = made.evaluate(system, frozenset({"forces"}))["forces"]
    del made
    other = backend(load_checkpoint(path), settings())
    np.testing.assert_array_equal(got, analytic_hessian(other, system, np.arange(3)))
    np.testing.assert_array_equal(forces, other.evaluate(system, frozenset({"forces"}))["forces"])


def test_hessian_as_a_property(make: Callable) -> None:
    calc, atoms = make(precision="float64"), systems.water()
    atoms.calc = calc
    energy = atoms.get_potential_energy()
    SinglePointCalculator(atoms, **calc.results)  # which knows ASE's own properties alone
    assert calc.get_property("hessian", atoms, allow_calculation=False) is None
    found = calc.get_property("hessian", atoms)
    np.testing.assert_allclose(found, calc.get_hessian(atoms), atol=1e-10)
    assert calc.results["energy"] == energy
    atoms.positions[0, 0] += 0.1
    atoms.get_forces()
    assert "hessian" not in calc.results


def test_finite_differences(make: Callable) -> None:
    calc, atoms = make(precision="float64"), systems.nacl()
    exact = calc.get_hessian(atoms)
    found = calc.get_hessian(atoms, method="finite-difference", step=1e-4)
    np.testing.assert_allclose(found, exact, atol=HESSIAN["float64"])
    np.testing.assert_array_equal(found, found.T)
    block = calc.get_hessian(atoms, [5, -8], "finite-difference", step=1e-4)
    np.testing.assert_allclose(block, calc.get_hessian(atoms, [5, 0]), atol=HESSIAN["float64"])


def test_finite_differences_go_on_from_a_file(make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails in the middle keeps its rows; the next one evaluates what is missing, and no more."""
    calc, atoms, file = make(precision="float64"), systems.water(), tmp_path / "water.npz"
    want = calc.get_hessian(atoms, method="finite-difference")
    evaluated = []
    original = finite_differences.evaluate_packed

    def failing(backend: object, requests: object) -> object:
        for outcome in original(backend, requests):
            evaluated.append(outcome)
            yield MemoryError("no more") if len(evaluated) == 8 else outcome

    monkeypatch.setattr(finite_differences, "evaluate_packed", failing)
    with pytest.raises(MemoryError, match="no more"):
        calc.get_hessian(atoms, method="finite-difference", file=file)
    assert [path.name for path in tmp_path.glob("water*")] == ["water.npz"]
    with np.load(file) as stored:
        assert np.isfinite(stored["hessian"]).all(axis=1).tolist() == [True] * 3 + [False] * 6
    found = calc.get_hessian(atoms, method="finite-difference", file=str(file))
    np.testing.assert_allclose(found, want, atol=1e-10)
    assert len(evaluated) == 8 + 12
    np.testing.assert_array_equal(calc.get_hessian(atoms, method="finite-difference", file=file), found)
    assert len(evaluated) == 8 + 12


def test_a_file_belongs_to_one_structure_and_its_settings(make: Callable, tmp_path: Path) -> None:
    calc, atoms, file = make(), systems.water(), tmp_path / "water.npz"
    calc.get_hessian(atoms, method="finite-difference", file=file)
    moved, charged = atoms.copy(), atoms.copy()
    moved.positions[0, 0] += 1e-3
    charged.info["charge"] = 1
    content = file.read_bytes()
    for other, options, name in (
        (moved, {}, "positions"),
        (charged, {}, "model"),
        (atoms, {"step": 0.02}, "step"),
        (atoms, {"indices": [0]}, "indices"),
    ):
        with pytest.raises(ValueError, match=rf"file: expected .* with other {name}"):
            calc.get_hessian(other, method="finite-difference", file=file, **options)
    assert file.read_bytes() == content
    np.savez(tmp_path / "mine.npz", a=1)
    (tmp_path / "empty.npz").touch()
    for name in ("mine", "empty"):
        with pytest.raises(ValueError, match=rf"file: expected rows of a Hessian.*, got .*{name}.npz"):
            calc.get_hessian(atoms, method="finite-difference", file=tmp_path / f"{name}.npz")


def test_a_file_belongs_to_one_model_whatever_its_name(tmp_path: Path) -> None:
    atoms, file, calcs = systems.water(), tmp_path / "water.npz", []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = standin_module.write(folder / "inference_ckpt.pt", seed=seed)
        calcs.append(FastUMACalculator(path, device="cpu"))
    calcs[0].get_hessian(atoms, [0], "finite-difference", file=file)
    with pytest.raises(ValueError, match=r"file: expected .* with other model"):
        calcs[1].get_hessian(atoms, [0], "finite-difference", file=file)


def test_progress(make: Callable, capsys: pytest.CaptureFixture) -> None:
    calc, atoms = make(), systems.water()
    calc.get_hessian(atoms, method="finite-difference")
    assert capsys.readouterr().err == ""
    calc.get_hessian(atoms, [0], "finite-difference", progress=True)
    assert "6/6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"indices": [3]}, ValueError, r"indices: expected some of 3 atoms, got \[3\]"),
        ({"indices": [-4]}, ValueError, "indices: expected some of 3 atoms"),
        ({"indices": []}, ValueError, r"indices: expected some of 3 atoms, got \[\]"),
        ({"indices": [0, -3]}, ValueError, "indices: expected each atom once"),
        ({"indices": [0.5]}, TypeError, "indices: expected a sequence of integers"),
        ({"indices": 1}, TypeError, "indices: expected a sequence of integers"),
        ({"method": "numeric"}, ValueError, "method: expected 'analytic' or 'finite-difference', got 'numeric'"),
        ({"step": 0.1}, ValueError, "step: expected with method='finite-difference' alone"),
        ({"method": "finite-difference", "step": 1e-20}, ValueError, "step: expected 1e-06 to 1 A, got 1e-20"),
        ({"method": "finite-difference", "step": float("nan")}, ValueError, "step: expected 1e-06 to 1 A, got nan"),
        ({"method": "finite-difference", "step": True}, TypeError, "step: expected a length in A, got True"),
        ({"method": "finite-difference", "step": "1"}, TypeError, "step: expected a length in A, got '1'"),
        ({"method": "finite-difference", "step": 0.0}, ValueError, "step: expected 1e-06 to 1 A, got 0.0"),
    ],
)
def test_what_is_refused(standin: Path, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        FastUMACalculator(standin, device="cpu").get_hessian(systems.water(), **options)


def test_the_last_structure_keeps_its_charge(make: Callable) -> None:
    calc, atoms = make(precision="float64"), systems.water()
    atoms.info |= {"charge": 1, "spin": 2}
    calc.calculate(atoms)
    expected, vectors = calc.get_hessian(atoms, [0]), np.eye(9)[:1].reshape(1, 3, 3)
    np.testing.assert_allclose(calc.get_hessian(indices=[0]), expected, atol=1e-9)
    np.testing.assert_allclose(calc.hessian_vector_product(None, vectors)[0, 0], expected[0], atol=1e-9)
    np.testing.assert_allclose(calc.get_property("hessian")[:3, :3], expected, atol=1e-9)


def test_indices_of_a_small_type() -> None:
    assert chosen_atoms(np.array([0, -1], np.int8), 200).tolist() == [0, 199]


@pytest.mark.parametrize("vectors", [np.zeros((3, 3)), np.zeros((1, 2, 3)), np.zeros((1, 3, 2))])
def test_vectors_of_another_shape(standin: Path, vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"vectors: expected shape \[k, 3, 3\], got"):
        FastUMACalculator(standin, device="cpu").hessian_vector_product(systems.water(), vectors)
    with pytest.raises(ValueError, match="vectors: expected finite numbers"):
        FastUMACalculator(standin, device="cpu").hessian_vector_product(systems.water(), np.full((1, 3, 3), np.nan))


def test_what_goes_wrong_says_so(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    calc, atoms = make(), systems.water()
    backend = type(calc._running.backend)
    monkeypatch.setattr(backend, "hessian", lambda self, system, indices: np.full((9, 9), np.nan))
    with pytest.raises(FloatingPointError, match="hessian: expected finite numbers"):
        calc.get_hessian(atoms)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend, "hessian", full)
    with pytest.raises(MemoryError, match="second derivatives of 3 atoms; get_hessian with method='finite-difference'"):
        calc.get_hessian(atoms)
    atoms.positions[1] = atoms.positions[0]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="atoms 0 and 1 coincide"):
        calc.get_hessian(atoms)


def test_direct_forces_have_finite_differences_alone(tmp_path: Path) -> None:
    path = standin_module.write_esen(tmp_path / "direct.pt", direct=True)
    calc, atoms = FastUMACalculator(path, device="cpu", backend="general"), molecule("H2O")
    for function in (calc.get_hessian, lambda a: calc.hessian_vector_product(a, np.zeros((1, 3, 3)))):
        with pytest.raises(PropertyNotImplementedError, match="hessian: not among the properties"):
            function(atoms)
    assert np.abs(calc.get_hessian(atoms, method="finite-difference")).max() > 0
