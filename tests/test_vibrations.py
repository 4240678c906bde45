"""Normal modes: analytic oscillators, ASE's own Vibrations, experiment, and what is projected out of what."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import systems
from ase import Atoms, units
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.constraints import FixAtoms
from ase.io import read
from ase.optimize import BFGS
from ase.thermochemistry import HarmonicThermo
from ase.vibrations import Vibrations

from ase_fastuma.vibrations import NormalModes, normal_modes, rigid_motions

STIFFNESS = 30.0  # eV/A^2


class Spring(Calculator):
    """Atoms in a row, each tied to the next by a harmonic spring: E = sum of k (d - d0)^2 / 2."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012 - as in ASE

    def __init__(self, length: float) -> None:
        super().__init__()
        self._length = length
        self.parameters["spin"] = 1

    def calculate(self, atoms: Atoms, properties: object = None, system_changes: object = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        bonds = np.diff(atoms.positions, axis=0)
        lengths = np.linalg.norm(bonds, axis=1)
        pull = STIFFNESS * ((lengths - self._length) / lengths)[:, None] * bonds
        forces = np.zeros_like(atoms.positions)
        forces[:-1] += pull
        forces[1:] -= pull
        self.results = {"energy": STIFFNESS * ((lengths - self._length) ** 2).sum() / 2, "forces": forces}

    def get_hessian(self, atoms: Atoms, indices: np.ndarray) -> np.ndarray:
        """At rest, k n n^T along each bond."""
        whole = np.zeros((len(atoms), 3, len(atoms), 3))
        for i, bond in enumerate(np.diff(atoms.positions, axis=0)):
            block = STIFFNESS * np.outer(bond, bond) / (bond @ bond)
            for first, second, sign in ((i, i, 1), (i + 1, i + 1, 1), (i, i + 1, -1), (i + 1, i, -1)):
                whole[first, :, second] += sign * block
        return whole[indices][:, :, indices].reshape(3 * len(indices), -1)


def quantum(curvature: float) -> float:
    """Energy (eV) of an oscillator with so much curvature (eV/A^2) an atomic mass unit, from SI units."""
    return units._hbar * np.sqrt(curvature * units._e / 1e-20 / units._amu) / units._e


def relaxed(name: str, make: Callable, **settings: object) -> Atoms:
    atoms = molecule(name)
    atoms.calc = make("demo", task="omol", **settings)
    assert BFGS(atoms, logfile=None).run(fmax=1e-3, steps=200)
    return atoms


def test_diatomic_oscillator() -> None:
    axis = np.array([1.0, 2.0, 2.0]) / 3
    atoms = Atoms("CO", positions=[-axis, 0.2 * axis], calculator=Spring(1.2))
    found = normal_modes(atoms)
    carbon, oxygen = atoms.get_masses()
    expected = quantum(STIFFNESS * (carbon + oxygen) / (carbon * oxygen))
    assert (found.geometry, found.rigid, found.imaginary) == ("linear", 5, 0)
    assert found.energies == pytest.approx([expected], rel=1e-9)
    assert found.zero_point_energy == pytest.approx(expected / 2, rel=1e-9)
    assert found.rigid_energy < 1e-6
    displacement = found.modes[0]
    assert np.abs(np.cross(displacement, axis)).max() < 1e-9
    assert displacement[0] * carbon == pytest.approx(-displacement[1] * oxygen, abs=1e-9)


def test_linear_triatomic() -> None:
    """Symmetric and antisymmetric stretch of three atoms in a row; bending costs nothing there."""
    atoms = Atoms("OCO", positions=[[0, 0, -1.2], [0, 0, 0], [0, 0, 1.2]], calculator=Spring(1.2))
    found = normal_modes(atoms)
    oxygen, carbon, _ = atoms.get_masses()
    expected = [0, 0, quantum(STIFFNESS / oxygen), quantum(STIFFNESS * (1 / oxygen + 2 / carbon))]
    np.testing.assert_allclose(np.abs(found.energies), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "geometry", "vibrations"),
    [("H2O", "nonlinear", 3), ("CO2", "linear", 4), ("C2H2", "linear", 7), ("N2", "linear", 1)],
)
def test_molecules(make: Callable, name: str, geometry: str, vibrations: int) -> None:
    atoms = relaxed(name, make)
    found = normal_modes(atoms)
    assert found.geometry == geometry
    assert len(found.energies) == len(found.modes) == vibrations
    assert found.imaginary == 0
    if name == "CO2":
        bend, twin, *stretches = found.frequencies.real
        assert bend == pytest.approx(twin, abs=0.1)
        assert 500 < bend < 750 < min(stretches)


