"""Phonons of an ordered alloy with phonopy, all displacements in one call: band structure and density of states.

An alloy needs more displaced supercells than an element does. `evaluate` packs them into as few passes as fit the
memory. Third-order force constants for phono3py come in the same way, from its own `supercells_with_displacements`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from new_folder import new_folder
from phonopy import Phonopy
from phonopy.phonon.band_structure import get_band_qpoints_and_path_connections
from phonopy.structure.atoms import PhonopyAtoms

from ase_fastuma import FastUMACalculator, evaluate

matplotlib.use("Agg")  # plots go to files; no display is needed
import matplotlib.pyplot as plt

# Gamma-X-M-Gamma-R of the simple cubic lattice, in reciprocal vectors
PATH = [[[0, 0, 0], [0, 1 / 2, 0], [1 / 2, 1 / 2, 0], [0, 0, 0], [1 / 2, 1 / 2, 1 / 2]]]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--metals", nargs=2, default=["Pd", "Cu"], help="corner and faces of the cube: Pd Cu is PdCu3")
parser.add_argument("--size", type=int, default=2, help="cells of 4 atoms along each axis of the supercell")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-phonons-alloy)")
args = parser.parse_args()
out = new_folder(args.out, "phonons-alloy")

calc = FastUMACalculator(args.model)
cell = bulk("Cu", a=3.8, cubic=True)
corner, faces = args.metals
cell.symbols = [corner, faces, faces, faces]
cell.calc = calc
if not BFGS(FrechetCellFilter(cell), logfile=None).run(fmax=1e-3, steps=200):
    raise RuntimeError("the relaxation of the cell did not converge in 200 steps")

crystal = PhonopyAtoms(symbols=cell.symbols, cell=cell.cell, scaled_positions=cell.get_scaled_positions())
phonon = Phonopy(crystal, supercell_matrix=[args.size] * 3, log_level=0)
phonon.generate_displacements(distance=0.01)
displaced = [
    Atoms(s.symbols, cell=s.cell, scaled_positions=s.scaled_positions, pbc=True)
    for s in phonon.supercells_with_displacements
]
phonon.forces = [result["forces"] for result in evaluate(displaced, calc, properties=["forces"])]
phonon.produce_force_constants()

qpoints, connections = get_band_qpoints_and_path_connections(PATH, npoints=31)
phonon.run_band_structure(qpoints, path_connections=connections)
bands = phonon.band_structure
frequencies = np.concatenate(bands.frequencies)  # THz
phonon.run_mesh([12, 12, 12])
phonon.run_total_dos(freq_pitch=0.02)
density = phonon.total_dos
phonon.run_thermal_properties(t_min=300, t_max=300, t_step=1)
heat_capacity = phonon.thermal_properties.heat_capacity[0]  # J/(mol K), per cell of 4 atoms
print(f"supercells                   {len(displaced)} of {len(displaced[0])} atoms")
print(f"lattice constant             {cell.cell.lengths().mean():.4f} A")
print(f"acoustic branches at Gamma   {np.abs(bands.frequencies[0][0][:3]).max():.4f} THz at most")
print(f"lowest frequency             {frequencies.min():+.4f} THz")
print(f"highest frequency            {frequencies.max():.4f} THz")
print(f"heat capacity at 300 K       {heat_capacity / 4:.2f} J/(mol K) an atom")

figure, (left, right) = plt.subplots(1, 2, sharey=True, width_ratios=[3, 1], figsize=(7, 4), layout="constrained")
for distances, branches in zip(bands.distances, bands.frequencies, strict=True):
    left.plot(distances, branches, "C0")
corners = [0.0, *(float(segment[-1]) for segment in bands.distances)]
for position in corners:
    left.axvline(position, color="0.8", linewidth=0.8)
left.axhline(0, color="0.8", linewidth=0.8)
left.set_xticks(corners, ["Γ", "X", "M", "Γ", "R"])
left.set(ylabel="frequency (THz)", xlim=(0, corners[-1]), title=f"{cell.get_chemical_formula()}, {args.model}")
right.plot(density.dos, density.frequency_points, "C0")
right.axhline(0, color="0.8", linewidth=0.8)
right.set(xlabel="density of states (1/THz)", xlim=(0, None))
figure.savefig(out / "phonons.png", dpi=150)
print(f"files: {out / 'phonons.png'}")
