"""The structures that the benchmarks time, by the name that stands in their rows."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk, molecule, nanotube

# Cubic fcc cells along each axis, by the number of atoms.
CELLS = {4: (1, 1, 1), 32: (2, 2, 2), 108: (3, 3, 3), 256: (4, 4, 4), 500: (5, 5, 5), 1000: (5, 5, 10)}
CELLS |= {2048: (8, 8, 8), 8788: (13, 13, 13), 12000: (10, 15, 20), 16384: (16, 16, 16), 32000: (20, 20, 20)}
CELLS |= {1_000_188: (63, 63, 63)}

# Lattice constant (A) and the elements on the sites of the cubic cell: copper, CuAu in layers, Ni3Al.
CRYSTALS = {
    "cu": (3.6, ["Cu", "Cu", "Cu", "Cu"]),
    "cuau": (3.87, ["Cu", "Au", "Au", "Cu"]),
    "ni3al": (3.57, ["Al", "Ni", "Ni", "Ni"]),
}


def build(name: str) -> tuple[Atoms, str]:
    """A rattled structure and its task.

    Names are "cu:1000", "cuau:108", "ni3al:108", "water" (192 atoms), "benzene", "c60" and "nanotube" (C100).
    """
    crystal, _, size = name.partition(":")
    if crystal in CRYSTALS and size.isdecimal() and int(size) in CELLS:
        lattice_constant, elements = CRYSTALS[crystal]
        cell = bulk("Cu", "fcc", a=lattice_constant, cubic=True)
        cell.symbols = elements
        atoms = cell * CELLS[int(size)]
        atoms.rattle(0.1, seed=1)
        return atoms, "omat"
    if name in ("benzene", "c60", "nanotube"):
        atoms = nanotube(5, 5, length=5) if name == "nanotube" else molecule({"benzene": "C6H6", "c60": "C60"}[name])
        atoms.pbc = False
        atoms.rattle(0.05, seed=1)
        return atoms, "omol"
    if name == "water":
        rng = np.random.default_rng(1)
        spacing = (18.015 / 0.602214 / 1.0) ** (1 / 3)  # A, one molecule of water at 1 g/cm^3
        box = molecule("H2O")
        atoms = Atoms(cell=[4 * spacing] * 3, pbc=True)
        for site in np.ndindex(4, 4, 4):
            one = box.copy()
            one.euler_rotate(*(360 * rng.random(3)), center="COM")
            one.translate((np.array(site) + 0.5) * spacing - one.get_center_of_mass())
            atoms += one
        atoms.rattle(0.02, seed=1)
        return atoms, "omat"
    molecules = "benzene, c60, nanotube, water"
    raise ValueError(f"system: expected {molecules} or one of {list(CRYSTALS)} with :N of {list(CELLS)}, got {name!r}")