def test_as_ases_vibrations(make: Callable, tmp_path: Path) -> None:
    """ASE's finite differences of the same forces, whose rotations are small numbers instead of none."""
    atoms = relaxed("H2O", make, precision="float64")
    theirs = Vibrations(atoms, name=str(tmp_path / "vib"), delta=1e-3)
    theirs.run()
    found = normal_modes(atoms)
    np.testing.assert_allclose(found.frequencies, theirs.get_frequencies()[-3:], atol=0.1)
    assert found.zero_point_energy == pytest.approx(theirs.get_energies()[-3:].real.sum() / 2, abs=1e-5)


def test_adsorbate_on_held_atoms(make: Callable, tmp_path: Path) -> None:
    """With atoms held nothing is projected out: all motions of the others are vibrations."""
    slab = fcc111("Cu", (1, 1, 2))
    add_adsorbate(slab, "Cu", 2.0, "fcc")
    slab.set_constraint(FixAtoms([0, 1]))
    slab.calc = make("demo", precision="float64")
    assert BFGS(slab, logfile=None).run(fmax=1e-3, steps=100)
    found = normal_modes(slab)
    assert (found.rigid, found.geometry, found.modes.shape) == (0, None, (3, 3, 3))
    assert not found.modes[:, :2].any()
    theirs = Vibrations(slab, indices=[2], name=str(tmp_path / "vib"), delta=1e-3)
    theirs.run()
    np.testing.assert_allclose(found.frequencies, theirs.get_frequencies(), atol=0.1)
    np.testing.assert_allclose(normal_modes(slab, indices=[-1]).frequencies, found.frequencies, atol=1e-6)
    thermo = found.harmonic()
    assert thermo.get_internal_energy(1.0, verbose=False) == pytest.approx(
        slab.get_potential_energy() + found.zero_point_energy, abs=1e-6
    )
    with pytest.raises(ValueError, match="expected a molecule with all its atoms free"):
        found.ideal_gas(1)


def test_saddle_point(make: Callable) -> None:
    """Planar ammonia: one imaginary mode, the umbrella, marked in the table and refused by thermochemistry."""
    atoms = Atoms("NH3", positions=[[0, 0, 0], *([np.cos(t), np.sin(t), 0] for t in np.radians([0, 120, 240]))])
    atoms.calc = make("demo", task="omol")
    assert BFGS(atoms, logfile=None).run(fmax=1e-3, steps=100)
    found = normal_modes(atoms)
    assert found.imaginary == 1
    assert found.energies[0].real == 0
    umbrella = found.modes[0]
    assert np.abs(umbrella[:, :2]).max() < 1e-3 * np.abs(umbrella).max()
    assert np.sign(umbrella[0, 2]) == -np.sign(umbrella[1, 2])
    assert re.search(r"^ +0 +\d+\.\d+i +\d+\.\di$", found.summary(), re.MULTILINE)
    assert "imaginary modes    1" in found.summary()
    assert found.zero_point_energy == pytest.approx(found.energies[1:].real.sum() / 2)
    with pytest.raises(ValueError, match="Imaginary"):
        found.ideal_gas(6)
    with pytest.warns(UserWarning, match="1 imag modes removed"):
        assert len(found.ideal_gas(6, ignore_imag_modes=True).vib_energies) == 5


def test_ideal_gas(make: Callable) -> None:
    """Entropies at 298.15 K and 1 bar against experiment (NIST-JANAF), J/(mol K): rotations and masses decide them."""
    for name, symmetry, entropy in (("H2O", 2, 188.84), ("CO2", 2, 213.79), ("N2", 2, 191.61)):
        gas = normal_modes(relaxed(name, make)).ideal_gas(symmetry)
        assert gas.get_entropy(298.15, 1e5, verbose=False) / units.J * units.mol == pytest.approx(entropy, abs=1.5)


