"""The fused engine: kernels against its plain form, plain form against fairchem-core, and physics as properties."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import standin as standin_module
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.stress import full_3x3_to_voigt_6_stress
from ase_fastuma.kernels.convolution import Keep
from devices import DEVICES
from tolerances import FORCE_ERROR

from ase_fastuma.checkpoint import load_checkpoint
from ase_fastuma.engine import FusedBackend
from ase_fastuma.general import GeneralBackend
from ase_fastuma.replay import GraphPool
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

ALL = frozenset({"energy", "energies", "forces", "stress"})
CUTOFF = 5.0


def salt() -> Atoms:
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=1)
    return atoms


def ethanol() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=2)
    return atoms


def ion() -> Atoms:
    """Small enough for interpreted kernels."""
    atoms = molecule("H2O")
    atoms.rattle(0.05, seed=2)
    return atoms


STRUCTURES = {
    "salt": (salt(), "omat", 0, 0),
    "molecule": (ethanol(), "omol", 1, 2),
    "slab": (fcc111("Pt", (2, 2, 2), vacuum=8.0), "omat", 0, 0),
    "one atom, many images": (bulk("Al", a=3.2), "omat", 0, 0),
    "lone atom": (Atoms("He"), "omol", 0, 1),
    "two far atoms": (Atoms("ArAr", positions=[[0, 0, 0], [0, 0, 20]]), "omol", 0, 1),
}


def system(atoms: Atoms, task: str = "omat", charge: int = 0, spin: int = 0) -> System:
    return System.from_atoms(atoms, task, charge, spin, CUTOFF)


@pytest.fixture(scope="module")
def backends(standin):
    """Engines by (device, precision, plain), opened on first use."""
    checkpoint, opened = load_checkpoint(standin), {}

    def get(device="cpu", precision="float64", plain=True):
        key = (device, precision, plain)
        if key not in opened:
            opened[key] = FusedBackend(checkpoint, Settings(device=device, precision=precision), plain=plain)
        return opened[key]

    return get


@pytest.fixture(scope="module")
def of_the_ion(backends):
    """The ion's results from kernels by (device, precision), evaluated on first use."""

    @functools.cache
    def evaluated(device, precision):
        return backends(device, precision, plain=False).evaluate(system(ion(), "omol", 1, 2), ALL)

    return evaluated


@pytest.fixture(scope="module")
def general(standin):
    return GeneralBackend(load_checkpoint(standin), Settings(device="cpu", precision="float64", backend="general"))


def assert_equal(got: dict, want: dict, tolerance: float) -> None:
    scale = max(np.abs(want["forces"]).max(), 1.0)
    assert got["energy"] == pytest.approx(want["energy"], abs=tolerance * scale * len(want["energies"]))
    for name in ("energies", "forces", "stress"):
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("name", STRUCTURES)
def test_plain_form_equals_general_mode(backends, general, name):
    chosen = system(*STRUCTURES[name])
    assert_equal(backends().evaluate(chosen, ALL), general.evaluate(chosen, ALL), 1e-8)


@pytest.mark.parametrize("precision", FORCE_ERROR)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_equal_the_plain_form(backends, of_the_ion, device, precision):
    want = backends().evaluate(system(ion(), "omol", 1, 2), ALL)
    assert_equal(of_the_ion(device, precision), want, FORCE_ERROR[precision])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", FORCE_ERROR)
@pytest.mark.parametrize("name", STRUCTURES)
def test_kernels_equal_the_plain_form_on_every_structure(backends, name, precision):
    chosen = system(*STRUCTURES[name])
    got = backends("cuda", precision, plain=False).evaluate(chosen, ALL)
    assert_equal(got, backends().evaluate(chosen, ALL), FORCE_ERROR[precision])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", FORCE_ERROR)
def test_chunks_equal_one_piece(backends, standin, precision, monkeypatch):
    """Parts with recomputation give the same numbers, to the order of the sums over parts."""
    chosen = system(bulk("Cu", cubic=True) * (4, 4, 4))
    whole = backends("cuda", precision, plain=False).evaluate(chosen, ALL)
    monkeypatch.setattr("ase_fastuma.engine._CHUNK_EDGES", 3000)
    monkeypatch.setattr(FusedBackend, "_keep", lambda *_: Keep(False, False, False))
    parts = FusedBackend(load_checkpoint(standin), Settings(device="cuda", precision=precision)).evaluate(chosen, ALL)
    assert_equal(parts, whole, 1e-5 if precision != "float64" else 1e-12)


