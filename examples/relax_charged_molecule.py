"""Relax NO2 as a cation, a radical and an anion: one molecule whose shape depends on its charge.

NO2+ is linear, like CO2, which has as many electrons. Each electron more goes into an orbital that bends the molecule:
about 134 degrees in the radical NO2 and 115 degrees in nitrite, NO2-, in experiments. (The demo potential imitates
the method GFN2-xTB, which gives 180, 138 and 117 degrees.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ase.build import molecule
from ase.io import write
from ase.optimize import BFGS
from new_folder import new_folder

from ase_fastuma import FastUMACalculator

# Name, charge, and spin multiplicity 2 S + 1: 1 where all electrons are paired, 2 with one unpaired electron
SPECIES = [("NO2+", 1, 1), ("NO2", 0, 2), ("NO2-", -1, 1)]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-relax-charged-molecule)")
args = parser.parse_args()
out = new_folder(args.out, "relax-charged-molecule")

calc = FastUMACalculator(args.model, task="omol")  # one calculator serves all charges
relaxed = []
print("         energy (eV)   N-O (A)   O-N-O (degrees)   steps")
for name, charge, spin in SPECIES:
    atoms = molecule("NO2")  # atoms N, O, O
    atoms.info["charge"] = charge  # the calculator reads both from here
    atoms.info["spin"] = spin
    atoms.calc = calc
    optimizer = BFGS(atoms, logfile=None)
    if not optimizer.run(fmax=0.005, steps=200):
        raise RuntimeError(f"the relaxation of {name} did not converge in 200 steps")
    energy, length, angle = atoms.get_potential_energy(), atoms.get_distance(0, 1), atoms.get_angle(1, 0, 2)
    print(f"{name:<6} {energy:13.3f} {length:9.3f} {angle:17.1f} {optimizer.nsteps:7}")
    relaxed.append(atoms.copy())

write(out / "relaxed.xyz", relaxed)  # charge and spin are recorded in the file
print(f"files: {out / 'relaxed.xyz'}")
