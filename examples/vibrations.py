"""Vibrations of a molecule from its exact Hessian: frequencies, free energy, animated modes.

The molecule is relaxed first: frequencies mean something at stationary points alone. An imaginary frequency (marked
with an i) tells of a direction along which the energy falls.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from ase.build import molecule
from ase.optimize import BFGS
from new_folder import new_folder

from ase_fastuma import FastUMACalculator
from ase_fastuma.vibrations import normal_modes

matplotlib.use("Agg")  # plots go to files; no display is needed
import matplotlib.pyplot as plt

WIDTH = 15.0  # 1/cm, of the lines in the plot

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--molecule", default="CH3OH", help="a name that ase.build.molecule knows")
parser.add_argument("--symmetry", type=int, default=1, help="the molecule's symmetry number (2 for water)")
parser.add_argument("--temperature", type=float, default=298.15, help="K")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-vibrations)")
args = parser.parse_args()
out = new_folder(args.out, "vibrations")

atoms = molecule(args.molecule)
atoms.calc = FastUMACalculator(args.model, task="omol")
if not BFGS(atoms, logfile=None).run(fmax=1e-3, steps=500):
    raise RuntimeError("the relaxation did not converge in 500 steps")

vibrations = normal_modes(atoms)
print(vibrations.summary())
gas = vibrations.ideal_gas(args.symmetry)
entropy = gas.get_entropy(args.temperature, 1e5, verbose=False)
print(f"\nideal gas at {args.temperature:g} K and 1 bar ({vibrations.geometry})")
print(f"enthalpy           {gas.get_enthalpy(args.temperature, verbose=False):.4f} eV")
print(f"entropy            {1e3 * entropy:.4f} meV/K")
print(f"Gibbs free energy  {gas.get_gibbs_energy(args.temperature, 1e5, verbose=False):.4f} eV")

vibrations.write(out, temperature=args.temperature)
lines = vibrations.frequencies.real[vibrations.imaginary :]  # 1/cm
grid = np.linspace(0, 1.05 * lines.max(), 2000)
density = np.exp(-(((grid[:, None] - lines) / WIDTH) ** 2) / 2).sum(axis=1)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(grid, density, "C0")
axes.plot(lines, np.zeros_like(lines), "k|", markersize=12)
axes.set(xlabel="wave number (1/cm)", ylabel="vibrations", yticks=[], xlim=(0, grid[-1]))
axes.set_title(f"{args.molecule}, {args.model}")
figure.savefig(out / "vibrations.png", dpi=150)
print(f"files: {out / 'vibrations.png'}, {out / 'mode-*.traj'} (ase gui shows them)")
