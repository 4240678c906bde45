"""Normal modes from the exact Hessian: frequencies, zero-point energy, thermochemistry, animated modes.

Motions that change no energy - translations and the rotations that the periodicity leaves - are projected out of the
Hessian, so neither rounding nor forces that have not vanished mix them with soft vibrations. The rest is ASE's:
`VibrationsData` holds the modes, `IdealGasThermo` and `HarmonicThermo` turn them into free energies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ase import Atoms, units
from ase.io import write
from ase.thermochemistry import HarmonicThermo, IdealGasThermo
from ase.vibrations import VibrationsData

from ase_fastuma.hessian import chosen_atoms

# A molecule (or a wire) is straight where no atom lies further than this off its axis (A): relaxed to 0.01 eV/A, the
# atoms of a linear molecule are within some 0.005 A of it.
_STRAIGHT = 0.02

# Square root of a curvature (eV/A^2) over a mass (u), in eV.
_MODE_ENERGY = units._hbar * units.m / np.sqrt(units._e * units._amu)


@dataclass(frozen=True)
class NormalModes:
    """Vibrations of a structure.

    | attribute | meaning |
    |---|---|
    | data | ASE's VibrationsData with rigid motions projected out: it has them too, with energy 0 |
    | rigid | how many rigid motions were projected out; 0 where some atoms are held |
    | geometry | "monatomic", "linear" or "nonlinear" for a molecule, as ASE's IdealGasThermo takes it; else None |
    | rigid_energy | largest energy (eV) that a rigid motion had before: of rounding, and of forces not yet zero |
    | potential_energy | eV |
    | largest_force | on an atom that moves, eV/A |
    | spin | total electronic spin (multiplicity less one, halved) |
    """

    data: VibrationsData
    rigid: int
    geometry: Literal["monatomic", "linear", "nonlinear"] | None
    rigid_energy: float
    potential_energy: float
    largest_force: float
    spin: float

    @cached_property
    def _vibrating(self) -> np.ndarray:
        """Which of the modes of `data` are vibrations: all but those next to zero, as many as were projected out."""
        return np.sort(np.argsort(np.abs(self.data.get_energies()))[self.rigid :])

    @property
    def energies(self) -> np.ndarray:
        """Energies of the quanta in eV, complex; those of imaginary modes come first and have no real part."""
        return self.data.get_energies()[self._vibrating]

    @property
    def frequencies(self) -> np.ndarray:
        """`energies` as wave numbers, 1/cm."""
        return self.energies / units.invcm

    @property
    def modes(self) -> np.ndarray:
        """Displacements of all atoms in each mode [modes, N, 3], as VibrationsData scales them (u^-1/2)."""
        return self.data.get_modes(all_atoms=True)[self._vibrating]

    @property
    def imaginary(self) -> int:
        """How many modes are imaginary: 0 in a minimum, 1 at a transition state."""
        return int((self.energies.imag > 0).sum())

    @property
    def zero_point_energy(self) -> float:
        """Half a quantum of each real mode, eV."""
        return 0.5 * float(self.energies.real.sum())

    def summary(self) -> str:
        """A table of the modes, imaginary ones with an i, and what the numbers rest on."""
        lines = ["mode       meV      1/cm"]
        for i, energy in enumerate(self.energies):
            value, mark = (energy.imag, "i") if energy.imag > 0 else (energy.real, " ")
            lines.append(f"{i:4} {1e3 * value:9.2f}{mark} {value / units.invcm:8.1f}{mark}")
        lines.append(f"zero-point energy  {self.zero_point_energy:.4f} eV")
        if self.imaginary:
            lines.append(f"imaginary modes    {self.imaginary}: a saddle point, or not yet relaxed")
        lines.append(f"largest force      {self.largest_force:.4f} eV/A")
        if self.rigid:
            size = self.rigid_energy / units.invcm
            lines.append(f"projected out      {self.rigid} rigid motions (of {size:.1f} 1/cm at most)")
        return "\n".join(lines)

    def ideal_gas(self, symmetrynumber: int, **options: Any) -> IdealGasThermo:
        """ASE's thermochemistry of an ideal gas of these molecules; `options` go to it (`ignore_imag_modes`, ...).

        Raises ValueError where the structure is no free molecule, and for imaginary modes, unless told to ignore them.
        """
        if self.geometry is None:
            raise ValueError("ideal_gas: expected a molecule with all its atoms free, got a periodic or held structure")
        settings: dict[str, Any] = {
            "potentialenergy": self.potential_energy,
            "spin": self.spin,
            "vib_selection": "exact",
        }
        return IdealGasThermo(
            list(self.energies),
            self.geometry,
            atoms=self.data.get_atoms(),
            symmetrynumber=symmetrynumber,
            **(settings | options),
        )

    def harmonic(self, **options: Any) -> HarmonicThermo:
        """ASE's thermochemistry of independent oscillators: for adsorbates, and for crystals at one wave vector.

        Raises ValueError for imaginary modes, unless `ignore_imag_modes=True`.
        """
        return HarmonicThermo(list(self.energies), **({"potentialenergy": self.potential_energy} | options))

    def write(self, folder: str | Path, temperature: float = 300.0, frames: int = 30) -> list[Path]:
        """Write each mode as an animation, mode-000.traj and so on, with amplitudes for a temperature (K)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for i, mode in enumerate(self._vibrating):
            files.append(folder / f"mode-{i:03}.traj")
            write(files[-1], list(self.data.iter_animated_mode(mode, temperature * units.kB, frames)))
        return files


