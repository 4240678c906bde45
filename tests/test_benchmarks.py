"""The benchmark scripts: the README is what the recorded rows say, and every script runs at tiny sizes."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
FAMILIES = ("fastuma", "fairchem:nitro")
# Of outputs against float64, in norm. TF32 and half operands keep 11 bits, the others those of float32 or more; slopes
# of the radial tables lose some to interpolation (tests/kernels/test_radial.py).
ERROR = {"half": 1e-3, "float16": 1e-3, "tf32": 1e-3} | dict.fromkeys(("split", "single", "float32", "float64"), 1e-5)


def run(script: str, *arguments: object, root: Path = ROOT) -> None:
    """Run a script of the checkout in `root`, in this process, which has its imports already; raise what it raises.

    On a GPU, where peers change the state of a process, in one of its own.
    """
    program = root / "benchmarks" / f"{script}.py"
    command = [str(program), *map(str, arguments)]
    if torch.cuda.is_available():
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return
    own = {path.stem for path in program.parent.glob("*.py")}  # `systems` is a module of the tests too
    others = {name: sys.modules.pop(name) for name in own & sys.modules.keys()}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", command)
            patch.syspath_prepend(program.parent)
            runpy.run_path(str(program), run_name="__main__")
    finally:
        for name in own & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(others)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(tmp_path: Path, script: str, *arguments: object) -> list[dict[str, Any]]:
    """The rows that a script writes. It must succeed, and so must all that it times."""
    run(script, "--out", tmp_path / "rows.jsonl", "--commit", "test", *arguments)
    rows = read_rows(tmp_path / "rows.jsonl")
    recorded = list(read_rows(ROOT / "benchmarks" / "results" / "end_to_end.jsonl")[0])
    for row in rows:
        assert list(row)[: len(recorded)] == recorded
        assert "error" not in row
        assert row["median_ms"] > 0
    return rows


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the report reads and writes."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in ("README.md", "benchmarks/report.py", "benchmarks/results/end_to_end.png"):
        shutil.copy(ROOT / name, tmp_path / name)
    for path in (ROOT / "benchmarks" / "results").glob("*.jsonl"):
        shutil.copy(path, tmp_path / "benchmarks" / "results")
    return tmp_path


def add_rows(checkout: Path, commit: str, times: dict[str, float]) -> None:
    """Append rows of a later run, one for each of `times` by impl."""
    rows = read_rows(checkout / "benchmarks" / "results" / "end_to_end.jsonl")
    later = [
        rows[-1] | {"commit": commit, "date": "2999-01-01", "impl": impl, "median_ms": time, "atoms": 500}
        for impl, time in times.items()
    ]
    with (checkout / "benchmarks" / "results" / "later.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in later)


def test_readme_and_plot_are_what_the_rows_say() -> None:
    run("report", "--check")


def test_a_stale_readme_is_found_and_mended(checkout: Path) -> None:
    readme = checkout / "README.md"
    text = readme.read_text()
    readme.write_text(text.replace("| ase-fastuma, `accurate` | ", "| ase-fastuma, `accurate` | 1"))
    with pytest.raises(SystemExit, match=r"stale: README\.md;"):
        run("report", "--check", root=checkout)
    run("report", root=checkout)
    assert readme.read_text() == text
    run("report", "--check", root=checkout)


def test_the_latest_whole_run_is_shown_and_no_other(checkout: Path) -> None:
    add_rows(checkout, "aaaaaaa", {"fastuma": 1234.5})  # no peer beside it
    run("report", "--check", root=checkout)
    add_rows(checkout, "bbbbbbb", dict(zip(FAMILIES, (2345.6, 3456.7), strict=True)))
    with pytest.raises(SystemExit, match=r"stale: README\.md, end_to_end\.png;"):
        run("report", "--check", root=checkout)
    run("report", root=checkout)
    part = (checkout / "README.md").read_text().split("<!-- benchmark table")[1]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    assert lines[0] == "| ms an evaluation | 500 Cu |"
    assert [line.split(" | ")[1] for line in lines[1:]] == ["2345.6 |", "3456.7 |"]
    assert "Rows of one commit, day and kind of machine: bbbbbbb, 2999-01-01" in part


def test_a_run_with_a_case_twice_is_refused(checkout: Path) -> None:
    for _ in range(2):
        add_rows(checkout, "bbbbbbb", dict.fromkeys(FAMILIES, 1.0))
    with pytest.raises((SystemExit, ValueError), match="expected one row a case in the run of bbbbbbb"):
        run("report", root=checkout)


def test_single_operations(tmp_path: Path) -> None:
    arguments = ["--atoms", 4, "--channels", 5, "--kinds", "split", "--cutoff", 3.0, "--seconds", 0.01]
    rows = measured(tmp_path, "ops", *arguments)
    assert len({row["op"] for row in rows}) == 17
    assert {row["impl"] for row in rows} == {"fastuma", "torch"}
    assert all(row["rel_err"] < ERROR[row["precision"]] for row in rows)


@pytest.mark.gpu
def test_end_to_end_on_a_gpu(standin: Path, tmp_path: Path) -> None:
    arguments = ["--systems", "cu:32", "--impls", "fastuma:accurate", "fairchem:general", "--seconds", 0.1]
    rows = measured(tmp_path, "end_to_end", "--checkpoint", standin, *arguments)
    assert [row["impl"] for row in rows] == ["fastuma", "fairchem:general"]
    assert all(row["force_rel_err"] < 1e-4 for row in rows)


@pytest.mark.gpu
def test_alternating_compositions_on_a_gpu(standin: Path, tmp_path: Path) -> None:
    arguments = ["--atoms", 32, "--impls", "fastuma:accurate", "--repeats", 3]
    rows = measured(tmp_path, "compositions", "--checkpoint", standin, *arguments)
    assert [row["system"] for row in rows] == ["cu", "cuau", "ni3al"]
    assert all(row["ratio"] == row["median_ms"] / row["alone_ms"] for row in rows)


@pytest.mark.gpu
def test_molecular_dynamics_on_a_gpu(standin: Path, tmp_path: Path) -> None:
    (row,) = measured(tmp_path, "md", "--checkpoint", standin, "--system", "cu:32", "--steps", 100)
    assert 0 < row["gpu_fraction"] < 1
    assert row["fluctuation"] < 0.1  # meV/atom; the temperature of the start is worth 39


@pytest.mark.gpu
def test_torchsim_on_a_gpu(standin: Path, tmp_path: Path) -> None:
    arguments = ["--replicas", 3, "--atoms", 4, "--steps", 40, "--warm-up", 0, "--impls", "fastuma:accurate"]
    arguments += ["torchsim:fairchem"] if sys.version_info >= (3, 12) else []  # which needs TorchSim 0.6
    for row in measured(tmp_path, "torchsim", "--checkpoint", standin, *arguments):
        assert row["steps_per_s"] == pytest.approx(40 / row["wall_s"])
        assert row["force_rel_err"] < 1e-4
        assert row["fluctuation"] < 0.1  # meV/atom; the temperature of the start is worth 39


@pytest.mark.parametrize("peers", [[], pytest.param(["fairchem:vmap"], marks=pytest.mark.gpu)])
def test_hessians(standin: Path, tmp_path: Path, peers: list[str]) -> None:
    arguments = ["--systems", "benzene", "--impls", "fastuma:accurate", *peers, "--seconds", 0, "--repeats", 1]
    rows = measured(tmp_path, "hessian", "--checkpoint", standin, *arguments)
    assert [row["impl"] for row in rows] == ["fastuma", *peers]
    for row in rows:
        assert 0 < row["hessian_err"] < 1e-4 < row["hessian_max"]
        assert row["asymmetry"] < 1e-5
    assert rows[0]["forces_after_ms"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("system", ["g2x3", "metals2x4"])
def test_batches_on_a_gpu(standin: Path, tmp_path: Path, system: str) -> None:
    arguments = ["--systems", system, "--impls", "fastuma:accurate", "fairchem:batch", "--seconds", 0]
    arguments += ["--repeats", 1, "--warm-up", 0, "--new-batches", 1]
    rows = measured(tmp_path, "batches", "--checkpoint", standin, *arguments)
    assert [row["impl"] for row in rows] == ["fastuma", "fairchem:batch"]
    for row in rows:
        assert row["force_rel_err"] < 1e-4
        assert row["new_batch_ms"] > 0
        assert row["structures_per_s"] == pytest.approx(1e3 * row["structures"] / row["median_ms"])


def test_grouped_products(tmp_path: Path) -> None:
    ways = ["plain:split", "fastuma:split", "loop:float32", "grouped_mm:bfloat16"]
    rows = measured(tmp_path, "grouped_products", "--shapes", "tiny", "--groups", 3, "--rows", 11, "--ways", *ways)
    assert [row["op"] for row in rows] == ["forward"] * 4 + ["backward_x"] * 4 + ["backward_w"] * 3 + ["double"] * 3
    assert all(row["rel_err"] < (2e-2 if row["precision"] == "bfloat16" else 1e-6) for row in rows)
    assert all(row["to_plain"] > 0 for row in rows[:8] if row["impl"] == "fastuma")
