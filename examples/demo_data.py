"""The data of the demo potential: structures with labels from ASE's EMT and from GFN2-xTB.

Two tasks: "omat" (EMT; Al, Ni, Cu, Pd, Ag, Pt, Au and their alloys) and "omol" (GFN2-xTB through tblite; H, C, N, O).
Structures come in groups that share a parent (one alloy cell and its strained copies, one trajectory, one set of
distorted copies of a molecule), and a group is never split between training and held-out data.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk, fcc100, fcc111
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.collections import g2, s22
from ase.data import covalent_radii, vdw_radii
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.optimize import BFGS
from scipy.sparse.csgraph import connected_components

TASKS = ("omat", "omol")
SEED = 20240607
FORCE_LIMIT = {"omat": 20.0, "omol": 15.0}  # eV/A; harsher geometries than these teach a small model nothing useful

# Molecules that people try first, and those whose closed-shell ions they try
POPULAR = ("H2O", "NH3", "CH4", "CH3OH", "CH3CH2OH", "CO2", "H2CO", "HCOOH")
BASES = (
    "H2O",
    "NH3",
    "CH3OH",
    "CH3CH2OH",
    "H2CO",
    "CH3CHO",
    "HCOOH",
    "CH3COOH",
    "CH3CONH2",
    "CH3OCH3",
    "CH3COCH3",
    "H3CNH2",
    "CH3CH2NH2",
    "C2H6NH",
    "C3H9N",
    "C5H5N",
    "HCN",
    "CH3CN",
    "N2H4",
)
ACIDS = ("H2O", "NH3", "CH3OH", "CH3CH2OH", "C2H6CHOH", "HCOOH", "CH3COOH", "CH3CONH2", "C4H4NH", "H2O2", "HCN", "C2H2")

# EMT's own equilibrium lattice constants of fcc, A
METALS = {"Al": 3.995, "Ni": 3.488, "Cu": 3.590, "Pd": 3.875, "Ag": 4.063, "Pt": 3.917, "Au": 4.057}
BCC_TO_FCC = 0.794  # the bcc cell edge with the same volume per atom, over the fcc one: (1/2)^(1/3)


@dataclass
class Frame:
    """One labelled structure: energy in eV, forces in eV/A, stress in eV/A^3 (NaN where not periodic)."""

    atoms: Atoms
    task: str
    charge: int
    spin: int
    energy: float
    forces: np.ndarray  # [N, 3]
    stress: np.ndarray  # [3, 3]


@dataclass(frozen=True)
class Job:
    """One group of structures: `make(rng, **options)` yields its frames."""

    make: Callable[..., Iterator[Frame]]
    options: dict = field(default_factory=dict)


def rounded(atoms: Atoms) -> Atoms:
    """A copy with the float32 positions and cell that are stored, so that labels belong to the stored geometry."""
    copy = Atoms(atoms.numbers, pbc=atoms.pbc)
    copy.cell[:] = atoms.cell.array.astype(np.float32)
    copy.positions[:] = atoms.positions.astype(np.float32)
    return copy


def label(atoms: Atoms, calc: Calculator, task: str, charge: int = 0, spin: int = 0) -> Frame | None:
    """The frame of `atoms` with labels of `calc`, or None where the forces pass the task's limit."""
    atoms = rounded(atoms)
    atoms.calc = calc
    forces = atoms.get_forces()
    if not np.isfinite(forces).all() or np.abs(forces).max() > FORCE_LIMIT[task]:
        return None
    stress = atoms.get_stress(voigt=False) if atoms.pbc.all() else np.full((3, 3), np.nan)
    energy = atoms.get_potential_energy()
    atoms.calc = None
    return Frame(atoms, task, charge, spin, energy, forces, stress)


# --------------------------------------------------------------------------------------------------------------- metals


