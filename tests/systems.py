"""Small structures that many tests share."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk, fcc111, molecule


def nacl() -> Atoms:
    """Rock salt, eight atoms, rattled."""
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=1)
    return atoms


def copper() -> Atoms:
    """fcc copper, four atoms, rattled."""
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=2)
    return atoms


def water() -> Atoms:
    """One water molecule, no cell."""
    return molecule("H2O")


def slab() -> Atoms:
    """Pt(111), twelve atoms, rattled, periodic along two axes, third vector zero."""
    atoms = fcc111("Pt", (2, 2, 3))
    atoms.rattle(0.05, seed=3)
    return atoms


def triclinic() -> Atoms:
    """Rattled rock salt in a cell without right angles."""
    atoms = nacl()
    atoms.set_cell(atoms.cell @ np.array([[1.0, 0.05, 0.02], [0.1, 0.98, 0.04], [-0.06, 0.03, 1.03]]), scale_atoms=True)
    return atoms
