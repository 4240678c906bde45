"""Datasets on the workers of a local Ray cluster: losses on the way, files in and out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import systems
from ase import Atoms
from ase.build import bulk
from ase.db import connect
from ase.io import Trajectory, read, write
from tolerances import SAME_STRUCTURE

pytest.importorskip("ray")

from ase_fastuma import FastUMACalculator, Settings, evaluate
from ase_fastuma.ray import (
    CONVERGED,
    ERROR,
    Relaxation,
    _claim,
    _ExtendedXYZ,
    _Job,
    _join,
    _open,
    _part,
    _Worker,
    evaluate_dataset,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "screen_dataset.py"


def dataset() -> list[Atoms]:
    """Numbered structures, one of them impossible, heavy enough that killing a worker hits it at work."""
    structures = []
    for i in range(32):
        atoms = bulk("Cu", cubic=True) * (2, 2, 2) if i % 2 else systems.water()
        if i % 4 == 2:
            atoms = bulk("Au", cubic=True)
            atoms.symbols[: i // 4 % 2] = "Cu"
        atoms.rattle(0.05, seed=i)
        atoms.info = {"number": i, "weights": np.arange(3.0)}
        structures.append(atoms)
    structures[9].positions[1] = structures[9].positions[0]
    return structures


def gain(structures: list[Atoms], alloy: str) -> float:
    """The lowest energy of an alloy (meV/atom) above that of its metals' lowest."""

    def lowest(formula: str) -> float:
        chosen = [atoms for atoms in structures if ERROR not in atoms.info and str(atoms.symbols) == formula]
        return min(atoms.get_potential_energy() / len(atoms) for atoms in chosen)

    return 1e3 * (lowest(alloy) - lowest("Cu32") / 4 - 3 * lowest("Au4") / 4)


def workers_of(driver: subprocess.Popen) -> list[int]:
    """Process ids of the actors that a driver's cluster runs."""
    parents, actors = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"_Worker" in (folder / "cmdline").read_bytes().split(b"\0")[0]:
                actors.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile

    def descends(pid: int) -> bool:
        return pid == driver.pid or (pid in parents and descends(parents[pid]))

    return [pid for pid in actors if descends(pid)]


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen) -> None:
    end = time.monotonic() + 300  # two cores may be busy with more than this
    while not condition():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_workers_and_runs_that_are_killed(tmp_path: Path) -> None:
    source, destination = tmp_path / "in.extxyz", tmp_path / "out.extxyz"
    write(source, dataset(), format="extxyz")
    command = [sys.executable, str(EXAMPLE), str(source), str(destination), "--no-relaxation"]
    command += ["--block-size", "2", "--workers", "2", "--device", "cpu"]
    parts = destination.with_name("out.extxyz.parts")

    def finished() -> list[Path]:
        return sorted(parts.glob("*.traj"))

    # The first run loses one of its two workers, goes on, and is then stopped.
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    try:
        wait_for(lambda: len(finished()) >= 2, driver)
        victim = workers_of(driver)[0]
        os.kill(victim, signal.SIGKILL)
        before = len(finished())
        wait_for(lambda: len(finished()) >= before + 3, driver)
        assert victim not in workers_of(driver)
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert not destination.exists()
    kept = finished()
    assert 5 <= len(kept) < 16

    # What is finished is not done again: a mark made in it now is in the end result.
    with Trajectory(kept[1]) as trajectory:
        marked = list(trajectory)
    marked[0].info["mark"] = 1
    write(kept[1], marked)
    job = _Job(str(source), Settings("demo", device="cpu"), ("energy", "forces", "stress"), None)
    work(job, parts, 2)  # the rest without a cluster, to spare the time of starting one
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert not parts.exists()

    results = read(destination, ":")
    assert [atoms.info["number"] for atoms in results] == list(range(32))
    assert [i for i, atoms in enumerate(results) if "mark" in atoms.info] == [int(kept[1].stem)]
    assert [i for i, atoms in enumerate(results) if ERROR in atoms.info] == [9]
    assert re.search(r"^structures +32, of which 1 failed$", done.stdout, re.MULTILINE)
    (printed,) = re.findall(r"^Au3Cu +([-+.\d]+) meV/atom", done.stdout, re.MULTILINE)[:1]
    assert float(printed) == pytest.approx(gain(results, "CuAu3"), abs=0.051)
    expected = evaluate(dataset(), FastUMACalculator("demo", device="cpu"), errors="return")
    for i in set(range(32)) - {9}:
        np.testing.assert_array_equal(results[i].info["weights"], np.arange(3.0))
        energy = pytest.approx(expected[i]["energy"], abs=len(results[i]) * SAME_STRUCTURE["accurate"]["energy"])
        assert results[i].get_potential_energy() == energy
        np.testing.assert_allclose(results[i].get_forces(), expected[i]["forces"], atol=2e-5)