def random_species(rng: np.random.Generator, count: int) -> list[str]:
    """Elements for `count` sites: pure in half of the cases, else an alloy of two or three metals."""
    kinds = 1 if count == 1 else int(rng.choice([1, 2, 3], p=[0.5, 0.35, 0.15]))
    chosen = rng.choice(list(METALS), size=kinds, replace=False)
    weights = rng.dirichlet(np.full(kinds, 2.0))
    return [str(s) for s in rng.choice(chosen, size=count, p=weights)]


def lattice_constant(species: list[str]) -> float:
    """Vegard's mean of EMT's fcc lattice constants, A."""
    return float(np.mean([METALS[s] for s in species]))


def crystal(rng: np.random.Generator, structure: str, repeat: tuple[int, int, int], cubic: bool) -> Atoms:
    """A cell of fcc, bcc or hcp with random species on its sites, near the volume that EMT prefers."""
    if structure == "fcc":
        cell = bulk("Cu", "fcc", a=1.0, cubic=cubic)
    elif structure == "bcc":
        cell = bulk("Cu", "bcc", a=BCC_TO_FCC, cubic=cubic)
    else:
        cell = bulk("Cu", "hcp", a=2**-0.5, c=2**-0.5 * rng.uniform(1.55, 1.72))
    cell = cell.repeat(repeat)
    species = random_species(rng, len(cell))
    cell.set_chemical_symbols(species)
    cell.set_cell(cell.cell * lattice_constant(species), scale_atoms=True)
    return cell


def deform(rng: np.random.Generator, atoms: Atoms, volumetric: float, shear: float) -> Atoms:
    """A copy under a random strain: isotropic within +-volumetric, each further component within +-shear."""
    strain = rng.uniform(-shear, shear, (3, 3))
    strain = (strain + strain.T) / 2 + np.eye(3) * (1 + rng.uniform(-volumetric, volumetric))
    copy = atoms.copy()
    copy.set_cell(atoms.cell.array @ strain, scale_atoms=True)
    return copy


def rattle(rng: np.random.Generator, atoms: Atoms, width: float) -> None:
    """Displace every atom by a normal deviate of `width` A, in place."""
    atoms.positions += rng.normal(scale=width, size=(len(atoms), 3))


def bulk_group(rng: np.random.Generator, frames: int) -> Iterator[Frame | None]:
    """One crystal of 1 to 32 atoms, strained by up to 8 % and rattled by 0.01 to 0.35 A."""
    structure = str(rng.choice(["fcc", "bcc", "hcp"], p=[0.7, 0.15, 0.15]))
    repeats = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 3), (2, 2, 4), (3, 3, 3)]
    repeat = repeats[rng.choice(len(repeats), p=[0.1, 0.1, 0.2, 0.25, 0.15, 0.1, 0.1])]
    if structure == "hcp":
        repeat = (max(1, repeat[0] - 1), max(1, repeat[1] - 1), max(1, repeat[2] - 1))
    parent = crystal(rng, structure, repeat, cubic=False)
    for _ in range(frames):
        atoms = deform(rng, parent, 0.08, 0.04)
        rattle(rng, atoms, rng.choice([rng.uniform(0.01, 0.12), rng.uniform(0.12, 0.35)], p=[0.6, 0.4]))
        yield label(atoms, EMT(), "omat")


def equation_of_state_group(
    rng: np.random.Generator, symbol: str, structure: str, frames: int
) -> Iterator[Frame | None]:
    """One pure crystal over +-8 % in length, hardly rattled: lattice and elastic constants depend on these."""
    parent = crystal(rng, structure, (1, 1, 1), cubic=structure != "hcp")
    parent.symbols[:] = symbol
    scale = METALS[symbol] / (parent.cell.volume * 4 / len(parent)) ** (1 / 3)
    parent.set_cell(parent.cell * scale, scale_atoms=True)
    for _ in range(frames):
        atoms = deform(rng, parent, 0.08, rng.choice([0.0, 0.02]))
        rattle(rng, atoms, rng.choice([0.0, 0.02]))
        yield label(atoms, EMT(), "omat")


