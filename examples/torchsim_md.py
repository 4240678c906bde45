"""Many crystals at once in TorchSim: molecular dynamics at constant energy, then a relaxation of where it ended.

All crystals move together, and each step evaluates all of them in one pass; with the fused backend positions stay on
the GPU. TorchSim relaxes with FIRE and takes crystals out of the batch once they have converged.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch_sim as ts
from ase.build import bulk
from new_folder import new_folder

from ase_fastuma.torchsim import FastUMAModel

matplotlib.use("Agg")  # plots go to files; no display is needed
import matplotlib.pyplot as plt

# Lattice constant (A) and the elements on the four sites of a cubic cell.
CRYSTALS = {"Cu": (3.6, "Cu4"), "Al": (4.0, "Al4"), "Cu3Au": (3.75, "AuCu3"), "Ni3Al": (3.55, "AlNi3")}
TIMESTEP = 0.004  # ps
START_TEMPERATURE = 600.0  # K; half of it becomes potential energy

# TorchSim 0.6, or 0.3
NVE, FIRE = (ts.Integrator.nve, ts.Optimizer.fire) if hasattr(ts, "Integrator") else (ts.nve, ts.optimizers.fire)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--cells", type=int, default=1, help="cells of 4 atoms in each crystal")
parser.add_argument("--steps", type=int, default=60, help="time steps (at least 2)")
parser.add_argument("--fmax", type=float, default=0.02, help="largest force of a relaxed crystal (eV/A)")
parser.add_argument("--out", type=Path, help="a new folder for the files (default: fastuma-torchsim-md)")
args = parser.parse_args()
if args.steps < 2 or args.cells < 1:
    parser.error(f"--steps and --cells: expected at least 2 and 1, got {args.steps} and {args.cells}")
out = new_folder(args.out, "torchsim-md")
logging.getLogger("torch_sim").setLevel(logging.WARNING)

structures = []
for lattice_constant, symbols in CRYSTALS.values():
    atoms = bulk("Cu", a=lattice_constant, cubic=True)
    atoms.symbols = symbols
    structures.append(atoms * (args.cells, 1, 1))
model = FastUMAModel(args.model)
print(model.calculator.report(), flush=True)


def kinetic_energy(state: ts.SimState) -> torch.Tensor:
    """Of one crystal, eV."""
    return ts.calc_kinetic_energy(momenta=state.momenta, masses=state.masses)


files = {name: out / f"{name}.h5md" for name in CRYSTALS}
moved = ts.integrate(
    structures,
    model,
    integrator=NVE,
    n_steps=args.steps,
    temperature=START_TEMPERATURE,
    timestep=TIMESTEP,
    trajectory_reporter=ts.TrajectoryReporter(
        list(files.values()),
        state_frequency=10,
        prop_calculators={1: {"potential": lambda state: state.energy, "kinetic": kinetic_energy}},
    ),
)
relaxed = ts.optimize(
    moved,
    model,
    optimizer=FIRE,
    convergence_fn=ts.generate_force_convergence_fn(args.fmax, include_cell_forces=False),
    max_steps=300,
)

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
times = TIMESTEP * np.arange(1, args.steps + 1)
print("\n        potential energy  change of the total  relaxed energy  largest force")
print("        moved, meV/atom   max, meV/atom        eV/atom         left, eV/A")
for system, (name, path) in enumerate(files.items()):
    with ts.TorchSimTrajectory(path) as trajectory:
        potential, kinetic = (
            1e3 * trajectory.get_array(key).reshape(-1)[-args.steps :] / len(structures[system])
            for key in ("potential", "kinetic")
        )
    total = potential + kinetic
    atoms = relaxed.system_idx == system
    energy, force = float(relaxed.energy[system]) / int(atoms.sum()), float(relaxed.forces[atoms].norm(dim=1).max())
    print(f"{name:8}{np.ptp(potential):<18.1f}{np.abs(total - total[0]).max():<21.3f}{energy:<16.4f}{force:.4f}")
    axes.plot(times, total - total[0], label=name)
axes.set(
    xlabel="time (ps)", ylabel="change of the total energy (meV/atom)", title=f"{args.model}, {1e3 * TIMESTEP:g} fs"
)
axes.legend()
figure.savefig(out / "energies.png", dpi=150)
print(f"files: {out / 'energies.png'}, {', '.join(map(str, files.values()))}")
