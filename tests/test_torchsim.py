"""TorchSim's states through our backends: against the calculator, TorchSim's own checks, and dynamics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from devices import DEVICES, waits_counted
from tolerances import SAME_STRUCTURE

from ase_fastuma import FastUMACalculator, repeats, resident
from ase_fastuma.engine import FusedBackend
from ase_fastuma.replay import GraphPool
from ase_fastuma.selection import Selection

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


def assert_equal(
    results: dict[str, torch.Tensor], structures: Sequence[Atoms], calc: FastUMACalculator, precision: str
) -> None:
    """Each system of a state as if it were alone."""
    tolerance, first = SAME_STRUCTURE[precision], 0
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
    tested, calc = model(precision=precision), make(precision=precision)
    tolerance = "mixed" if precision == "accurate" else precision
    assert_equal(tested(state_of(structures, tested)), structures, calc, tolerance)


@pytest.mark.skipif(not NEW, reason="in TorchSim 0.3 all axes are periodic, or none")
def test_mixed_periodicity(make: Callable, model: Callable) -> None:
    tilted = systems.slab()
    tilted.cell[2] = [1.0, 2.0, 30.0]
    tested, slabs = model(precision="float64"), [systems.slab(), tilted]
    assert_equal(tested(state_of(slabs, tested)), slabs, make(precision="float64"), "float64")


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

    for steps in (1, 8, 16, 24):  # of one trajectory
        torch.manual_seed(1)
        start = state_of([systems.copper(), systems.nacl()], moving)
        if NEW:
            start.rng = 1
        end = ts.integrate(start, moving, integrator=NVE, n_steps=steps, temperature=900, timestep=0.001)
        energies.append((end.energy, total(end)))
    exchanged, drifted = (torch.stack(values).aminmax(dim=0) for values in zip(*energies, strict=True))
    exchanged, drifted = exchanged.max - exchanged.min, drifted.max - drifted.min
    assert (exchanged > 1e-2).all()
    assert (drifted < 0.02 * exchanged).all()


def test_batches_of_torchsim(model: Callable) -> None:
    """Its autobatcher packs systems into passes of its own, which changes nothing."""
    tested, structures = model(precision="float64"), crystals()
    whole = tested(state_of(structures, tested))
    batcher = ts.BinningAutoBatcher(tested, memory_scales_with="n_atoms", max_memory_scaler=9)
    found = ts.static(structures, tested, autobatcher=batcher)
    assert len(batcher.batched_states) > 1
    torch.testing.assert_close(torch.cat([f["potential_energy"] for f in found]), whole["energy"], rtol=0, atol=1e-8)
    torch.testing.assert_close(torch.cat([f["forces"] for f in found]), whole["forces"], rtol=0, atol=1e-8)


# ------------------------------------------------------------------------------------------------------- on the device


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, since kernels are interpreted."""
    return standin_module.write(tmp_path_factory.mktemp("torchsim") / "one_layer.pt", layers=1)


def fused_model(path: Path, device: str) -> FastUMAModel:
    """A model on the fused backend, whose kernels are interpreted on the CPU."""
    calc = FastUMACalculator(path, device=device)
    running = calc._start()
    backend = FusedBackend(running.checkpoint, running.settings)
    calc._running = running._replace(selection=Selection("fused", ("a test",)), backend=backend)
    return FastUMAModel(calc, compute_stress=True)


@pytest.fixture(params=DEVICES)
def fused(request: pytest.FixtureRequest, one_layer: Path) -> FastUMAModel:
    return fused_model(one_layer, request.param)


@pytest.fixture
def oracle(one_layer: Path) -> FastUMACalculator:
    return FastUMACalculator(one_layer, device="cpu", precision="float64")