def vacancy_group(rng: np.random.Generator, frames: int) -> Iterator[Frame | None]:
    """An fcc cell of 16 to 32 sites with one or two of them empty."""
    parent = crystal(rng, "fcc", *([((2, 2, 2), True), ((2, 2, 4), False), ((3, 3, 2), False)][rng.integers(3)]))
    for _ in range(rng.integers(1, 3)):
        del parent[rng.integers(len(parent))]
    for _ in range(frames):
        atoms = deform(rng, parent, 0.04, 0.03)
        rattle(rng, atoms, rng.uniform(0.02, 0.25))
        yield label(atoms, EMT(), "omat")


def slab_group(rng: np.random.Generator, frames: int) -> Iterator[Frame | None]:
    """An fcc(111) or fcc(100) slab of 3 to 6 layers with 12 A of vacuum, sometimes with an adatom."""
    build = [fcc111, fcc100][rng.integers(2)]
    rows, columns, most_layers = [(1, 1, 6), (1, 2, 5), (2, 2, 4)][rng.integers(3)]
    parent = build("Cu", (rows, columns, int(rng.integers(3, most_layers + 1))), a=1.0, vacuum=None)
    species = random_species(rng, len(parent))
    parent.set_chemical_symbols(species)
    constant = lattice_constant(species)
    parent = Atoms(species, parent.positions * constant, cell=parent.cell.array * constant, pbc=True)
    if columns == 2 and rng.random() < 0.4:
        top = parent.positions[parent.positions[:, 2].argmax()]
        side = rng.uniform(-0.5, 0.5, 2) @ parent.cell.array[:2, :2]
        parent += Atoms([str(rng.choice(list(METALS)))], [top + np.array([*side, rng.uniform(0.45, 0.65) * constant])])
    for _ in range(frames):
        atoms = parent.copy()
        rattle(rng, atoms, rng.uniform(0.01, 0.25))
        height = np.ptp(atoms.positions[:, 2])
        atoms.cell[2] = [0.0, 0.0, height + 12.0]
        in_plane = deform(rng, atoms, 0.04, 0.03).cell.array[:2]
        atoms.set_cell([[*in_plane[0, :2], 0.0], [*in_plane[1, :2], 0.0], atoms.cell.array[2]], scale_atoms=True)
        yield label(atoms, EMT(), "omat")


def cluster_group(rng: np.random.Generator, frames: int) -> Iterator[Frame | None]:
    """A free cluster of 2 to 20 atoms cut from a crystal."""
    count = int(rng.integers(2, 21))
    species = random_species(rng, count)
    block = bulk("Cu", "fcc", a=lattice_constant(species), cubic=True).repeat(4)
    centre = block.cell.sum(axis=0) / 2 + rng.normal(scale=1.0, size=3)
    nearest = np.argsort(np.linalg.norm(block.positions - centre, axis=1))[:count]
    parent = Atoms(species, block.positions[nearest])
    for _ in range(frames):
        atoms = parent.copy()
        atoms.positions *= rng.uniform(0.9, 1.1)
        rattle(rng, atoms, rng.uniform(0.02, 0.3))
        yield label(atoms, EMT(), "omat")


def metal_trajectory(rng: np.random.Generator, frames: int, stride: int) -> Iterator[Frame | None]:
    """Langevin dynamics of 16 to 32 atoms at 300 to 1800 K in a cell expanded by up to 3 %."""
    atoms = crystal(rng, "fcc", *([((2, 2, 2), True), ((2, 2, 4), False), ((3, 3, 3), False)][rng.integers(3)]))
    atoms = deform(rng, atoms, 0.0, 0.01)
    atoms.set_cell(atoms.cell * rng.uniform(0.99, 1.03), scale_atoms=True)
    temperature = rng.uniform(300, 1800)
    yield from trajectory(rng, atoms, EMT(), temperature, 4.0, frames, stride, "omat")


