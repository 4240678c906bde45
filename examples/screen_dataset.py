"""Relax a dataset of structures on several workers, and list the alloys that gain most energy by mixing.

Reads and writes extended XYZ (.extxyz) or ASE databases (.db). Workers write what they have finished as they go: one
that dies is replaced, and a run that was stopped goes on where it was when it is started again. Without a source, the
example makes one: ordered fcc alloys of seven metals and the metals themselves.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.data import reference_states
from ase.db import connect
from ase.io import iread, write

from ase_fastuma.ray import Relaxation, evaluate_dataset

METALS = ["Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au"]


def ordered_alloys(metals: list[str]) -> list[Atoms]:
    """The metals, and A3B (L1_2), AB (L1_0) and AB3 of each pair, in four-atom cells of mean lattice constant."""
    structures = []
    for pair in itertools.combinations_with_replacement(metals, 2):
        for fraction in (1, 2, 3) if pair[0] != pair[1] else (4,):
            symbols = [pair[0]] * fraction + [pair[1]] * (4 - fraction)
            atoms = bulk("Cu", a=np.mean([reference_states[bulk(s).numbers[0]]["a"] for s in symbols]), cubic=True)
            atoms.symbols = symbols
            structures.append(atoms)
    return structures


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("source", nargs="?", type=Path, default=Path("alloys.extxyz"), help="made where it does not exist")
parser.add_argument("destination", nargs="?", type=Path, default=Path("alloys-relaxed.extxyz"), help="a new file")
parser.add_argument("--model", default="demo", help="a registered model, a checkpoint file, or 'demo'")
parser.add_argument("--device", help="'cpu' or 'cuda' (default: CUDA where there is one)")
parser.add_argument("--workers", type=int, default=2, help="processes, with one CPU or GPU each")
parser.add_argument("--block-size", type=int, default=8, help="structures between two writes of a worker")
parser.add_argument("--no-relaxation", action="store_true", help="take the structures as they are")
args = parser.parse_args()
if args.destination.exists():
    parser.error(f"destination: expected a new file, got {args.destination}")
if not args.source.exists():
    write(args.source, ordered_alloys(METALS), format="extxyz")

failed = evaluate_dataset(
    args.source,
    args.destination,
    args.model,
    properties=("energy", "forces", "stress"),
    relaxation=None if args.no_relaxation else Relaxation(fmax=0.02, cell=True),
    workers=args.workers,
    block_size=args.block_size,
    device=args.device,
)
rows = connect(args.destination).select() if args.destination.suffix == ".db" else iread(args.destination)
structures = [row if isinstance(row, Atoms) else row.toatoms() for row in rows]
energies = {i: atoms.get_potential_energy() for i, atoms in enumerate(structures) if i not in failed}  # eV
pure: dict[str, float] = {}  # eV per atom
for i, energy in energies.items():
    elements = set(structures[i].symbols)
    if len(elements) == 1:
        pure[min(elements)] = min(energy / len(structures[i]), pure.get(min(elements), np.inf))
gains = {
    i: (energy - sum(pure[symbol] for symbol in structures[i].symbols)) / len(structures[i])
    for i, energy in energies.items()
    if set(structures[i].symbols) <= pure.keys() and len(set(structures[i].symbols)) > 1
}
print(f"structures   {len(structures)}, of which {len(failed)} failed")
for i in sorted(gains, key=gains.get)[:10]:
    print(f"{structures[i].get_chemical_formula():12} {1e3 * gains[i]:+8.1f} meV/atom")
print(f"files        {args.destination}")
