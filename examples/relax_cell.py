"""Relax the atoms and the cell of Cu3Au together, and compare with ASE's EMT.

The demo potential was trained on EMT, so both should find the same crystal. We start from an ordered crystal whose
cell is stretched and sheared and whose atoms are displaced; relaxation has to bring back the cube.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from new_folder import new_folder

from ase_fastuma import FastUMACalculator

STRAIN = np.array([[0.03, 0.02, 0.00], [0.02, -0.02, 0.01], [0.00, 0.01, 0.01]])


def relax(start: Atoms, calc: Calculator, trajectory: Path) -> Atoms:
    """A relaxed copy of `start`: forces below 0.001 eV/A, and a stress to match."""
    atoms = start.copy()
    atoms.calc = calc
    optimizer = BFGS(FrechetCellFilter(atoms), logfile=None, trajectory=str(trajectory))
    if not optimizer.run(fmax=0.001, steps=200):
        raise RuntimeError(f"the relaxation in {trajectory} did not converge in 200 steps")
    print(f"\n{trajectory.stem}: {optimizer.nsteps} steps")
    print(f"energy                 {atoms.get_potential_energy() / len(atoms):.4f} eV/atom")
    print(f"lattice constant       {atoms.cell.volume ** (1 / 3):.4f} A")
    print("cell lengths           {:.3f} {:.3f} {:.3f} A".format(*atoms.cell.lengths()))
    print("cell angles            {:.2f} {:.2f} {:.2f} degrees".format(*atoms.cell.angles()))
    print(f"largest stress left    {np.abs(atoms.get_stress()).max() / units.GPa:.4f} GPa")
    return atoms


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-relax-cell)")
args = parser.parse_args()
out = new_folder(args.out, "relax-cell")

crystal = bulk("Cu", a=3.7, cubic=True)
crystal.symbols[0] = "Au"  # gold on the corners of the cube, copper on its faces: Cu3Au
crystal.set_cell(crystal.cell @ (np.eye(3) + STRAIN), scale_atoms=True)
crystal.rattle(stdev=0.05, seed=1)

relaxed = relax(crystal, FastUMACalculator(args.model), out / "fastuma.traj")
reference = relax(crystal, EMT(), out / "emt.traj")
difference = relaxed.cell.volume ** (1 / 3) - reference.cell.volume ** (1 / 3)
print(f"\ndifference of the lattice constants: {difference:+.4f} A")
print(f"files: {out / 'fastuma.traj'}, {out / 'emt.traj'}")