def trajectory(
    rng: np.random.Generator,
    atoms: Atoms,
    calc: Calculator,
    temperature: float,
    timestep: float,
    frames: int,
    stride: int,
    task: str,
    charge: int = 0,
    spin: int = 0,
) -> Iterator[Frame | None]:
    """Every `stride`-th step (fs) of Langevin dynamics at `temperature` (K)."""
    atoms.calc = calc
    MaxwellBoltzmannDistribution(atoms, temperature_K=temperature, rng=rng)
    options = {"temperature_K": temperature, "friction": 0.05 / units.fs, "rng": rng, "fixcm": False}
    dynamics = Langevin(atoms, timestep * units.fs, **options)
    for _ in range(frames):
        dynamics.run(stride)
        yield label(atoms, calc, task, charge, spin)


# ------------------------------------------------------------------------------------------------------------ molecules


def xtb(charge: int, spin: int) -> Calculator:
    """A fresh GFN2-xTB calculator; `spin` is the multiplicity."""
    from tblite.ase import TBLite  # needed for data generation and the card only

    return TBLite(method="GFN2-xTB", charge=charge, multiplicity=spin, verbosity=0)


def bonded(atoms: Atoms) -> np.ndarray:
    """Which atoms are bonded, bool [N, N]: closer than 1.25 times the sum of their covalent radii."""
    radii = covalent_radii[atoms.numbers]
    distances = atoms.get_all_distances()
    return (distances < 1.25 * (radii[:, None] + radii)) & ~np.eye(len(atoms), dtype=bool)


def protonated(atoms: Atoms) -> Atoms:
    """A copy with H added on the side that the most basic atom leaves open: N before O, then the fewest bonds."""
    bonds = bonded(atoms)
    sites = [i for i in range(len(atoms)) if atoms.symbols[i] in "NO"]
    site = min(sites, key=lambda i: (atoms.symbols[i] == "O", bonds[i].sum()))
    away = atoms.positions[site] - atoms.positions[bonds[site]]
    direction = (away / np.linalg.norm(away, axis=1)[:, None]).sum(axis=0)
    direction += np.array([0.05, 0.03, 0.02])  # off any plane or line
    return atoms + Atoms("H", [atoms.positions[site] + 1.02 * direction / np.linalg.norm(direction)])


def deprotonated(atoms: Atoms) -> Atoms:
    """A copy without the H of the most acidic bond: of O, else of N, else of C."""
    bonds = bonded(atoms)
    acidity = {"O": 0, "N": 1, "C": 2, "H": 3}
    partner = {i: atoms.symbols[np.flatnonzero(bonds[i])[0]] for i in np.flatnonzero(atoms.numbers == 1)}
    copy = atoms.copy()
    del copy[min(partner, key=lambda i: acidity[partner[i]])]
    return copy


@functools.cache
def molecule(name: str, charge: int) -> tuple[Atoms, int]:
    """A species relaxed with GFN2-xTB, and its multiplicity.

    `name` is one of ASE's g2 or s22 collection; a suffix "+H" or "-H" adds or takes a proton. The multiplicity is the
    collection's when neutral, else the lowest that the number of electrons allows.
    """
    base = name.removesuffix("+H").removesuffix("-H")
    source = g2[base] if base in g2.names else s22[base]
    atoms = Atoms(source.numbers, source.positions)
    if name.endswith("+H"):
        atoms = protonated(atoms)
    elif name.endswith("-H"):
        atoms = deprotonated(atoms)
    if charge == 0:
        spin = round(source.get_initial_magnetic_moments().sum()) + 1
    else:
        spin = 1 + (int(atoms.numbers.sum()) - charge) % 2
    relax(atoms, xtb(charge, spin), 0.05, 60)
    return atoms, spin


def relax(atoms: Atoms, calc: Calculator, limit: float, steps: int) -> None:
    """Relax `atoms` in place until no force passes `limit` (eV/A) or `steps` are done."""
    atoms.calc = calc
    BFGS(atoms, logfile=None).run(fmax=limit, steps=steps)
    atoms.calc = None


