"""The examples, run as a newcomer runs them, with small settings: what they print and save, against physics."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from ase.io import read

EXAMPLES = Path(__file__).parents[1] / "examples"


def assert_quiet(stderr: str) -> None:
    """Nothing but a progress bar, and that Warp, which TorchSim 0.6 imports, misses a GPU."""
    noise = [line for line in re.split(r"[\r\n]+", stderr) if line and not re.match(r" *\d+%\||Warp CUDA", line)]
    assert noise == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., str]:
    """`run(example, *arguments)`: what it prints, run in `tmp_path` by this process, which has its imports already."""

    def run_here(example: str, *arguments: object) -> str:
        program = EXAMPLES / f"{example}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [str(program), *map(str, arguments)])
        runpy.run_path(str(program), run_name="__main__")
        plt.close("all")
        printed = capfd.readouterr()
        assert_quiet(printed.err)
        return printed.out

    return run_here


def numbers(printed: str, label: str) -> list[float]:
    """The number after each occurrence of `label` at the start of a line."""
    return [float(number) for number in re.findall(rf"^{re.escape(label)}\s+([-+]?\d+\.?\d*)", printed, re.MULTILINE)]


def assert_plot(path: Path) -> None:
    """The file is an image on which something is drawn."""
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 3


def test_quickstart(tmp_path: Path) -> None:
    """In a process of its own, as a newcomer starts it."""
    command = [sys.executable, EXAMPLES / "quickstart.py", "--size", "1", "--steps", "20", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert_quiet(done.stderr)
    printed = done.stdout
    assert re.search(r"^backend +(general|fused) \(", printed, re.MULTILINE)
    assert numbers(printed, "atoms") == [4]
    (milliseconds, nanoseconds) = map(float, re.search(r"([\d.]+) ms/step, ([\d.]+) ns/day", printed).groups())
    assert nanoseconds == pytest.approx(4.0 * 86.4 / milliseconds, rel=0.01)  # 4 fs steps, 86 400 s a day
    assert_plot(tmp_path / "run" / "energies.png")

    frames = read(tmp_path / "run" / "copper.traj", ":")
    assert len(frames) == 21
    potential = np.array([frame.get_potential_energy() for frame in frames])
    total = 1e3 * np.array([frame.get_total_energy() for frame in frames]) / 4
    moved = 1e3 * np.ptp(potential) / 4
    assert moved > 20  # meV/atom: the atoms did exchange energy
    assert np.ptp(total) < 0.01 * moved  # what 4 fs steps leave of it; forces that are 2 % off leave more
    assert np.abs([frame.get_momenta().sum(axis=0) for frame in frames]).max() < 1e-3  # the crystal does not drift
    drift = np.polyfit(4e-3 * np.arange(21)[10:], total[10:], 1)[0]
    assert numbers(printed, "energy drift") == [pytest.approx(drift, abs=1e-3)]


def test_relax_cell(run: Callable, tmp_path: Path) -> None:
    printed = run("relax_cell")
    ours, emt = numbers(printed, "lattice constant")
    assert emt == pytest.approx(3.708, abs=0.001)  # from EMT's energies of cubes, without a relaxation
    assert ours == pytest.approx(emt, abs=0.01)
    for name in ("fastuma", "emt"):
        frames = read(tmp_path / "fastuma-relax-cell" / f"{name}.traj", ":")
        assert np.ptp(frames[0].cell.lengths()) > 0.1
        assert np.ptp(frames[-1].cell.lengths()) < 0.01
        assert np.abs(frames[-1].cell.angles() - 90).max() < 0.1
        assert frames[-1].get_potential_energy() < frames[0].get_potential_energy()


def test_relax_charged_molecule(run: Callable, tmp_path: Path) -> None:
    """Beside the results of an earlier run, which stay."""
    kept = tmp_path / "fastuma-relax-charged-molecule" / "relaxed.xyz"
    kept.parent.mkdir()
    kept.write_text("mine")
    run("relax_charged_molecule")
    assert kept.read_text() == "mine"
    cation, radical, anion = read(tmp_path / "fastuma-relax-charged-molecule-2" / "relaxed.xyz", ":")
    for atoms, charge, spin, angle in ((cation, 1, 1, 180.0), (radical, 0, 2, 137.9), (anion, -1, 1, 117.3)):
        assert (atoms.info["charge"], atoms.info["spin"]) == (charge, spin)
        assert atoms.get_angle(1, 0, 2) == pytest.approx(angle, abs=3)  # of GFN2-xTB, from tblite


def test_phonons_cu(run: Callable, tmp_path: Path) -> None:
    printed = run("phonons_cu", "--size", 3)
    assert np.abs(np.subtract(*numbers(printed, "lattice constant"))) < 0.01
    assert max(numbers(printed, "acoustic branches at Gamma")) < 0.01  # THz
    assert min(numbers(printed, "lowest frequency")) > -0.01  # no imaginary branch
    assert numbers(printed, "largest deviation from EMT:")[0] < 0.3
    assert_plot(tmp_path / "fastuma-phonons-cu" / "bands.png")


def test_phonons_alloy(run: Callable, tmp_path: Path) -> None:
    printed = run("phonons_alloy")
    assert re.search(r"^supercells +2 of 32 atoms$", printed, re.MULTILINE)
    assert max(numbers(printed, "acoustic branches at Gamma")) < 0.02  # THz
    assert min(numbers(printed, "lowest frequency")) > -0.02  # no imaginary branch
    assert numbers(printed, "heat capacity at 300 K") == [pytest.approx(23.6, abs=0.3)]  # a little below 3 R = 24.9
    assert_plot(tmp_path / "fastuma-phonons-alloy" / "phonons.png")


def test_vibrations(run: Callable, tmp_path: Path) -> None:
    printed = run("vibrations", "--molecule", "H2O", "--symmetry", 2)
    waves = [float(wave) for wave in re.findall(r"^ +\d+ +[\d.]+ +([\d.]+) *$", printed, re.MULTILINE)]
    assert waves == pytest.approx([1539, 3640, 3647], abs=60)  # GFN2-xTB, on which the potential was trained
    assert numbers(printed, "entropy") == [pytest.approx(1.957, abs=0.01)]  # meV/K; 188.8 J/(mol K) by experiment
    assert_plot(tmp_path / "fastuma-vibrations" / "vibrations.png")
    assert len(list((tmp_path / "fastuma-vibrations").glob("mode-*.traj"))) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchSim 0.3 uses torch.jit
def test_torchsim_md(run: Callable, tmp_path: Path) -> None:
    printed = run("torchsim_md", "--steps", 6, "--fmax", 0.1)
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +(-?[\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["Cu", "Al", "Cu3Au", "Ni3Al"]
    for _, exchanged, change, _, force in rows:
        assert float(exchanged) > 10  # meV/atom
        assert float(change) < 0.02 * float(exchanged)
        assert float(force) < 0.1
    assert_plot(tmp_path / "fastuma-torchsim-md" / "energies.png")


def test_a_folder_that_exists_is_refused(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(SystemExit, match="--out: expected a folder that does not exist yet, got mine"):
        run("relax_charged_molecule", "--out", "mine")
    assert list((tmp_path / "mine").iterdir()) == []