def normal_modes(atoms: Atoms, indices: Sequence[int] | None = None, **options: Any) -> NormalModes:
    """The normal modes of a relaxed structure, from `atoms.calc.get_hessian`, which `options` go to.

    Args:
        atoms: with a FastUMACalculator.
        indices: the atoms that move; the others are held. None: all that no FixAtoms or FixCartesian constraint holds.

    Raises ValueError and TypeError for indices, masses and calculators that cannot hold, and what those raise.
    """
    if not hasattr(atoms.calc, "get_hessian"):
        raise TypeError(f"atoms.calc: expected a FastUMACalculator, got {atoms.calc!r}")
    masses = atoms.get_masses()
    wrong = np.flatnonzero(~((masses > 0) & np.isfinite(masses))).tolist()
    if wrong:
        raise ValueError(f"atoms: expected positive masses, got {masses[wrong].tolist()} for atoms {wrong}")
    if indices is None:
        indices = VibrationsData.indices_from_constraints(atoms)
    chosen = np.sort(chosen_atoms(indices, len(atoms)))  # the order of VibrationsData
    hessian = atoms.calc.get_hessian(atoms, chosen, **options)
    geometry: Literal["monatomic", "linear", "nonlinear"] | None = None
    motions = np.zeros((0, 3 * len(chosen)))
    if len(chosen) == len(atoms):
        motions = rigid_motions(atoms)
        if not atoms.pbc.any():
            geometry = "monatomic" if len(motions) == 3 else "linear" if len(motions) == 5 else "nonlinear"
    roots = np.sqrt(np.repeat(masses[chosen], 3))
    dynamical = hessian / np.outer(roots, roots)
    of_rigid = np.linalg.eigvalsh(motions @ dynamical @ motions.T)
    keep = np.eye(len(roots)) - motions.T @ motions
    projected = np.outer(roots, roots) * (keep @ dynamical @ keep)
    forces = atoms.get_forces(apply_constraint=False)[chosen]
    return NormalModes(
        data=VibrationsData.from_2d(atoms, (projected + projected.T) / 2, chosen.tolist()),
        rigid=len(motions),
        geometry=geometry,
        rigid_energy=_MODE_ENERGY * float(np.sqrt(np.abs(of_rigid).max(initial=0.0))),
        potential_energy=atoms.get_potential_energy(),
        largest_force=float(np.linalg.norm(forces, axis=1).max()),
        spin=max(atoms.calc.parameters["spin"] - 1, 0) / 2,
    )


def rigid_motions(atoms: Atoms) -> np.ndarray:
    """Motions of the structure as a whole [r, 3 N], orthonormal in mass-weighted coordinates (u^1/2 A).

    Three translations; three rotations of a molecule, two of a linear one; one of a wire about its axis, unless it is
    straight; none of what is periodic along two or three axes.
    """
    roots = np.sqrt(atoms.get_masses())[:, None]
    arms = atoms.positions - atoms.get_center_of_mass()
    motions = [roots * axis for axis in np.eye(3)]
    motions += [roots * np.cross(axis, arms) for axis in _free_rotations(arms, atoms.cell.array[atoms.pbc])]
    return np.linalg.qr(np.reshape(motions, (len(motions), -1)).T)[0].T


def _free_rotations(arms: np.ndarray, periodic: np.ndarray) -> np.ndarray:
    """Axes [r, 3] about which atoms at `arms` [N, 3] may turn together, given the periodic vectors [p, 3]."""
    if len(periodic) > 1:
        return np.zeros((0, 3))
    if len(periodic):
        axes = periodic / np.linalg.norm(periodic)
        return axes if _distance_from_axis(arms, axes[0]) > _STRAIGHT else axes[:0]
    axes = np.linalg.svd(arms)[2]  # the first is that of a linear molecule
    if np.abs(arms).max() < _STRAIGHT:
        return axes[:0]
    return axes if _distance_from_axis(arms, axes[0]) > _STRAIGHT else axes[1:]


def _distance_from_axis(arms: np.ndarray, axis: np.ndarray) -> float:
    return float(np.linalg.norm(np.cross(arms, axis), axis=1).max())