def conformer(rng: np.random.Generator, atoms: Atoms) -> Atoms:
    """A copy turned at random about each of its single bonds between heavy atoms that is in no ring."""
    copy = atoms.copy()
    bonds = bonded(atoms)
    for first, second in np.argwhere(np.triu(bonds)):
        if 1 in atoms.numbers[[first, second]] or atoms.get_distance(first, second) < 1.4:
            continue
        opened = bonds.copy()
        opened[first, second] = opened[second, first] = False
        part = connected_components(opened)[1]
        side = part == part[second]
        if side[first] or side.sum() == 1 or (part == part[first]).sum() == 1:
            continue
        turned = copy[side]
        axis = copy.positions[second] - copy.positions[first]
        turned.rotate(rng.uniform(0, 360), axis, center=copy.positions[first])
        copy.positions[side] = turned.positions
    return copy


def with_displaced(
    rng: np.random.Generator, frames: Iterator[Frame | None], calc: Calculator, width: float
) -> Iterator[Frame | None]:
    """Each frame, followed by a copy of it rattled by up to `width` A."""
    for frame in frames:
        yield frame
        if frame is not None:
            atoms = frame.atoms.copy()
            rattle(rng, atoms, rng.uniform(0.01, width))
            yield label(atoms, calc, frame.task, frame.charge, frame.spin)


def molecule_trajectory(
    rng: np.random.Generator, name: str, charge: int, frames: int, stride: int
) -> Iterator[Frame | None]:
    """Langevin dynamics of one conformer at 200 to 900 K, with displaced copies."""
    parent, spin = molecule(name, charge)
    atoms, calc = conformer(rng, parent), xtb(charge, spin)
    relax(atoms, calc, 1.0, 20)
    steps = trajectory(rng, atoms, calc, rng.uniform(200, 900), 1.0, frames, stride, "omol", charge, spin)
    yield from with_displaced(rng, steps, xtb(charge, spin), 0.08)


def distorted_molecule(rng: np.random.Generator, name: str, charge: int, frames: int) -> Iterator[Frame | None]:
    """One conformer rattled, breathed, and half of the time with one bond stretched."""
    parent, spin = molecule(name, charge)
    parent, calc = conformer(rng, parent), xtb(charge, spin)
    relax(parent, calc, 0.5, 20)
    for _ in range(frames):
        atoms = parent.copy()
        atoms.positions *= rng.uniform(0.97, 1.04)
        rattle(rng, atoms, rng.uniform(0.0, 0.1))
        if rng.random() < 0.5:
            stretch_bond(rng, atoms)
        yield label(atoms, calc, "omol", charge, spin)


def stretch_bond(rng: np.random.Generator, atoms: Atoms) -> None:
    """Move one atom, in place, along the line to its nearest neighbour: 0.85 to 1.2 times their distance."""
    moved = int(rng.integers(len(atoms)))
    distances = atoms.get_distances(moved, range(len(atoms)))
    distances[moved] = np.inf
    partner = int(distances.argmin())
    bond = atoms.positions[moved] - atoms.positions[partner]
    atoms.positions[moved] += bond * rng.uniform(-0.15, 0.2)


def pair(rng: np.random.Generator, first: Atoms, second: Atoms, gap: float) -> Atoms:
    """Both at random orientations, as close as `gap` times the sum of van der Waals radii of every two atoms allows."""
    parts = []
    for part in (first.copy(), second.copy()):
        part.positions -= part.get_center_of_mass()
        rattle(rng, part, rng.uniform(0.0, 0.06))
        part.rotate(rng.uniform(0, 180), rng.normal(size=3))
        parts.append(part)
    closest = gap * (vdw_radii[parts[0].numbers][:, None] + vdw_radii[parts[1].numbers])
    direction = rng.normal(size=3)
    direction /= np.linalg.norm(direction)
    for distance in np.arange(0.0, 16.0, 0.05):
        apart = parts[1].positions + direction * distance
        if (np.linalg.norm(apart - parts[0].positions[:, None], axis=-1) > closest).all():
            break
    return Atoms(np.concatenate([p.numbers for p in parts]), np.concatenate([parts[0].positions, apart]))