# What workers do, without a cluster.


def work(job: _Job, parts: Path, block_size: int) -> list[Path]:
    """Have one worker do all blocks, some of which may be done; the parts."""
    _claim(parts, job, block_size)
    blocks = list(_open(Path(job.source)).blocks(block_size))
    worker = _Worker(job, parts)
    for block in blocks:
        rows = {name: np.array([value]) for name, value in vars(block).items()}
        assert worker(rows)["structures"].tolist() == [block.stop - block.start]
    return [_part(parts, block) for block in blocks]


@pytest.mark.parametrize("suffix", [".db", ".xyz"])
def test_database_in(standin: Path, tmp_path: Path, suffix: str) -> None:
    structures = [systems.water(), systems.copper(), Atoms("X2"), systems.slab(), systems.nacl()]
    with connect(tmp_path / "in.db") as database:
        for i, atoms in enumerate(structures):
            database.write(atoms, {"label": f"row {i}"}, data={"spin": 1 if i == 0 else 0, "list": [1, 2]})
        database.write(systems.copper())
        del database[4]  # row numbers have holes
    job = _Job(str(tmp_path / "in.db"), Settings(str(standin), device="cpu"), ("energy", "forces"), None)
    failed = _join(work(job, tmp_path / "parts", 2), tmp_path / f"out{suffix}")
    assert failed.keys() == {2}
    assert failed[2].startswith("ValueError: numbers: expected elements H to Es, got X")
    kept = [structures[i] for i in (0, 1, 2, 4)] + [systems.copper()]
    expected = evaluate(kept, FastUMACalculator(standin, device="cpu"), errors="return")
    if suffix == ".db":
        rows = list(connect(tmp_path / "out.db").select(sort="id"))
        assert [row.data.get("label") for row in rows] == ["row 0", "row 1", "row 2", "row 4", None]
        assert rows[0].data["list"] == [1, 2]
        results = [row.toatoms() for row in rows]
    else:
        results = read(tmp_path / "out.xyz", ":")
        assert [atoms.info.get("label") for atoms in results] == ["row 0", "row 1", "row 2", "row 4", None]
    assert [str(atoms.symbols) for atoms in results] == [str(atoms.symbols) for atoms in kept]
    for atoms, result in zip(results, expected, strict=True):
        if not isinstance(result, Exception):
            assert atoms.get_potential_energy() == pytest.approx(result["energy"], abs=1e-4)
            np.testing.assert_allclose(atoms.get_forces(), result["forces"], atol=2e-5)


def test_relaxation(tmp_path: Path) -> None:
    strained = bulk("Cu", a=3.8, cubic=True)
    flawed = strained.copy()
    flawed.positions[1] = flawed.positions[0]
    slow = strained.copy()
    slow.rattle(0.2, seed=1)
    write(tmp_path / "in.extxyz", [strained, systems.water(), flawed, slow])
    relaxation = Relaxation(fmax=0.01, steps=15, cell=True)
    job = _Job(str(tmp_path / "in.extxyz"), Settings("demo", device="cpu"), ("energy", "forces"), relaxation)
    failed = _join(work(job, tmp_path / "parts", 4), tmp_path / "out.extxyz")
    assert failed == {2: "ValueError: positions: atoms 0 and 1 coincide, expected them more than 0.001 A apart"}
    copper, water, _, unfinished = read(tmp_path / "out.extxyz", ":")
    assert [atoms.info[CONVERGED] for atoms in (copper, water, unfinished)] == [True, True, False]
    assert copper.cell.lengths() == pytest.approx([3.59] * 3, abs=0.01)  # EMT's, on which the demo was trained
    assert water.get_distance(0, 1) == pytest.approx(0.959, abs=0.02)  # GFN2-xTB's
    assert np.abs(water.get_forces()).max() < 0.01


