"""Many structures in one call, against the calculator one at a time."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin as standin_module
import systems
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.singlepoint import SinglePointCalculator
from tolerances import SAME_STRUCTURE

from ase_fastuma import EvaluationError, FastUMACalculator, batch, evaluate, load_checkpoint
from ase_fastuma.engine import FusedBackend
from ase_fastuma.evaluation import Request, evaluate_packed
from ase_fastuma.general import GeneralBackend
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

pytestmark = pytest.mark.filterwarnings("ignore:the energy of an isolated atom is an extrapolation:UserWarning")


def varied() -> list[Atoms]:
    """Structures that differ in size, elements, cell, periodicity, charge and spin, a lone atom in their midst."""
    ion = systems.water()
    ion.info |= {"charge": -1, "spin": 2}
    small = bulk("Al", a=2.6)
    return [systems.nacl(), systems.water(), systems.slab(), Atoms("He"), ion, systems.copper(), small]


def single(atoms: Atoms, calc: FastUMACalculator) -> dict[str, Any]:
    atoms = atoms.copy()
    calc.calculate(atoms)
    return calc.results


def assert_same(results: Sequence[dict], expected: Sequence[dict], precision: str = "float64") -> None:
    """Every result has what was expected of it, to the mode's noise."""
    tolerance = SAME_STRUCTURE[precision]
    assert len(results) == len(expected)
    for mine, other in zip(results, expected, strict=True):
        for name, value in mine.items():
            atol = tolerance.get(name, tolerance["energy"]) * (np.size(mine["forces"]) // 3 if "energy" in name else 1)
            np.testing.assert_allclose(value, other[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("precision", ["float64", "accurate"])
def test_equal_to_single_evaluations(make: Callable, precision: str) -> None:
    calc = make(precision=precision)
    structures = varied()
    expected = [copy.deepcopy(single(atoms, calc)) for atoms in structures]
    results = evaluate(structures, calc, properties=["energy", "energies", "forces", "stress"])
    assert_same(results, expected, "mixed" if precision == "accurate" else precision)
    assert [result.keys() for result in results] == [result.keys() for result in expected]
    assert np.ptp([result["energy"] for result in results]) > 1


def test_fused_network_gives_the_same(standin: Path) -> None:
    """The fused backend in its plain form, which runs anywhere, behind the same interface."""
    calc = FastUMACalculator(standin, device="cpu", precision="float64")
    requests = [calc._request(atoms, *calc._state(atoms)) for atoms in varied()]
    fused = FusedBackend(calc.checkpoint, Settings(device="cpu", precision="float64"), plain=True)
    results = list(evaluate_packed(fused, requests))
    assert_same(results, evaluate(varied(), calc, properties=["energy", "energies", "forces", "stress"]))


def test_demo_in_one_call(make: Callable) -> None:
    calc = make("demo")
    structures = [systems.copper(), systems.water(), bulk("Al", a=4.1), systems.slab()]
    assert_same(evaluate(structures, calc), [single(atoms, calc) for atoms in structures], "accurate")


def test_results_own_their_memory_and_suit_ase(make: Callable) -> None:
    structures = [systems.copper(), systems.copper()]
    first, second = evaluate(structures, make(), properties=["forces", "free_energy", "stress"])
    assert first.keys() == {"energy", "free_energy", "forces", "stress"}
    assert type(first["energy"]) is float
    for name, shape in (("forces", (4, 3)), ("stress", (6,))):
        assert first[name].shape == shape
        assert first[name].dtype == np.float64
        assert first[name].flags.c_contiguous
        assert not np.shares_memory(first[name], second[name])
    atoms = structures[0]
    atoms.calc = SinglePointCalculator(atoms, **first)
    assert atoms.get_potential_energy() == first["energy"]
    np.testing.assert_array_equal(atoms.get_stress(), first["stress"])


def test_any_iterable_in_order_left_as_it_was(make: Callable) -> None:
    calc = make(precision="float64")
    structures = [*varied(), systems.copper(), systems.water()]
    before = copy.deepcopy(structures)
    results = evaluate(structures, calc)
    assert structures == before
    assert [repr(atoms.info) for atoms in structures] == [repr(atoms.info) for atoms in before]
    assert_same(evaluate((atoms for atoms in structures), calc), results)
    assert_same(evaluate(tuple(reversed(structures)), calc), results[::-1])  # however it was packed
    assert_same(results[-2:], [results[5], results[1]])  # duplicates
    assert evaluate([], calc) == []
    assert evaluate(iter(()), calc) == []


def test_a_generator_may_move_one_structure_on(make: Callable) -> None:
    def steps() -> Iterator[Atoms]:
        atoms = systems.water()
        for charge in (0, 1):
            atoms.rattle(0.05, seed=charge)
            atoms.info |= {"charge": charge, "spin": charge + 1}
            yield atoms

    calc = make(precision="float64")
    results = evaluate(steps(), calc)
    assert_same(results, [copy.deepcopy(single(atoms, calc)) for atoms in steps()])
    assert abs(results[0]["energy"] - results[1]["energy"]) > 1e-3


def test_a_generator_is_drawn_from_as_needed(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calc = FastUMACalculator(standin, device="cpu")
    drawn, passes = [], []
    original = GeneralBackend.evaluate_many

    def watched(self: Any, systems: Any, properties: Any) -> Any:
        passes.append((len(drawn), len(systems)))
        return original(self, systems, properties)

    def structures() -> Iterator[Atoms]:
        for i in range(7):
            drawn.append(i)
            yield systems.copper()

    monkeypatch.setattr(GeneralBackend, "evaluate_many", watched)
    monkeypatch.setattr(batch, "_BLOCK", 2)
    size = calc._start().backend.footprint(calc._request(systems.copper(), "omat", 0, 0).system)
    monkeypatch.setattr(GeneralBackend, "capacity", lambda _: 3.5 * size)
    evaluate(structures(), calc)
    assert passes == [(4, 3), (7, 3), (7, 1)]


def test_tasks_one_by_one(make: Callable) -> None:
    structures = [systems.copper(), systems.copper(), systems.water(), systems.water()]
    results = evaluate(structures, make(precision="float64"), tasks=["omol", None, "omat", None])
    for atoms, task, result in zip(structures, ["omol", "omat", "omat", "omol"], results, strict=True):
        assert_same([result], [single(atoms, make(precision="float64", task=task))])
    assert abs(results[0]["energy"] - results[1]["energy"]) > 1e-3


def test_settings_of_the_calculator_hold_for_all(make: Callable) -> None:
    calc = make(task="omol", charge=1, spin=2, precision="float64")
    structures = [systems.copper(), systems.water()]
    assert_same(evaluate(structures, calc), [single(atoms, calc) for atoms in structures])


def test_a_model_in_place_of_a_calculator(standin: Path) -> None:
    calc = FastUMACalculator(standin)
    for model in (standin, str(standin)):
        assert_same(evaluate([systems.water()], model), [single(systems.water(), calc)], "accurate")


def broken() -> dict[int, tuple[Atoms, type[Exception], str]]:
    """Structures that cannot be evaluated, by the index at which `with_broken` has them."""
    coincident, infinite, charged = systems.copper(), systems.nacl(), systems.water()
    coincident.positions[2] = coincident.positions[1]
    infinite.positions[3, 1] = np.inf
    charged.info["charge"] = 0.5
    return {
        1: (coincident, ValueError, "atoms 1 and 2 coincide"),
        2: (infinite, ValueError, "got NaN or infinity for atoms 3"),
        4: (Atoms(), ValueError, "expected at least one atom"),
        5: (charged, ValueError, r"charge: expected an integer, got 0\.5"),
    }


def with_broken() -> list[Atoms]:
    good, bad = iter(varied()), broken()
    return [bad[i][0] if i in bad else next(good) for i in range(len(varied()) + len(bad))]


def test_errors_by_index(make: Callable) -> None:
    calc = make(precision="float64")
    expected = evaluate(varied(), calc)
    with pytest.raises(EvaluationError, match="4 of 11 structures could not be evaluated, by index 1: ") as caught:
        evaluate(with_broken(), calc)
    for index, (_, kind, message) in broken().items():
        assert isinstance(caught.value.errors[index], kind)
        with pytest.raises(kind, match=message):
            raise caught.value.errors[index]
    assert_same([result for result in caught.value.results if result is not None], expected)
    assert [i for i, result in enumerate(caught.value.results) if result is None] == list(broken())

    results = evaluate(with_broken(), calc, errors="return")
    assert [i for i, result in enumerate(results) if isinstance(result, Exception)] == list(broken())
    assert_same([result for result in results if isinstance(result, dict)], expected)


def test_the_error_is_a_group(make: Callable) -> None:
    with pytest.raises(EvaluationError) as caught:
        evaluate([Atoms(), systems.water(), Atoms("X")], make())
    assert list(caught.value.errors.values()) == list(caught.value.exceptions)
    matching, rest = caught.value.split(lambda error: str(error).startswith("numbers:"))
    assert [str(error)[:8] for part in (matching, rest) for error in part.exceptions] == ["numbers:", "atoms: e"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.errors.keys() == caught.value.errors.keys()
    assert again.results[1]["energy"] == caught.value.results[1]["energy"]


def test_output_that_is_not_finite(make: Callable, tmp_path: Path) -> None:
    content = standin_module.checkpoint(standin_module.model_config())
    content.ema_state_dict["module.backbone.sphere_embedding.weight"][29] = np.nan
    torch.save(content, tmp_path / "broken.pt")
    results = evaluate(
        [systems.nacl(), systems.copper(), systems.water()], make(tmp_path / "broken.pt"), errors="return"
    )
    assert [type(result) for result in results] == [dict, FloatingPointError, dict]


def test_what_a_structure_does_not_have(make: Callable, tmp_path: Path) -> None:
    results = evaluate([systems.water(), systems.copper(), systems.slab()], make(), properties=["stress"])
    assert [result.keys() for result in results] == [set(), {"stress"}, set()]
    path = standin_module.write_esen(tmp_path / "direct.pt", direct=True)
    calc = FastUMACalculator(path, device="cpu", backend="general")
    outcomes = evaluate([systems.copper(), systems.water()], calc, properties=["forces", "stress"], errors="return")
    assert isinstance(outcomes[0], PropertyNotImplementedError)
    np.testing.assert_allclose(outcomes[1]["forces"], single(systems.water(), calc)["forces"], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"structures": systems.water()},
            TypeError,
            "structures: expected an iterable of structures, got a single one",
        ),
        ({"properties": "energy"}, TypeError, "properties: expected a sequence of names, got the string 'energy'"),
        (
            {"properties": ["energy", "dipole"]},
            ValueError,
            r"properties: expected some of .* got \['energy', 'dipole'\]",
        ),
        ({"properties": []}, ValueError, "properties: expected some of"),
        ({"errors": "ignore"}, ValueError, "errors: expected 'raise' or 'return', got 'ignore'"),
        ({"tasks": ["omol", "omol"]}, ValueError, "tasks: expected one for each of 1 structures, got 2"),
        ({"structures": iter([]), "tasks": ["omol"]}, ValueError, "tasks: expected one for each structure, got more"),
        ({"structures": None}, TypeError, "structures: expected an iterable of structures, got NoneType"),
    ],
)
def test_arguments_are_checked(standin: Path, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate(**({"structures": [systems.water()], "calculator": standin} | arguments))


def test_entries_are_checked(standin: Path) -> None:
    outcomes = evaluate(["H2O", systems.water()], standin, errors="return", tasks=[None, "oc20"])
    assert str(outcomes[0]) == "structures: expected ase.Atoms, got 'H2O'"
    assert str(outcomes[1]) == "task: expected one of ['omat', 'omol'], got 'oc20'"


def test_progress_is_shown_where_wanted(standin: Path, capsys: pytest.CaptureFixture) -> None:
    structures = [systems.water()] * 3
    evaluate(structures, standin)
    evaluate(structures, standin, progress=False)
    assert capsys.readouterr().err == ""
    evaluate(structures, standin, progress=True)
    assert "3/3" in capsys.readouterr().err
    evaluate(iter(structures), standin, progress=True)
    assert "3structure" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- memory


def requests(number: int) -> list[Request]:
    wanted = frozenset({"energy", "forces"})
    structures = [systems.copper() * (1, 1, 1 + i % 3) for i in range(number)]
    return [Request(System.from_atoms(atoms, "omat", 0, 0, 5.0), wanted, atoms.cell.volume) for atoms in structures]


class Small(GeneralBackend):
    """The general backend on a device that holds so many atoms in a pass, whatever it estimates."""

    most = 12

    def __init__(self, standin: Path) -> None:
        super().__init__(load_checkpoint(standin), Settings(device="cpu", precision="float64"))
        self.passes: list[int] = []

    def evaluate_many(self, systems: Any, properties: Any) -> Any:
        self.passes.append(sum(len(system.numbers) for system in systems))
        if self.passes[-1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().evaluate_many(systems, properties)


def test_passes_that_do_not_fit_are_split(standin: Path) -> None:
    backend, work = Small(standin), requests(9)
    expected = [request.results(backend.evaluate(request.system, request.properties)) for request in work]
    backend.passes.clear()
    assert_same(list(evaluate_packed(backend, work)), expected)
    assert max(backend.passes) == 72
    done = [atoms for atoms in backend.passes if atoms <= Small.most]
    assert sum(done) == 72  # nothing is evaluated twice


def test_arrays_that_do_not_fit_are_refused_and_harm_no_other(standin: Path) -> None:
    calc, good = FastUMACalculator(standin, device="cpu"), systems.triclinic()
    (expected,) = evaluate([good], calc)
    short, long, fractional, flat = (systems.copper() for _ in range(4))
    short.arrays["positions"] = short.positions[:3]
    long.arrays["positions"] = np.concatenate([long.positions, [[9.0, 9.0, 9.0]]])
    fractional.arrays["numbers"] = np.array([29, np.nan, 29.9, 29])
    flat.arrays["positions"] = flat.positions[:, :2]
    outcomes = evaluate([short, good, long, good, fractional, good, flat, good], calc, errors="return")
    assert str(outcomes[0]) == "numbers: expected one for each of 3 positions, got [4]"
    assert str(outcomes[2]) == "numbers: expected one for each of 5 positions, got [4]"
    assert str(outcomes[4]) == "numbers: expected integers, got [nan, 29.9]"
    assert str(outcomes[6]) == "positions: expected shape [N, 3], got [4, 2]"
    for outcome in outcomes[1::2]:
        assert outcome["energy"] == pytest.approx(
            expected["energy"], abs=len(good) * SAME_STRUCTURE["accurate"]["energy"]
        )


def test_a_generator_with_too_few_tasks_loses_nothing(standin: Path) -> None:
    outcomes = evaluate((systems.water() for _ in range(3)), standin, tasks=["omol", None], errors="return")
    assert str(outcomes[2]) == "tasks: expected one for each structure, got none for this one"
    assert outcomes[0]["energy"] == outcomes[1]["energy"]


MEMORY = """
import resource, sys, numpy as np
from ase.build import bulk
from ase_fastuma import FastUMACalculator, evaluate

calc = FastUMACalculator(sys.argv[1], device="cpu")
small, large = bulk("NaCl", "rocksalt", a=5.6), bulk("Cu", cubic=True) * 16
(before,) = evaluate([small], calc)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
first, failed, last = evaluate([small, large, small], calc, errors="return")
assert isinstance(failed, MemoryError) and str(failed).startswith("out of memory for 16384 atoms"), repr(failed)
for found in (first, last):
    np.testing.assert_allclose(found["energy"], before["energy"], rtol=1e-6)
large.calc = calc
try:
    large.get_potential_energy()
except MemoryError as error:
    assert calc.results == {} and str(error).startswith("out of memory for 16384 atoms")
else:
    raise AssertionError("expected a MemoryError")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's memory is Linux's")
def test_memory_of_the_host_that_runs_out(standin: Path) -> None:
    """Torch's allocator on the CPU has an error of its own for it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-c", MEMORY, str(standin)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_later_passes_are_smaller(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, work = Small(standin), requests(1) * 24
    monkeypatch.setattr(backend, "capacity", lambda: 6.5 * backend.footprint(work[0].system))
    assert len(list(evaluate_packed(backend, work))) == 24
    assert backend.passes[0] == 24
    assert max(backend.passes[3:]) == 12


def test_a_structure_too_large_on_its_own(standin: Path) -> None:
    backend = Small(standin)
    big = systems.copper() * (2, 2, 1)
    work = [*requests(2), Request(System.from_atoms(big, "omat", 0, 0, 5.0), frozenset({"energy"}), 1.0), *requests(2)]
    outcomes = list(evaluate_packed(backend, work))
    assert str(outcomes[2]).startswith("out of memory for 16 atoms")
    assert outcomes[2].__traceback__ is None  # which would hold the memory of the failed pass
    assert_same([outcomes[0], outcomes[1]], [outcomes[3], outcomes[4]])


def test_results_do_not_depend_on_the_size_of_passes(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calc = FastUMACalculator(standin, device="cpu", precision="float64")
    together = evaluate(varied(), calc)
    monkeypatch.setattr(GeneralBackend, "capacity", lambda _: 0)
    assert_same(evaluate(varied(), calc), together)


def test_estimated_memory(standin: Path) -> None:
    """The estimate is for large crystals what torch allocates, within a quarter."""
    from torch.profiler import ProfilerActivity, profile

    backend = GeneralBackend(load_checkpoint(standin), Settings(device="cpu"))
    atoms = bulk("Cu", cubic=True) * 3
    atoms.rattle(0.05)
    system = System.from_atoms(atoms, "omat", 0, 0, 5.0)
    wanted = frozenset({"energy", "forces"})
    backend.evaluate(system, wanted)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        backend.evaluate(system, wanted)
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    peak = np.cumsum([size for _, size in events]).max()
    assert backend.footprint(system) == pytest.approx(peak, rel=0.25)


def test_estimated_edges() -> None:
    from ase.neighborlist import neighbor_list

    wire = Atoms("Au", cell=[0, 0, 2.5], pbc=[False, False, True])
    for atoms, low, high in (
        (bulk("Cu", cubic=True) * 2, 0.9, 1.1),
        (bulk("Al", a=2.2), 0.9, 1.1),
        (systems.slab() * (2, 2, 1), 0.9, 1.3),
        (wire, 0.9, 2.0),
        (molecule("C60"), 0.9, 1.5),
        (systems.water(), 1.0, 1.0),
        (Atoms("He"), 0.0, 0.0),
    ):
        system = System.from_atoms(atoms, "omat", 0, 0, 5.0)
        true = len(neighbor_list("i", Atoms(system.numbers, system.positions, cell=system.cell, pbc=system.pbc), 5.0))
        assert low * true <= system.estimated_edges(5.0) <= high * true, atoms


@pytest.mark.gpu
def test_out_of_memory_on_a_device(make: Callable) -> None:
    """With memory for a few structures at a time, the same numbers."""
    structures = [systems.copper() * (4, 4, 2 + i % 2) for i in range(12)]
    calc = make(precision="float64", device="cuda:0")
    expected = evaluate(structures, calc)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    evaluate(structures[1:2], calc)
    one = torch.cuda.max_memory_allocated(0) - before
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + 4 * one) / total, 0)
    try:
        assert_same(evaluate(structures, calc), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_import_stays_light() -> None:
    script = "import sys, json, ase_fastuma; print(json.dumps([m in sys.modules for m in ('torch', 'tqdm')]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False]


def test_what_systems_share_takes_room_once(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, work = Small(standin), requests(1) * 3 + [requests(2)[1]] * 3
    own = [backend.footprint(request.system) for request in work]
    monkeypatch.setattr(Small, "most", 100)
    monkeypatch.setattr(backend, "shared_footprint", lambda system: (len(system.numbers), 10 * own[0]))
    monkeypatch.setattr(backend, "capacity", lambda: 1.01 * (sum(own[:4]) + 20 * own[0]))
    assert len(list(evaluate_packed(backend, work))) == 6
    assert backend.passes == [3 * 4 + 8, 2 * 8]