def pair_group(
    rng: np.random.Generator, names: tuple[str, str], charges: tuple[int, int], frames: int
) -> Iterator[Frame | None]:
    """Two closed-shell species side by side, from near contact to out of reach of each other."""
    (first, _), (second, _) = (molecule(name, charge) for name, charge in zip(names, charges, strict=True))
    for _ in range(frames):
        gap = rng.uniform(0.65, 1.0) if rng.random() < 0.7 else rng.uniform(1.0, 1.6)
        yield label(pair(rng, first, second, gap), xtb(sum(charges), 1), "omol", sum(charges), 1)


def pair_trajectory(
    rng: np.random.Generator, names: tuple[str, str], charges: tuple[int, int], frames: int, stride: int
) -> Iterator[Frame | None]:
    """Langevin dynamics of two closed-shell species that start close together, with displaced copies."""
    (first, _), (second, _) = (molecule(name, charge) for name, charge in zip(names, charges, strict=True))
    atoms, calc = pair(rng, first, second, rng.uniform(0.75, 1.0)), xtb(sum(charges), 1)
    relax(atoms, calc, 1.0, 20)
    steps = trajectory(rng, atoms, calc, rng.uniform(100, 500), 1.0, frames, stride, "omol", sum(charges), 1)
    yield from with_displaced(rng, steps, xtb(sum(charges), 1), 0.08)


# -------------------------------------------------------------------------------------------------------------- the set


def organic(names: list[str], source: object) -> list[str]:
    """The names whose molecules hold nothing but H, C, N and O, and more than one atom."""
    return [n for n in names if set(source[n].symbols) <= set("HCNO") and len(source[n]) > 1]


def jobs(scale: float) -> list[Job]:
    """The whole set as groups; `scale` shrinks or grows it (1: about 7,000 metal and 50,000 molecule frames)."""

    def many(count: float) -> range:
        return range(max(1, round(count * scale)))

    plan = [Job(bulk_group, {"frames": 4}) for _ in many(1000)]
    for symbol, (structure, groups) in itertools.product(METALS, {"fcc": 6, "bcc": 2, "hcp": 2}.items()):
        options = {"symbol": symbol, "structure": structure, "frames": 8}
        plan += [Job(equation_of_state_group, options) for _ in many(groups)]
    plan += [Job(vacancy_group, {"frames": 4}) for _ in many(120)]
    plan += [Job(slab_group, {"frames": 4}) for _ in many(190)]
    plan += [Job(cluster_group, {"frames": 4}) for _ in many(150)]
    plan += [Job(metal_trajectory, {"frames": 14, "stride": 12}) for _ in many(80)]

    def around(name: str, charge: int, trajectories: float, distorted: float) -> list[Job]:
        moving = Job(molecule_trajectory, {"name": name, "charge": charge, "frames": 8, "stride": 5})
        still = Job(distorted_molecule, {"name": name, "charge": charge, "frames": 8})
        return [moving for _ in many(trajectories)] + [still for _ in many(distorted)]

    small = organic(g2.names, g2)
    for name in small:
        plan += around(name, 0, 12, 18) + around(name, 1, 3, 3)
        if g2[name].get_initial_magnetic_moments().sum() > 0:  # of the others few bind an electron
            plan += around(name, -1, 4, 4)
    for name in POPULAR:
        plan += around(name, 0, 16, 24)
    for charge in (-1, 1):
        plan += around("NO2", charge, 12, 12)
    for name in BASES:
        plan += around(f"{name}+H", 1, 8, 8)
    for name in ACIDS:
        plan += around(f"{name}-H", -1, 8, 8)
    for name in organic(s22.names, s22):
        options = {"name": name, "charge": 0, "frames": 6, "stride": 5}
        plan += [Job(molecule_trajectory, options) for _ in many(6)]
    closed = [n for n in small if g2[n].get_initial_magnetic_moments().sum() == 0 and len(g2[n]) <= 12]
    ions = [(f"{name}+H", 1) for name in BASES] + [(f"{name}-H", -1) for name in ACIDS]
    picker = np.random.default_rng([SEED, 1])
    for _ in many(800):
        first, second = ((str(name), 0) for name in picker.choice(closed, 2))
        if picker.random() < 0.25:
            first = ("H2O", 0)
        if picker.random() < 0.12:
            second = ions[picker.integers(len(ions))]
        options = dict(zip(("names", "charges"), zip(first, second, strict=True), strict=True))
        plan.append(Job(pair_group, options | {"frames": 5}))
        plan.append(Job(pair_trajectory, options | {"frames": 3, "stride": 5}))
    water = {"names": ("H2O", "H2O"), "charges": (0, 0)}
    plan += [Job(pair_group, water | {"frames": 10}) for _ in many(20)]
    plan += [Job(pair_trajectory, water | {"frames": 8, "stride": 5}) for _ in many(20)]
    return plan