def test_a_card_that_others_have_filled(standin, monkeypatch):
    """A system in parts keeps nothing in memory that is not free, however large the card."""
    engine, free = FusedBackend(load_checkpoint(standin), Settings(device="cpu")), []
    engine._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1e15))
    monkeypatch.setattr("ase_fastuma.engine.free_memory", lambda _: free[-1])
    found = []
    for size in (1e15, 1e3):
        free.append(size)
        found.append(engine._keep(1_000_000))
    assert found == [Keep(True, True, True), Keep(False, False, False)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept_changes_nothing(standin, tmp_path, device, monkeypatch):
    path = standin if device == "cuda" else standin_module.write(tmp_path / "one_layer.pt", layers=1)
    checkpoint, settings = load_checkpoint(path), Settings(device=device, precision="accurate")
    whole = FusedBackend(checkpoint, settings).evaluate(system(ion(), "omol", 1, 2), ALL)
    for keep in (Keep(False, False, False), Keep(True, False, False), Keep(True, True, False)):
        monkeypatch.setattr(FusedBackend, "_keep", lambda *_, keep=keep: keep)
        parts = FusedBackend(checkpoint, settings).evaluate(system(ion(), "omol", 1, 2), ALL)
        for name in ALL:
            np.testing.assert_array_equal(parts[name], whole[name], err_msg=str(keep))


@pytest.mark.parametrize("options", [{"act_type": "s2"}, {"channels": 24}], ids=["s2", "24 channels"])
@pytest.mark.parametrize("device", DEVICES)
def test_other_architectures(tmp_path, device, options):
    """S2 activation, and channels that are no power of two."""
    checkpoint = load_checkpoint(standin_module.write(tmp_path / "other.pt", layers=1, **options))
    settings = Settings(device="cpu", precision="float64", backend="general")
    chosen = system(molecule("H2O"), "omol", 0, 1)
    want = GeneralBackend(checkpoint, settings).evaluate(chosen, ALL)
    assert_equal(FusedBackend(checkpoint, settings, plain=True).evaluate(chosen, ALL), want, 1e-8)
    for precision in ("float64", "accurate"):
        engine = FusedBackend(checkpoint, Settings(device=device, precision=precision))
        assert_equal(engine.evaluate(chosen, ALL), want, max(FORCE_ERROR[precision], 1e-8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, whose numpy sees the overflow
def test_the_next_safer_precision_where_range_ends(tmp_path, caplog, device, many):
    """Messages of some 1e25, whose squares are beyond float32: float64 answers, and the log says so."""
    content = standin_module.checkpoint(standin_module.model_config(layers=1))
    for name, weight in content.ema_state_dict.items():
        if ".so2_conv_2." in name:
            weight *= 1e25
    torch.save(content, tmp_path / "large.pt")
    checkpoint, chosen = load_checkpoint(tmp_path / "large.pt"), system(molecule("CO"), "omol", 0, 1)
    want = FusedBackend(checkpoint, Settings(device="cpu", precision="float64"), plain=True).evaluate(chosen, ALL)
    assert np.isfinite(want["energy"])
    engine = FusedBackend(checkpoint, Settings(device=device, precision="fast"))
    got = engine.evaluate_many([chosen], ALL)[0] if many else engine.evaluate(chosen, ALL)
    assert_equal(got, want, 1e-9)
    said = [record.getMessage() for record in caplog.records if record.name == "ase_fastuma.engine"]
    steps = [("fast", "accurate"), ("accurate", "float64")]
    assert said == [
        f"the output for 2 atoms is not finite in {a!r} precision; evaluating it again in {b!r}" for a, b in steps
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_bitwise_repeatable(backends, of_the_ion, device):
    engine = backends(device, "accurate", plain=False)
    for _ in range(4 if device == "cuda" else 1):  # run, record, replay
        again = engine.evaluate(system(ion(), "omol", 1, 2), ALL)
        for name in ALL:
            np.testing.assert_array_equal(again[name], of_the_ion(device, "accurate")[name])


def test_only_what_was_asked_for(backends):
    found = backends().evaluate(system(salt()), frozenset({"energy"}))
    assert set(found) == {"energy"}
    assert found["energy"] == pytest.approx(float(backends().evaluate(system(salt()), ALL)["energy"]), abs=1e-10)


def test_forces_are_the_derivative_of_the_energy(backends):
    atoms, step = ethanol(), 1e-4
    forces = backends().evaluate(system(atoms, "omol", 0, 1), ALL)["forces"]
    for atom, axis in ((0, 0), (2, 1), (5, 2)):
        energies = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[atom, axis] += sign * step
            energies.append(float(backends().evaluate(system(moved, "omol", 0, 1), frozenset({"energy"}))["energy"]))
        assert forces[atom, axis] == pytest.approx(-(energies[0] - energies[1]) / (2 * step), abs=1e-6)


def test_stress_is_the_derivative_of_the_energy(backends):
    atoms, step = salt(), 1e-5
    atoms.set_cell(
        atoms.cell.array @ (np.eye(3) + 0.05 * np.array([[0, 1, 2], [0, 0, 1], [0, 0, 0]])), scale_atoms=True
    )
    stress = backends().evaluate(system(atoms), ALL)["stress"]
    numeric = np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            for sign in (1, -1):
                strain = np.eye(3)
                strain[i, j] += sign * step / 2
                strain[j, i] += sign * step / 2
                strained = atoms.copy()
                strained.set_cell(atoms.cell.array @ strain, scale_atoms=True)
                energy = float(backends().evaluate(system(strained), frozenset({"energy"}))["energy"])
                numeric[i, j] += sign * energy / (2 * step * atoms.get_volume())
    np.testing.assert_allclose(full_3x3_to_voigt_6_stress(stress), full_3x3_to_voigt_6_stress(numeric), atol=1e-6)


def test_rotation_and_permutation(backends):
    atoms = ethanol()
    want = backends().evaluate(system(atoms, "omol", 0, 1), ALL)
    rng = np.random.default_rng(3)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    turn *= np.linalg.det(turn)
    order = rng.permutation(len(atoms))
    moved = atoms[order]
    moved.positions = moved.positions @ turn.T + 3.0
    got = backends().evaluate(system(moved, "omol", 0, 1), ALL)
    assert got["energy"] == pytest.approx(float(want["energy"]), abs=1e-9), turn
    np.testing.assert_allclose(got["forces"], want["forces"][order] @ turn.T, atol=1e-9, err_msg=str(turn))


def test_mirror_images_equal_general_mode(backends, general):
    """Reflection is no symmetry of this architecture (its SO(2) products are complex): both must break it alike."""
    atoms = ethanol()
    atoms.positions[:, 0] *= -1
    chosen = system(atoms, "omol", 0, 1)
    assert_equal(backends().evaluate(chosen, ALL), general.evaluate(chosen, ALL), 1e-8)


def test_supercells_and_images(backends):
    atoms = salt()
    want = backends().evaluate(system(atoms), ALL)
    double = backends().evaluate(system(atoms * (2, 1, 1)), ALL)
    assert double["energy"] == pytest.approx(2 * float(want["energy"]), abs=1e-9)
    np.testing.assert_allclose(double["forces"], np.tile(want["forces"], (2, 1)), atol=1e-9)
    moved = atoms.copy()
    moved.positions[3] += atoms.cell.array[0] - 2 * atoms.cell.array[2]
    np.testing.assert_allclose(backends().evaluate(system(moved), ALL)["forces"], want["forces"], atol=1e-9)


def test_alternating_compositions_reuse_merged_weights(backends, monkeypatch):
    engine = backends()
    first = {n: engine.evaluate(system(*STRUCTURES[n]), ALL) for n in ("salt", "slab")}
    monkeypatch.setattr(engine._networks, "_loaded", lambda: pytest.fail("weights were merged again"))
    for name in ("salt", "slab", "salt", "slab"):
        assert_equal(engine.evaluate(system(*STRUCTURES[name]), ALL), first[name], 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", FORCE_ERROR)
def test_torch_switches_neither_act_nor_change(backends, precision):
    engine, chosen = backends("cuda", precision, plain=False), system(salt())
    want = engine.evaluate(chosen, ALL)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.autocast("cuda", torch.bfloat16):
            got = engine.evaluate(chosen, ALL)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    # The library may sum float32 products of another number of rows in another order: some units in the last place.
    # TF32 or bfloat16 would show at 1e-3.
    assert_equal(got, want, 1e-5)


@pytest.mark.gpu
def test_replays_follow_the_edges(backends):
    """Edge counts that change from call to call, within a recording's room and beyond it, and structures in turn."""
    engine, rng = backends("cuda", "accurate", plain=False), np.random.default_rng(5)
    for round_ in range(6):
        for structure in (salt() * (2, 1, 1), bulk("Cu", cubic=True) * (2, 2, 2)):
            moved = structure.copy()
            moved.positions += rng.normal(scale=0.05, size=moved.positions.shape)
            moved.set_cell(moved.cell.array * (1 + 0.03 * (round_ % 3)), scale_atoms=True)
            assert_equal(
                engine.evaluate(system(moved), ALL), backends().evaluate(system(moved), ALL), FORCE_ERROR["accurate"]
            )
    assert any(entry.recordings for entry in engine._replays._entries.values()), "nothing was recorded"


def reserved() -> int:
    """Bytes of the GPU that torch cannot give back."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.gpu
def test_recordings_share_memory():
    """One that is no larger than one before takes no more memory; with a larger one those before it are forgotten."""
    forgotten, recordings = [], []

    def forget():
        forgotten.append(len(recordings))
        recordings.clear()

    def body(mebibytes):
        return torch.ones(mebibytes << 18, device="cuda").mean(dim=0, keepdim=True)

    pool, before = GraphPool(forget), reserved()
    for size in (64, 64, 56, 64, 48):
        recordings.append(pool.record(functools.partial(body, size), 1, size))
    assert reserved() - before < 100 << 20
    for size in range(72, 200, 8):
        recordings.append(pool.record(functools.partial(body, size), 1, size))
        assert recordings[-1].run().item() == pytest.approx(1.0, abs=1e-5)
    assert forgotten == [5, *(1,) * 15]
    assert reserved() - before < 300 << 20


@pytest.mark.gpu
def test_changing_structures_do_not_fill_the_device(standin):
    """A crystal that is pressed step by step and then to and fro, alone and in a pack, holds what one state needs."""
    pressed = [*np.geomspace(1.0, 0.8, 10), *np.random.default_rng(0).uniform(0.8, 1.0, 12)]

    def held(scales):
        engine, before = FusedBackend(load_checkpoint(standin), Settings(device="cuda", precision="fast")), reserved()
        for scale in scales:
            atoms = bulk("Cu", cubic=True) * (4, 4, 4)
            atoms.set_cell(atoms.cell.array * scale, scale_atoms=True)
            for _ in range(4):
                engine.evaluate(system(atoms), ALL)
                engine.evaluate_many([system(atoms), system(atoms[:-1])], ALL)
        return reserved() - before

    assert held(pressed) < 2 * held([0.8])


@pytest.mark.gpu
@pytest.mark.parametrize("num_cells", [(10, 15, 20), (20, 20, 20)], ids=["12000", "32000"])
def test_large_crystals_equal_small_ones(backends, num_cells):
    """12,000 and 32,000 atoms: offsets beyond 2^31, energies per atom as in a small crystal."""
    unit = bulk("Cu", cubic=True)
    small = backends("cuda", "accurate", plain=False).evaluate(system(unit * (4, 4, 4)), ALL)
    large = backends("cuda", "accurate", plain=False).evaluate(system(unit * num_cells), ALL)
    per_atom = float(small["energy"]) / 256
    assert float(large["energy"]) / (4 * np.prod(num_cells)) == pytest.approx(per_atom, abs=1e-5)
    np.testing.assert_allclose(large["stress"], small["stress"], atol=1e-5 * max(1.0, np.abs(small["stress"]).max()))