@pytest.fixture
def watched(fused: FastUMAModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model did but for evaluating: "host" for the way through the host, "atoms" for looking at them anew."""
    done: list[str] = []
    for name, said in (("_evaluate_on_host", "host"), ("_requests", "atoms")):
        original = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, original=original, said=said: (done.append(said), original(*a))[1])
    return done


def test_molecules_on_the_device(fused: FastUMAModel, oracle: FastUMACalculator, watched: list[str]) -> None:
    """Mixtures in turn, a lone atom in their midst, which becomes another in place."""
    molecules = [molecule("OH"), Atoms("He"), molecule("OH")]
    state = state_of(molecules, fused)
    assert_equal(fused(state), molecules, oracle, "accurate")
    assert watched == ["atoms"]
    state.atomic_numbers[2] = 10
    assert_equal(fused(state), [molecules[0], Atoms("Ne"), molecules[2]], oracle, "accurate")


def test_crystals_that_move_on_the_device(fused: FastUMAModel, oracle: FastUMACalculator, watched: list[str]) -> None:
    """Positions and cells change, in new tensors and in place; nothing else is looked up again."""
    crystals = [
        Atoms("Al", cell=[9, 8, 4.5], pbc=True),
        Atoms("LiF", positions=[[0, 0, 0], [5.5, 0, 0]], cell=[12, 9, 6], pbc=True),
    ]
    state = state_of(crystals, fused)
    fused(state)
    state.positions = state.positions + torch.tensor([0.3, -7.0, 0.0], dtype=fused.dtype, device=fused.device)
    state.positions[2] += torch.tensor([-3.8, 0.2, 12.3], dtype=fused.dtype, device=fused.device)
    state.cell[1, :, 2] *= 0.8
    for atoms in crystals:
        atoms.positions += [0.3, -7.0, 0.0]
    crystals[1].positions[1] += [-3.8, 0.2, 12.3]
    crystals[1].cell[2] *= 0.8
    assert_equal(fused(state), crystals, oracle, "accurate")
    assert watched == ["atoms"]


def test_faults_on_the_device(fused: FastUMAModel, watched: list[str]) -> None:
    """Positions that cannot be meant are named, whenever they come."""
    structures = [Atoms("He"), Atoms("HeNe", positions=[[0, 0, 0], [6, 0, 0]])]
    state = state_of(structures, fused)
    good = fused(state)["energy"]
    state.positions[2] = state.positions[1]
    for _ in range(2):
        with pytest.raises(ValueError, match="atoms 0 and 1 coincide") as caught:
            fused(state)
        assert caught.value.__notes__ == ["system 1 of the state"]
    state.positions[2] = torch.nan
    with pytest.raises(ValueError, match="got NaN or infinity for atoms 1"):
        fused(state)
    state.positions[2] = torch.tensor([6.0, 0.0, 0.0])
    assert torch.equal(fused(state)["energy"], good)
    assert watched.count("host") == 3


@pytest.fixture
def recorded(fused: FastUMAModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is recorded and replayed: at once, with room for two more edges, and on the CPU without a CUDA graph."""
    done: list[str] = []
    original = GraphPool.record if fused.device.type == "cuda" else lambda _, body, *size: SimpleNamespace(run=body)

    def record(pool: GraphPool, body: Callable[[], torch.Tensor], *size: int) -> Any:
        done.append("record")
        graph = original(pool, body, *size)
        return SimpleNamespace(run=lambda: (done.append("replay"), graph.run())[1])

    monkeypatch.setattr(GraphPool, "record", record)
    monkeypatch.setattr(resident, "_PATIENCE", 0)
    monkeypatch.setattr(repeats, "capacity", lambda num_edges: num_edges + 2)
    monkeypatch.setattr(repeats, "spare", lambda num_edges: 2)
    monkeypatch.setattr(FusedBackend, "recordable", lambda *_: True)
    return done


def test_recorded_passes(fused: FastUMAModel, recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing were recorded, bit by bit: with other edges, in another cell, past the room, and after a fault."""
    pair = Atoms("HeNe", positions=[[0, 0, 0], [4, 0, 0]], cell=[20, 20, 9], pbc=True)
    state = state_of([pair, Atoms("He", cell=[20, 20, 9], pbc=True)], fused)

    def compare(wanted: list[str]) -> None:
        del recorded[:]
        results = fused(state)
        assert recorded == wanted
        with monkeypatch.context() as patch:
            patch.setattr(resident, "_PATIENCE", 99)
            for name, value in FastUMAModel(fused.calculator, compute_stress=True)(state).items():
                assert torch.equal(value, results[name]), name

    fused(state)
    assert recorded == ["record"]
    state.positions[1, 1] = 1.0
    state.cell[1, 2, 2] = 4.5  # two edges to images along z: as many as there is room for
    compare(["replay"])
    if fused.device.type == "cpu":
        return  # the interpreter is slow
    state.cell[0, 2, 2] = 4.5
    compare(["replay", "record"])
    good = state.positions[1].clone()
    state.positions[1] = state.positions[0]
    with pytest.raises(ValueError, match="atoms 0 and 1 coincide"):
        fused(state)
    state.positions[1] = good
    compare(["record"])
    state.positions[1, 0] = 9.0  # fewer edges
    compare(["replay"])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["accurate", "fast", "float32", "float64"])
def test_dynamics_on_a_gpu(standin: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps wait for the device once, at their end, and give what steps give that are not recorded."""
    ends, waits = [], []
    for patience in (3, 99):
        monkeypatch.setattr(resident, "_PATIENCE", patience)
        moving = FastUMAModel(standin, device="cuda", precision=precision, compute_stress=True)
        state = state_of([systems.copper(), systems.copper() * (2, 1, 1), systems.copper()], moving)
        for step in range(12):
            watched = waits_counted() if step > 8 and patience == 3 else nullcontext(())
            with watched as waited:
                results = moving(state)
            waits += [step] * len(waited)
            state.positions = state.positions + 0.01 * results["forces"]
        ends.append(results)
        assert bool(moving._resident._repeated._recordings) == (patience == 3)
    assert waits == [9, 10, 11]
    for name, value in ends[0].items():
        tolerance = 1e-4 if precision == "fast" else 1e-6
        if precision == "float32":  # the library sums products of another number of rows (spare edges) in another order
            tolerance = SAME_STRUCTURE["accurate"][name] * (8 if name == "energy" else 1)  # atoms
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, whose numpy sees the overflow
def test_range_ends_on_the_device(tmp_path: Path, device: str) -> None:
    """Messages beyond float32: the next safer precisions answer, as for a calculator."""
    content = standin_module.checkpoint(standin_module.model_config(layers=1))
    for name, weight in content.ema_state_dict.items():
        if ".so2_conv_2." in name:
            weight *= 1e25
    torch.save(content, tmp_path / "large.pt")
    model = fused_model(tmp_path / "large.pt", device)
    hydrogen = Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.8]])
    found = model(state_of([hydrogen], model))
    calc = FastUMACalculator(tmp_path / "large.pt", device="cpu", precision="float64")
    assert float(found["energy"]) == pytest.approx(calc.get_potential_energy(hydrogen), rel=1e-6)
