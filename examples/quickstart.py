"""Molecular dynamics of copper at constant energy: how fast it runs, and how well the energy is conserved.

Velocity Verlet from a perfect crystal. Half of the starting kinetic energy becomes potential energy within a few
tenths of a picosecond, so the crystal ends up near room temperature.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import numpy as np
from ase import units
from ase.build import bulk
from ase.io import Trajectory
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from new_folder import new_folder
from tqdm import tqdm

from ase_fastuma import FastUMACalculator

matplotlib.use("Agg")  # plots go to files; no display is needed
import matplotlib.pyplot as plt

TIMESTEP = 4.0  # fs; copper's fastest vibration takes about 130 fs
START_TEMPERATURE = 600.0  # K

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--size", type=int, default=3, help="cells of 4 atoms along each axis")
parser.add_argument("--steps", type=int, default=120, help="time steps (at least 1)")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-quickstart)")
args = parser.parse_args()
if args.steps < 1 or args.size < 1:
    parser.error(f"--steps and --size: expected at least 1, got {args.steps} and {args.size}")
out = new_folder(args.out, "quickstart")

atoms = bulk("Cu", cubic=True) * (args.size, args.size, args.size)
atoms.calc = FastUMACalculator(args.model)
thermalize_momenta(atoms, START_TEMPERATURE, rng=np.random.default_rng(1))
Stationary(atoms)  # the crystal as a whole stays where it is
atoms.get_forces()  # loads the model, so that the timing below does not include it
print(atoms.calc.report(), flush=True)

dynamics = VelocityVerlet(atoms, timestep=TIMESTEP * units.fs)
dynamics.attach(Trajectory(out / "copper.traj", "w", atoms), interval=max(1, args.steps // 30))
energies = []  # eV per atom: potential, kinetic
start = time.perf_counter()
for _ in tqdm(dynamics.irun(args.steps), total=args.steps + 1, unit="step"):  # the start counts as well
    energies.append((atoms.get_potential_energy() / len(atoms), atoms.get_kinetic_energy() / len(atoms)))
seconds = (time.perf_counter() - start) / args.steps

times = TIMESTEP * 1e-3 * np.arange(args.steps + 1)  # ps
potential, kinetic = 1e3 * np.array(energies).T  # meV per atom
total = potential + kinetic - potential[0] - kinetic[0]
settled = len(times) // 2  # the crystal takes a while to share its energy out
drift = np.polyfit(times[settled:], total[settled:], 1)[0]
print(f"\natoms                {len(atoms)}")
print(f"speed                {1e3 * seconds:.1f} ms/step, {86400 / seconds * TIMESTEP * 1e-6:.3f} ns/day")
print(f"energy drift         {drift:+.4f} meV/atom/ps")
print(f"energy fluctuation   {total[settled:].std():.4f} meV/atom")
print(f"final temperature    {atoms.get_temperature():.0f} K")

figure, axes = plt.subplots(2, 1, sharex=True, figsize=(6, 5), layout="constrained")
axes[0].plot(times, potential - potential[0], label="potential")
axes[0].plot(times, kinetic, label="kinetic")
axes[0].plot(times, total + kinetic[0], "k", label="total")
axes[0].set(ylabel="energy (meV/atom)", title=f"{len(atoms)} Cu atoms, {args.model}, {TIMESTEP:g} fs steps")
axes[0].legend()
axes[1].plot(times, total, "k")
axes[1].set(xlabel="time (ps)", ylabel="change of the total\nenergy (meV/atom)")
figure.savefig(out / "energies.png", dpi=150)
print(f"files                {out / 'energies.png'}, {out / 'copper.traj'}")
