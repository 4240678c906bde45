"""Phonons of copper with phonopy, beside those of ASE's EMT, on which the demo potential was trained.

One atom of a perfect crystal is displaced by 0.01 A; the forces that follow, and the crystal's symmetry, give all
force constants and so the vibrations. An imaginary frequency (drawn below zero) would mean an unstable crystal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from new_folder import new_folder
from phonopy import Phonopy
from phonopy.phonon.band_structure import get_band_qpoints_and_path_connections
from phonopy.structure.atoms import PhonopyAtoms

from ase_fastuma import FastUMACalculator

matplotlib.use("Agg")  # plots go to files; no display is needed
import matplotlib.pyplot as plt

# Gamma-X-U and K-Gamma-L, in reciprocal vectors of the primitive cell; U and K are the same point seen from two sides
PATH = [
    [[0, 0, 0], [1 / 2, 0, 1 / 2], [5 / 8, 1 / 4, 5 / 8]],
    [[3 / 8, 3 / 8, 3 / 4], [0, 0, 0], [1 / 2, 1 / 2, 1 / 2]],
]


def phonons(calc: Calculator, name: str, size: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Distances along the path [Q], frequencies in THz [Q, 3], and where the corners of the path lie."""
    cell = bulk("Cu", cubic=True)
    cell.calc = calc
    if not BFGS(FrechetCellFilter(cell), logfile=None).run(fmax=1e-3, steps=100):
        raise RuntimeError(f"the relaxation of the cell with {name} did not converge in 100 steps")

    copper = PhonopyAtoms(symbols=cell.symbols, cell=cell.cell, scaled_positions=cell.get_scaled_positions())
    phonon = Phonopy(copper, supercell_matrix=[size, size, size], primitive_matrix="F", log_level=0)
    phonon.generate_displacements(distance=0.01)
    forces = []
    for displaced in phonon.supercells_with_displacements:
        atoms = Atoms(displaced.symbols, cell=displaced.cell, scaled_positions=displaced.scaled_positions, pbc=True)
        atoms.calc = calc
        forces.append(atoms.get_forces())
    phonon.forces = forces
    phonon.produce_force_constants()

    qpoints, connections = get_band_qpoints_and_path_connections(PATH, npoints=51)
    phonon.run_band_structure(qpoints, path_connections=connections)
    bands = phonon.band_structure
    frequencies = np.concatenate(bands.frequencies)
    print(f"\n{name}")
    print(f"lattice constant             {cell.cell.lengths().mean():.4f} A")
    print(f"acoustic branches at Gamma   {np.abs(bands.frequencies[0][0]).max():.4f} THz at most")
    print(f"lowest frequency             {frequencies.min():+.4f} THz")
    print(f"highest frequency            {frequencies.max():.4f} THz")
    corners = [0.0, *(float(segment[-1]) for segment in bands.distances)]
    return np.concatenate(bands.distances), frequencies, corners


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--size", type=int, default=4, help="cells of 4 atoms along each axis of the supercell")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-phonons-cu)")
args = parser.parse_args()
out = new_folder(args.out, "phonons-cu")

# The forces differ by little, and their differences show the rounding of float32
calc = FastUMACalculator(args.model, precision="float64")
distances, frequencies, corners = phonons(calc, "FastUMA", args.size)
emt_distances, emt_frequencies, emt_corners = phonons(EMT(), "EMT", args.size)
print(f"\nlargest deviation from EMT: {np.abs(frequencies - emt_frequencies).max():.3f} THz")

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
scale = emt_corners[-1] / corners[-1]  # the two lattice constants differ a little
axes.plot(emt_distances, emt_frequencies, "k--", label=["EMT", None, None])
axes.plot(scale * distances, frequencies, "C0", label=[args.model, None, None])
for corner in emt_corners:
    axes.axvline(corner, color="0.8", linewidth=0.8)
axes.axhline(0, color="0.8", linewidth=0.8)
axes.set_xticks(emt_corners, ["Γ", "X", "U|K", "Γ", "L"])
axes.set(ylabel="frequency (THz)", xlim=(0, emt_corners[-1]), title="Phonons of copper")
axes.legend()
figure.savefig(out / "bands.png", dpi=150)
print(f"files: {out / 'bands.png'}")