def test_electronic_spin_and_single_atoms(make: Callable) -> None:
    """The entropy of helium is that of its translation (126.15 J/(mol K)); a doublet adds k ln 2."""
    helium = Atoms("He", info={"charge": 0, "spin": 1}, calculator=make(task="omol"))
    with pytest.warns(UserWarning, match="isolated atom"):
        found = normal_modes(helium)
    assert (found.geometry, len(found.energies)) == ("monatomic", 0)
    entropy = found.ideal_gas(1).get_entropy(298.15, 1e5, verbose=False)
    assert entropy / units.J * units.mol == pytest.approx(126.15, abs=0.05)
    helium.info["spin"] = 2
    doublet = normal_modes(helium).ideal_gas(1)
    assert doublet.get_entropy(298.15, 1e5, verbose=False) - entropy == pytest.approx(units.kB * np.log(2))


def test_crystal(make: Callable) -> None:
    """The modes of a cell at Gamma, of which three are translations."""
    atoms = bulk("Cu", a=3.59, cubic=True)
    atoms.calc = make("demo")
    found = normal_modes(atoms)
    assert (found.rigid, found.geometry, len(found.energies)) == (3, None, 9)
    assert found.frequencies.real.min() > 50
    assert found.rigid_energy / units.invcm < 2
    assert isinstance(found.harmonic(), HarmonicThermo)


def test_animations(make: Callable, tmp_path: Path) -> None:
    atoms = relaxed("H2O", make)
    found = normal_modes(atoms)
    files = found.write(tmp_path / "modes", frames=8)
    assert [file.name for file in files] == ["mode-000.traj", "mode-001.traj", "mode-002.traj"]
    for file, mode in zip(files, found.modes, strict=True):
        frames = read(file, ":")
        assert len(frames) == 8
        moved = frames[2].positions - atoms.positions  # a quarter of a period: the turning point
        assert np.abs(moved).max() > 0.01
        cosine = np.sum(moved * mode) / np.linalg.norm(moved) / np.linalg.norm(mode)
        assert cosine == pytest.approx(1)


def test_rigid_motions() -> None:
    """Orthonormal in mass-weighted coordinates, as many as the structure has."""
    wire = Atoms("AuCu", [[0, 0, 0], [0.5, 0, 2.4]], cell=[0, 0, 4.9], pbc=[False, False, True])
    straight = Atoms("AuCu", [[0, 0, 0], [0, 0, 2.4]], cell=[0, 0, 4.9], pbc=[False, False, True])
    bent = molecule("CO2")
    bent.positions[0, 0] += 0.1
    nearly = molecule("CO2")
    nearly.positions[0, 0] += 0.01
    for atoms, count in (
        (systems.water(), 6),
        (molecule("CO2"), 5),
        (nearly, 5),
        (bent, 6),
        (Atoms("He"), 3),
        (wire, 4),
        (straight, 3),
        (systems.slab(), 3),
        (systems.nacl(), 3),
    ):
        motions = rigid_motions(atoms)
        assert motions.shape == (count, 3 * len(atoms))
        np.testing.assert_allclose(motions @ motions.T, np.eye(count), atol=1e-12)
    # A small turn of a molecule stretches nothing: its distances change in second order alone.
    water = systems.water()
    for motion in rigid_motions(water):
        moved = water.copy()
        moved.positions += 1e-5 * motion.reshape(3, 3) / np.sqrt(water.get_masses())[:, None]
        np.testing.assert_allclose(moved.get_all_distances(), water.get_all_distances(), atol=1e-9)


def test_what_is_refused(make: Callable) -> None:
    atoms = systems.water()
    atoms.calc = make()
    with pytest.raises(ValueError, match=r"indices: expected some of 3 atoms, got \[5\]"):
        normal_modes(atoms, indices=[5])
    atoms.set_constraint(FixAtoms([0, 1, 2]))
    with pytest.raises(ValueError, match=r"indices: expected some of 3 atoms, got \[\]"):
        normal_modes(atoms)


def test_finite_differences_serve_as_well(make: Callable) -> None:
    atoms = relaxed("H2O", make, precision="float64")
    exact = normal_modes(atoms)
    assert isinstance(exact, NormalModes)
    numeric = normal_modes(atoms, method="finite-difference", step=1e-3)
    np.testing.assert_allclose(numeric.frequencies, exact.frequencies, atol=0.1)