def run_job(index: int, job: Job) -> list[Frame]:
    """The labelled frames of group `index`; geometries whose electronic structure does not converge are left out."""
    rng = np.random.default_rng([SEED, 0, index])
    frames: list[Frame] = []
    iterator = job.make(rng, **job.options)
    while True:
        try:
            frame = next(iterator)
        except StopIteration:
            return frames
        except RuntimeError:  # tblite's word for no convergence; a generator that raised is finished
            return frames
        if frame is not None:
            frames.append(frame)


def generate(path: Path, scale: float, workers: int) -> dict[str, np.ndarray]:
    """Generate every group and write them to `path` (npz)."""
    plan = jobs(scale)
    with ProcessPoolExecutor(workers) as pool:
        groups = list(pool.map(run_job, range(len(plan)), plan, chunksize=8))
    arrays = pack(groups)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return arrays


def pack(groups: list[list[Frame]]) -> dict[str, np.ndarray]:
    """Flat arrays of all frames: atoms one after another, one row per frame for the rest."""
    frames = [(index, frame) for index, group in enumerate(groups) for frame in group]
    return {
        "group": np.array([index for index, _ in frames], np.int32),
        "task": np.array([TASKS.index(f.task) for _, f in frames], np.int8),
        "natoms": np.array([len(f.atoms) for _, f in frames], np.int32),
        "charge": np.array([f.charge for _, f in frames], np.int8),
        "spin": np.array([f.spin for _, f in frames], np.int8),
        "periodic": np.array([f.atoms.pbc.all() for _, f in frames]),
        "cell": np.array([f.atoms.cell.array for _, f in frames], np.float32),
        "energy": np.array([f.energy for _, f in frames], np.float64),
        "stress": np.array([f.stress for _, f in frames], np.float32),
        "numbers": np.concatenate([f.atoms.numbers for _, f in frames]).astype(np.uint8),
        "positions": np.concatenate([f.atoms.positions for _, f in frames]).astype(np.float32),
        "forces": np.concatenate([f.forces for _, f in frames]).astype(np.float32),
    }


def held_out(group: np.ndarray) -> np.ndarray:
    """True for the frames of a fixed random tenth of the groups."""
    chosen = np.random.default_rng([SEED, 2]).random(int(group.max()) + 1) < 0.1
    return chosen[group]


def describe(arrays: dict[str, np.ndarray]) -> str:
    """A few lines of statistics, one per task."""
    lines = []
    offsets = np.concatenate([[0], np.cumsum(arrays["natoms"])])
    for index, name in enumerate(TASKS):
        chosen = np.flatnonzero(arrays["task"] == index)
        forces = np.concatenate([arrays["forces"][offsets[i] : offsets[i + 1]] for i in chosen])
        lines.append(
            f"{name}: {len(chosen)} frames in {len(np.unique(arrays['group'][chosen]))} groups, "
            f"{arrays['natoms'][chosen].mean():.1f} atoms on average, force RMS {np.sqrt((forces**2).mean()):.2f} eV/A"
        )
    return "\n".join(lines)
