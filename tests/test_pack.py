"""Many systems in one pass of the fused engine: each as if it were alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import standin as standin_module
from ase import Atoms
from ase.build import bulk, molecule
from devices import DEVICES
from tolerances import FORCE_ERROR

from ase_fastuma import repeats
from ase_fastuma.checkpoint import Checkpoint, load_checkpoint
from ase_fastuma.engine import FusedBackend
from ase_fastuma.replay import GraphPool
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

ALL = frozenset({"energy", "energies", "forces", "stress"})
CUTOFF = 5.0


def rattled(atoms: Atoms, seed: int) -> Atoms:
    atoms.rattle(0.05, seed=seed)
    return atoms


def system(atoms: Atoms, task: str, charge: int = 0, spin: int = 0) -> System:
    return System.from_atoms(atoms, task, charge, spin, CUTOFF)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One layer, since kernels are interpreted here."""
    return load_checkpoint(standin_module.write(tmp_path_factory.mktemp("pack") / "one_layer.pt", layers=1))


@pytest.fixture(scope="module")
def systems() -> list[System]:
    """Both tasks, several mixtures in turn, one mixture twice, no edges, one atom, images of an atom."""
    return [
        system(rattled(molecule("H2O"), 1), "omol", 0, 1),
        system(bulk("Po", "sc", a=4.5), "omat"),
        system(rattled(molecule("CO"), 2), "omol", 1, 2),
        system(Atoms("He"), "omol", 0, 1),
        system(rattled(molecule("H2O"), 3), "omol", 0, 1),
        system(rattled(bulk("NaCl", "zincblende", a=8.4), 4), "omat"),
        system(Atoms("ArAr", positions=[[0, 0, 0], [0, 0, 20]]), "omol", 0, 1),
        system(rattled(molecule("H2O"), 5), "omol", -1, 2),
    ]


@pytest.fixture(scope="module")
def plain(checkpoint, systems) -> list[dict[str, np.ndarray]]:
    """Each alone, in the plain form, in float64."""
    engine = FusedBackend(checkpoint, Settings(device="cpu", precision="float64"), plain=True)
    return [engine.evaluate(s, ALL) for s in systems]


@pytest.fixture(scope="module")
def whole(checkpoint, systems) -> Callable[[str, str], tuple[FusedBackend, list[dict[str, np.ndarray]]]]:
    """All of them in one pass, on a device in a precision, and the engine that did it; once."""

    @functools.cache
    def evaluated(device: str, precision: str) -> tuple[FusedBackend, list[dict[str, np.ndarray]]]:
        engine = FusedBackend(checkpoint, Settings(device=device, precision=precision))
        return engine, engine.evaluate_many(systems, ALL)

    return evaluated


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "float64"),
        ("cpu", "accurate"),
        *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in FORCE_ERROR),
    ],
)
def test_a_pack_equals_its_members(whole, systems, plain, device, precision):
    engine, found = whole(device, precision)
    for got, want in zip(found, plain, strict=True):
        assert set(got) == ALL
        scale = max(1.0, np.abs(want["forces"]).max())
        np.testing.assert_allclose(got["forces"], want["forces"], atol=FORCE_ERROR[precision] * scale)
        np.testing.assert_allclose(got["energies"], want["energies"], atol=FORCE_ERROR[precision] * scale)
        np.testing.assert_allclose(got["stress"], want["stress"], atol=FORCE_ERROR[precision] * scale)
        assert got["energy"] == pytest.approx(got["energies"].sum(), abs=1e-12)
    energies = engine.evaluate_many(systems[:3], frozenset({"energy"}))
    for got, want in zip(energies, plain, strict=False):
        assert set(got) == {"energy"}
        assert got["energy"] == pytest.approx(float(want["energy"]), abs=FORCE_ERROR[precision] * 10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["accurate", pytest.param("fast", marks=pytest.mark.gpu)])
def test_results_do_not_depend_on_the_pack(whole, systems, device, precision):
    """Bitwise: in another order, among others, and alone."""
    engine, together = whole(device, precision)
    chosen = [7, 4, 2, 5] if device == "cuda" else [4, 2]
    for indices in (chosen, chosen[:1]) if device == "cuda" else (chosen,):
        for i, part in zip(indices, engine.evaluate_many([systems[i] for i in indices], ALL), strict=True):
            for name in ALL:
                np.testing.assert_array_equal(part[name], together[i][name])


@pytest.mark.parametrize("device", DEVICES)
def test_atoms_that_coincide_are_named(checkpoint, device):
    engine = FusedBackend(checkpoint, Settings(device=device))
    good, bad = molecule("H2O"), molecule("NH3")
    bad.positions[3] = bad.positions[1]
    with pytest.raises(ValueError, match="positions: atoms 1 and 3 of system 2 coincide, expected them more than"):
        engine.evaluate_many([system(atoms, "omol", 0, 1) for atoms in (good, good, bad, good)], ALL)
    with pytest.raises(ValueError, match="positions: atoms 1 and 3 coincide, expected them more than"):
        engine.evaluate_many([system(bad, "omol", 0, 1)], ALL)


@pytest.mark.gpu
def test_many_atoms_do_not_change_a_member(checkpoint):
    """Beyond the sizes at which single systems take other tiles."""
    engine = FusedBackend(checkpoint, Settings(device="cuda", precision="accurate"))
    small, large = (system(rattled(bulk("Cu", cubic=True) * n, 6), "omat") for n in ((2, 2, 2), (8, 8, 8)))
    alone, *_ = engine.evaluate_many([small], ALL)
    among, *_ = engine.evaluate_many([small, large, small], ALL)
    for name in ALL:
        np.testing.assert_array_equal(among[name], alone[name])


@pytest.mark.parametrize("device", DEVICES)
def test_packs_that_come_again(checkpoint, device, monkeypatch):
    """Recorded the second time, and replayed as atoms move: bitwise as if nothing were kept."""
    engine = FusedBackend(checkpoint, Settings(device=device, precision="accurate"))
    monkeypatch.setattr(engine, "_repeats", repeats.Repeats(checkpoint.architecture, patience=0))
    if device == "cpu":  # no CUDA graph: the same work, launched again
        monkeypatch.setattr(GraphPool, "record", lambda _, body, *size: SimpleNamespace(run=body))
        monkeypatch.setattr(FusedBackend, "recordable", lambda *_: True)
    monkeypatch.setattr(repeats, "capacity", lambda num_edges: num_edges + 2)
    original, replays = repeats._Recording.run, []
    monkeypatch.setattr(repeats._Recording, "run", lambda *a: (replays.append(original(*a)), replays[-1])[1])

    def evaluate(distance: float) -> list[dict[str, np.ndarray]]:
        pair = Atoms("HeNe", positions=[[0, 0, 0], [0, distance, 0]])
        return engine.evaluate_many([system(pair, "omol", 0, 1), system(Atoms("He"), "omol", 0, 1)], ALL)

    evaluate(1.5)
    found = evaluate(2.5)
    assert [replay.complete for replay in replays] == [True]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_repeats", repeats.Repeats(checkpoint.architecture))
        expected = evaluate(2.5)
    for mine, other in zip(found, expected, strict=True):
        for name in ALL:
            np.testing.assert_array_equal(mine[name], other[name])