def test_blocks_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / "in.xyz", [systems.water(), systems.copper(), systems.nacl()], format="extxyz")
    source = _ExtendedXYZ(tmp_path / "in.xyz")
    for size, bounds in ((1, [(0, 1), (1, 2), (2, 3)]), (2, [(0, 2), (2, 3)]), (5, [(0, 3)])):
        blocks = list(source.blocks(size))
        assert [(block.start, block.stop) for block in blocks] == bounds
        read_back = [atoms for block in blocks for atoms in source.read(block)]
        assert [len(atoms) for atoms in read_back] == [3, 4, 8]
        np.testing.assert_allclose(read_back[2].positions, systems.nacl().positions, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", r"in.xyz: expected a number of atoms, got b'nonsense"),
        ("1\n\nHe 0 0 0\n\n1\n\nHe 0 0 0\n", r"in.xyz: expected a number of atoms, got b'\\n'"),
        ("1\n\nHe 0 0 0\n2\n\nHe 0 0 0\n", "in.xyz: expected 2 atoms of structure 1, got fewer"),
        ("1\n\nHe 0 0 0\n1\n\nHe 0 zero 0\n", "in.xyz: structures 0 to 1: .*'zero'"),
        ("1\n\nHe 0 0 0\n1\n\nQq 0 0 0\n", "in.xyz: structures 0 to 1: .*Qq"),
        ("1\n\nHe 0 0 0\n1\n\nHe 0 0\n", "in.xyz: structures 0 to 1: "),
    ],
    ids=["nonsense", "blank line", "cut off", "no number", "no element", "no column"],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    source = _ExtendedXYZ(tmp_path / "in.xyz")
    (tmp_path / "in.xyz").write_text(text)
    with pytest.raises(ValueError, match=message):
        [source.read(block) for block in source.blocks(2)]


def test_blank_lines_end_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.xyz").write_text("1\n\nHe 0 0 0\n\n  \n")
    assert [block.stop for block in _ExtendedXYZ(tmp_path / "in.xyz").blocks(2)] == [1]


def test_arguments_are_checked(tmp_path: Path) -> None:
    source, existing = tmp_path / "in.xyz", tmp_path / "existing.xyz"
    write(source, systems.water(), format="extxyz")
    existing.touch()
    new = tmp_path / "out.xyz"
    for arguments, options, error, message in (
        ((tmp_path / "none.xyz", new), {}, FileNotFoundError, "source: expected a file, got .*none.xyz"),
        ((tmp_path / "in.cif", new), {}, ValueError, "source: expected a file of one of the kinds"),
        ((source, existing), {}, FileExistsError, "destination: expected a new file"),
        ((source, tmp_path / "out.cif"), {}, ValueError, "destination: expected a file of one of the kinds"),
        ((existing, new), {}, ValueError, "source: expected structures, got none"),
        ((source, new), {"workers": 0}, ValueError, "block_size and workers: expected at least 1, got 256 and 0"),
        ((source, new), {"device": "cuda:1"}, ValueError, "device: expected 'cpu', 'cuda' or None, got 'cuda:1'"),
        ((source, new), {"precision": "double"}, ValueError, "precision: expected one of"),
    ):
        with pytest.raises(error, match=message):
            evaluate_dataset(*arguments, "demo", **options)
    assert not new.with_name("out.xyz.parts").exists()


def test_parts_of_another_run(tmp_path: Path) -> None:
    write(tmp_path / "in.xyz", systems.water(), format="extxyz")
    job = _Job(str(tmp_path / "in.xyz"), Settings("demo"), ("energy",), None)
    _claim(tmp_path / "parts", job, 2)
    _claim(tmp_path / "parts", job, 2)
    with pytest.raises(ValueError, match="has parts of a run with another block_size; go on with the same arguments"):
        _claim(tmp_path / "parts", job, 3)
    other = _Job(job.source, Settings("demo", precision="fast"), ("energy",), Relaxation())
    with pytest.raises(ValueError, match="another settings, relaxation;"):
        _claim(tmp_path / "parts", other, 2)
    model = tmp_path / "model.pt"
    model.write_bytes(b"1")
    job = _Job(job.source, Settings(str(model)), ("energy",), None)
    _claim(tmp_path / "parts of a file", job, 2)
    model.write_bytes(b"another")
    with pytest.raises(ValueError, match="has parts of a run with another model file;"):
        _claim(tmp_path / "parts of a file", job, 2)
