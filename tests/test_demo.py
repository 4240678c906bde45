"""What the model card says of the bundled potential, against the methods that labelled its training."""

from __future__ import annotations

import numpy as np
import pytest
from ase import units
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.eos import EquationOfState
from ase.optimize import BFGS

from ase_fastuma import FastUMACalculator


def lattice_and_bulk_modulus(calc) -> tuple[float, float]:
    volumes, energies = [], []
    for a in np.linspace(3.48, 3.70, 7):
        atoms = bulk("Cu", a=a)
        atoms.calc = calc
        volumes.append(atoms.get_volume())
        energies.append(atoms.get_potential_energy())
    volume, _, modulus = EquationOfState(volumes, energies, eos="birchmurnaghan").fit()
    return (4 * volume) ** (1 / 3), modulus / units.GPa


def test_copper_follows_emt():
    lattice, modulus = lattice_and_bulk_modulus(
        FastUMACalculator("demo", task="omat", device="cpu", precision="float64")
    )
    emt_lattice, emt_modulus = lattice_and_bulk_modulus(EMT())
    assert lattice == pytest.approx(emt_lattice, abs=0.01)
    assert modulus == pytest.approx(emt_modulus, rel=0.1)


def test_water_follows_gfn2_xtb():
    water = molecule("H2O")
    water.calc = FastUMACalculator("demo", task="omol", device="cpu")
    BFGS(water, logfile=None).run(fmax=0.005, steps=50)
    assert water.get_distance(0, 1) == pytest.approx(0.9592, abs=0.02)  # GFN2-xTB through tblite 0.8
    assert water.get_angle(1, 0, 2) == pytest.approx(107.22, abs=3.0)
