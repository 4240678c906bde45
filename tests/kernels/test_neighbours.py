"""The neighbour list: plain path against ASE and fairchem-core, kernels against the plain path, and invariants."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.neighborlist import primitive_neighbor_list
from ase_fastuma.kernels import many_neighbours
from ase_fastuma.kernels import neighbours as module
from ase_fastuma.kernels._launch import INTERPRETED
from ase_fastuma.kernels.neighbours import NeighbourList, neighbour_list
from devices import waits_counted

CUTOFF = 6.0

kernels_run = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)


def scattered(n_atoms: int, cell: list, pbc: object, seed: int, spread: float = 1.0) -> Atoms:
    """Atoms at random places of a cell."""
    places = np.random.default_rng(seed).random((n_atoms, 3)) * spread
    return Atoms("H" * n_atoms, cell=cell, pbc=pbc, positions=places @ np.asarray(cell, dtype=float))


def rattled(atoms: Atoms, seed: int = 5) -> Atoms:
    atoms.rattle(0.05, seed=seed)
    return atoms


def chain() -> Atoms:
    """A molecule far longer than the repeating bins of its open axes."""
    z = np.arange(40) * 1.7
    return Atoms("C40", positions=np.stack([np.sin(z), np.cos(2 * z), z - 20.0], axis=1))


def swapped(atoms: Atoms) -> Atoms:
    """The same crystal in a left-handed cell."""
    atoms = atoms.copy()
    atoms.set_cell(atoms.cell[[1, 0, 2]], scale_atoms=False)
    return atoms


def surface(third: float) -> Atoms:
    """A slab, periodic in two directions, with a third vector of this length."""
    slab = rattled(fcc111("Pt", (2, 2, 3)))
    slab.cell[2] = [0, 0, third]
    slab.pbc = [True, True, False]
    return slab


def unwrapped() -> Atoms:
    """Atoms several cells away from their cell."""
    atoms = scattered(7, [[5, 0, 0], [1, 6, 0], [0.5, -1, 7]], True, 11)
    turns = np.random.default_rng(12).integers(-3, 4, (7, 3))
    atoms.positions += turns @ atoms.cell.array
    return atoms


STRUCTURES = {
    "triclinic": lambda: scattered(7, [[5, 0, 0], [2.3, 6, 0], [-3, 1.7, 7]], True, 1),
    "very skew": lambda: scattered(3, [[4, 0, 0], [9, 5, 0], [-8, 11, 6]], True, 2),
    "left-handed": lambda: swapped(scattered(5, [[5, 0, 0], [2.3, 6, 0], [-3, 1.7, 7]], True, 3)),
    "one atom, tiny cell": lambda: bulk("Al", "fcc", a=1.51),
    "one atom, simple cubic": lambda: bulk("Po", "sc", a=3.35),
    "many bins, prime": lambda: scattered(101, [[19, 0, 0], [2, 20, 0], [1, -3, 26]], True, 4),
    "two bins along one axis": lambda: scattered(23, [[5, 0, 0], [0, 13, 0], [0, 0, 6.5]], True, 6),
    "slab without third vector": lambda: surface(0.0),
    "slab with a short third vector": lambda: surface(1.0),
    "wire": lambda: scattered(11, [[0, 0, 40.0], [0, 7, 0], [5, 0, 0]], [False, False, True], 7),
    "molecule": lambda: molecule("C6H6"),
    "chain": chain,
    "one atom alone": lambda: Atoms("He", positions=[[1.0, 2.0, 3.0]]),
    "two atoms out of reach": lambda: Atoms("He2", positions=[[0, 0, 0], [0, 0, 6.5]]),
    "one atom, large box": lambda: Atoms("He", cell=[30, 30, 30], pbc=True),
    "sparse": lambda: scattered(5, [[61, 0, 0], [0, 75, 0], [3, 0, 90]], True, 8, spread=0.1),
    "on the faces": lambda: rattled(bulk("NaCl", "rocksalt", a=5.64), seed=9) * (1, 1, 2),
    "unwrapped": unwrapped,
}

structures = pytest.mark.parametrize("name", STRUCTURES)

# Where kernels are interpreted: as many edges as it takes.
SMALL_SEARCHES = [
    ("triclinic", 4.0),
    ("very skew", 4.0),
    ("left-handed", 4.0),
    ("one atom, tiny cell", 3.0),
    ("one atom, simple cubic", 6.0),
    ("two bins along one axis", 3.0),
    ("slab without third vector", 3.0),
    ("wire", 3.0),
    ("molecule", 6.0),
    ("one atom alone", 6.0),
    ("two atoms out of reach", 6.0),
    ("sparse", 6.0),
    ("on the faces", 4.0),
    ("unwrapped", 4.0),
]
small_searches = pytest.mark.parametrize(("name", "cutoff"), SMALL_SEARCHES)


def build(atoms: Atoms, cutoff: float = CUTOFF, cap: int | None = None, device: str = "cpu") -> NeighbourList:
    positions = torch.tensor(atoms.positions, device=device)
    return neighbour_list(positions, torch.tensor(atoms.cell.array), atoms.pbc.tolist(), cutoff, cap)


def build_by_kernels(atoms: Atoms, cutoff: float = CUTOFF, cap: int | None = None) -> NeighbourList:
    """The shipped launcher, on the GPU or interpreted on the CPU (where `neighbour_list` takes the plain path)."""
    positions = torch.tensor(atoms.positions, device="cuda" if torch.cuda.is_available() else "cpu")
    bins = module._plan_bins(torch.tensor(atoms.cell.array), tuple(atoms.pbc.tolist()), cutoff, len(atoms))
    return module.assemble(module._search_triton(positions, bins), cap)


@functools.cache
def found_by_kernels(name: str, cutoff: float) -> NeighbourList:
    """Once for all tests of a structure."""
    return build_by_kernels(STRUCTURES[name](), cutoff)


def search_within(atoms: Atoms, room: module.EdgeRoom, cutoff: float = CUTOFF) -> module.FoundEdges:
    positions = torch.tensor(atoms.positions, device=room.vectors.device)
    numbers = module.search_numbers(atoms.cell.array, atoms.pbc.tolist(), cutoff, len(atoms))
    return module.search_within(positions, torch.tensor(numbers, dtype=torch.float64).to(positions), room)


def edge_set(edges: NeighbourList) -> set[tuple[int, ...]]:
    """(source, target, shift) of every edge; fails on a repeated edge."""
    rows = [tuple(row) for row in torch.cat([edges.source[:, None], edges.target[:, None], edges.shift], 1).tolist()]
    assert len(set(rows)) == len(rows)
    return set(rows)


def canonical(edges: NeighbourList) -> list[torch.Tensor]:
    """source, target, shift and vectors on the CPU, sorted by the first three."""
    keys = np.column_stack([edges.shift.cpu(), edges.source.cpu(), edges.target.cpu()])
    order = torch.from_numpy(np.lexsort(keys.T))
    return [tensor.cpu()[order] for tensor in (edges.source, edges.target, edges.shift, edges.vectors)]


def ase_set(atoms: Atoms, cutoff: float = CUTOFF) -> set[tuple[int, ...]]:
    target, source, shift = primitive_neighbor_list(
        "ijS", atoms.pbc, atoms.get_cell(complete=True), atoms.positions, cutoff
    )
    return {(int(s), int(t), *map(int, n)) for s, t, n in zip(source, target, shift, strict=True)}


def fairchem_set(atoms: Atoms, cutoff: float = CUTOFF, cap: int = 0) -> set[tuple[int, ...]]:
    """fairchem-core's own graph in float64; it needs wrapped atoms and a complete cell."""
    radius_graph = pytest.importorskip("fairchem.core.graph.radius_graph_pbc")
    data = SimpleNamespace(
        pos=torch.tensor(atoms.positions),
        cell=torch.tensor(atoms.get_cell(complete=True).array)[None],
        natoms=torch.tensor([len(atoms)]),
        batch=torch.zeros(len(atoms), dtype=torch.long),
        pbc=torch.tensor(atoms.pbc)[None],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index, shift, _ = radius_graph.radius_graph_pbc_v2(data, cutoff, cap, False)
    return {(*pair, *map(int, n)) for pair, n in zip(index.T.tolist(), shift.tolist(), strict=True)}


def check_invariants(edges: NeighbourList, atoms: Atoms) -> None:
    """Everything the field table promises, from the edges alone."""
    n_atoms = len(atoms)
    source, target, shift = edges.source.long().cpu(), edges.target.long().cpu(), edges.shift.cpu()
    row_start, by_source = edges.row_start.cpu(), edges.by_source.cpu()
    source_row_start = edges.source_row_start.cpu()
    assert edges.source.dtype == edges.target.dtype == edges.shift.dtype == torch.int32
    assert row_start.dtype == by_source.dtype == source_row_start.dtype == torch.int64
    assert row_start[0] == source_row_start[0] == 0
    assert torch.equal(row_start.diff(), torch.bincount(target, minlength=n_atoms))
    assert torch.equal(target, target.sort().values)
    assert torch.equal(source_row_start.diff(), torch.bincount(source, minlength=n_atoms))
    assert torch.equal(by_source, torch.argsort(source, stable=True))

    positions, cell = torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)
    expected = positions[source] - positions[target] + shift.double() @ cell
    torch.testing.assert_close(edges.vectors.cpu(), expected, rtol=0, atol=1e-12)
    lengths = edges.vectors.cpu().norm(dim=1)
    if len(source):
        assert edges.shortest == pytest.approx(lengths.min().item(), rel=1e-15)
    else:
        assert edges.shortest == math.inf


def check_symmetry(edges: NeighbourList) -> None:
    """Every edge has its reverse, with exactly the opposite vector."""
    source, target, shift, vectors = (t.tolist() for t in (edges.source, edges.target, edges.shift, edges.vectors))
    vector_of = {(s, t, *n): vector for s, t, n, vector in zip(source, target, shift, vectors, strict=True)}
    for (s, t, *n), vector in vector_of.items():
        assert vector_of[t, s, *(-k for k in n)] == [-x for x in vector]


@structures
def test_plain_equals_ase(name):
    atoms = STRUCTURES[name]()
    assert edge_set(build(atoms)) == ase_set(atoms)


@structures
def test_plain_equals_fairchem(name):
    atoms = STRUCTURES[name]()
    atoms.wrap(eps=0)
    assert edge_set(build(atoms)) == fairchem_set(atoms)


@structures
def test_invariants(name):
    atoms = STRUCTURES[name]()
    edges = build(atoms)
    assert not edges.capped
    check_invariants(edges, atoms)
    check_symmetry(edges)
    assert edges.source_row_start is edges.row_start


@kernels_run
@small_searches
def test_kernels_equal_plain_bitwise(name, cutoff):
    atoms = STRUCTURES[name]()
    edges, expected = found_by_kernels(name, cutoff), build(atoms, cutoff)
    for got, want in zip(canonical(edges), canonical(expected), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(edges.row_start.cpu(), expected.row_start)
    assert edges.shortest == expected.shortest
    check_invariants(edges, atoms)


def integer_neighbours(radius_squared: int) -> int:
    """Points of the integer lattice within a squared radius of a point, without itself."""
    reach = range(-math.isqrt(radius_squared), math.isqrt(radius_squared) + 1)
    return sum(0 < x * x + y * y + z * z <= radius_squared for x in reach for y in reach for z in reach)


@pytest.mark.parametrize("repeat", [(1, 1, 1), (1, 2, 3), (4, 4, 4), (5, 1, 2)])
def test_pairs_exactly_on_the_cutoff_belong(repeat):
    """Simple cubic, a = 3 A: six neighbours lie at exactly 6 A, and atoms lie exactly on faces of bins."""
    atoms = bulk("Po", "sc", a=3.0) * repeat
    edges = build(atoms)
    assert edges.row_start.diff().tolist() == [integer_neighbours(4)] * len(atoms)
    check_symmetry(edges)


@kernels_run
def test_kernels_keep_pairs_exactly_on_the_cutoff():
    atoms = bulk("Po", "sc", a=3.0) * (1, 2, 1)
    assert build_by_kernels(atoms).row_start.diff().tolist() == [integer_neighbours(4)] * 2


def test_chunks_of_targets_do_not_matter():
    atoms = STRUCTURES["many bins, prime"]()
    positions = torch.tensor(atoms.positions)
    bins = module._plan_bins(torch.tensor(atoms.cell.array), (True, True, True), CUTOFF, len(atoms))
    whole, pieces = (module.search_plain(positions, bins, budget=budget) for budget in (1 << 24, 1))
    for field in fields(whole):
        a, b = getattr(whole, field.name), getattr(pieces, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_lattice_translations_of_atoms_only_change_shifts():
    atoms = scattered(7, [[5, 0, 0], [1, 6, 0], [0.5, -1, 7]], True, 11)
    turns = np.random.default_rng(12).integers(-3, 4, (7, 3))
    moved = atoms.copy()
    moved.positions += turns @ atoms.cell.array
    turns = torch.tensor(turns)
    edges, other = build(atoms), build(moved)
    source, target, shift, _ = canonical(edges)
    expected = shift - turns[source.long()] + turns[target.long()]
    rows = torch.column_stack([source, target, expected]).tolist()
    assert {tuple(map(int, row)) for row in rows} == edge_set(other)
    assert sorted(edges.vectors.norm(dim=1).tolist()) == pytest.approx(sorted(other.vectors.norm(dim=1).tolist()))


@pytest.mark.parametrize("cell", [np.eye(3), np.zeros((3, 3)), np.diag([50.0, 1.0, -7.0])])
def test_vectors_of_open_axes_do_not_matter(cell):
    atoms = molecule("C6H6")
    expected = build(atoms)
    atoms.cell = cell
    edges = build(atoms)
    assert torch.equal(edges.vectors, expected.vectors)
    assert not edges.shift.any()


@pytest.mark.parametrize("shift", [0.0, 40.0, -55.0])
def test_slab_may_stand_anywhere_along_its_open_axis(shift):
    atoms = surface(20.0)
    expected = edge_set(build(atoms))
    atoms.positions[:, 2] += shift
    assert edge_set(build(atoms)) == expected


def test_number_of_bins_never_passes_the_number_of_atoms():
    """A huge sparse box, a thin film and an unbounded molecule all keep memory O(N)."""
    for cell, pbc in [
        (torch.eye(3) * 1e5, (True, True, True)),
        (torch.diag(torch.tensor([2000.0, 2000.0, 1.0])), (True, True, False)),
        (torch.eye(3), (False, False, False)),
    ]:
        for n_atoms in (1, 1000, 1_000_000):
            assert module._plan_bins(cell.double(), pbc, CUTOFF, n_atoms).number.prod() <= max(27, n_atoms)


def test_bins_are_never_narrower_than_the_cutoff():
    """At 24 A four bins would be exactly 6 A wide, and rounding could carry a pair at 6 A past the next bin."""
    for length, number in [(23.996, 3), (24.0, 3), (24.1, 4)]:
        cell = torch.eye(3, dtype=torch.float64) * length
        assert module._plan_bins(cell, (True, True, True), CUTOFF, 1000).number.tolist() == [[number] * 3]
    apart = Atoms("He2", cell=[23.996] * 3, pbc=True, positions=[[5.9989, 1, 1], [11.99885, 1, 1]])
    crowd = apart + scattered(200, apart.cell.array, True, 13)  # enough atoms for as many bins as fit
    assert edge_set(build(crowd)) == ase_set(crowd)


@kernels_run
@structures
def test_assignment_by_kernel_equals_plain_bitwise(name):
    """Wrapped positions, turns and bins; wrong bins alone would only cost time, so no list would show them."""
    atoms = STRUCTURES[name]()
    positions = torch.tensor(atoms.positions, device="cuda" if torch.cuda.is_available() else "cpu")
    bins = module._plan_bins(torch.tensor(atoms.cell.array), tuple(atoms.pbc.tolist()), CUTOFF, len(atoms))
    wrapped, turns, linear = module._assign_triton(
        positions, bins.box.to(positions.device), bins.grid.to(positions.device)
    )
    expected_wrapped, expected_turns, place = module._assign_plain(positions.cpu(), bins.box[0], bins.grid[0])
    assert torch.equal(wrapped.cpu(), expected_wrapped)
    assert torch.equal(turns.cpu(), expected_turns)
    _, number_1, number_2 = bins.number[0].tolist()
    expected = (place[:, 0] * number_1 + place[:, 1]) * number_2 + place[:, 2]
    assert torch.equal(linear.cpu().long(), expected)


def test_atoms_far_along_open_axes_spread_over_the_bins():
    atoms = chain()
    bins = module._plan_bins(torch.zeros(3, 3, dtype=torch.float64), (False,) * 3, CUTOFF, len(atoms))
    _, _, place = module._assign_plain(torch.tensor(atoms.positions), bins.box[0], bins.grid[0])
    assert set(place[:, 2].tolist()) == set(range(int(bins.number[0, 2])))
    assert torch.bincount(place[:, 2]).max() <= 0.5 * len(atoms)


def test_bins_stay_one_cutoff_wide_where_atoms_are_dense():
    bins = module._plan_bins(torch.eye(3, dtype=torch.float64) * 72.3, (True, True, True), CUTOFF, 32_000)
    assert bins.number.tolist() == [[12, 12, 12]]
    film = module._plan_bins(torch.diag(torch.tensor([2400.5, 2400.5, 1.0])).double(), (True, True, False), 6.0, 10**6)
    assert film.number.tolist() == [[400, 400, 6]]


# --- room of a fixed size ---


@kernels_run
@pytest.mark.parametrize(
    ("name", "cutoff"),
    [*SMALL_SEARCHES, *(pytest.param(name, CUTOFF, marks=pytest.mark.gpu, id=f"{name}-whole") for name in STRUCTURES)],
)
def test_search_within_room_finds_the_same_edges(name, cutoff):
    atoms = STRUCTURES[name]()
    expected = found_by_kernels(name, cutoff)
    n_edges, device = len(expected.source), expected.source.device
    room = module.EdgeRoom.of(n_edges + 70, cutoff, device)
    found = search_within(atoms, room, cutoff)
    assert torch.equal(room.source[:n_edges], expected.source)
    assert torch.equal(room.target[:n_edges], expected.target)
    assert torch.equal(room.vectors[:n_edges], expected.vectors)
    assert torch.equal(found.row_start, expected.row_start)
    assert torch.equal(found.by_source[:n_edges], expected.by_source)
    assert (room.vectors[n_edges:].norm(dim=1) == cutoff).all()
    most = int(expected.row_start.diff().max())
    assert found.summary[:2].tolist() == [n_edges, most]
    assert math.sqrt(found.summary[2]) == expected.shortest


def test_search_within_room_too_small():
    """Nothing is written beyond the room, no index leads out of it, and the true number of edges is told."""
    atoms = bulk("Cu", cubic=True)
    n_edges = len(build_by_kernels(atoms).source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = module.EdgeRoom.of(n_edges, CUTOFF, torch.device(device))
    room = module.EdgeRoom(*(t[: n_edges - 100] for t in whole))
    found = search_within(atoms, room)
    assert found.summary[0] == n_edges
    assert found.row_start.max() == n_edges - 100
    assert found.by_source.max() < n_edges - 100
    assert (whole.vectors[-100:].norm(dim=1) == CUTOFF).all()


# --- many systems ---


def search_many(sizes, positions, cells, pbc, cutoff, cap):
    systems = many_neighbours.Systems.of(sizes, positions.device)
    bins = many_neighbours.bins_of(cells, pbc, systems, cutoff)
    return many_neighbours.neighbour_lists(positions, bins, systems, cap)


def build_many(structures: list[Atoms], cutoff: float = CUTOFF, cap: int | None = None, device: str = "cpu"):
    """The list that ships, for structures one after another."""
    arrays = ([a.positions for a in structures], [a.cell.array[None] for a in structures], [a.pbc for a in structures])
    positions, cells, pbc = (torch.tensor(np.concatenate(each), device=device) for each in arrays)
    return search_many([len(a) for a in structures], positions, cells, pbc.view(-1, 3), cutoff, cap)


def check_many(found: many_neighbours.NeighbourLists, alone: list[NeighbourList]) -> None:
    """Bitwise, and in the same order, the lists of each system on its own."""
    atoms = 0
    for i, want in enumerate(alone):
        edges, rows = slice(*found.starts[i : i + 2]), slice(atoms, atoms + len(want.row_start))
        assert torch.equal(found.edges.source[edges] - atoms, want.source)
        assert torch.equal(found.edges.target[edges] - atoms, want.target)
        assert torch.equal(found.edges.shift[edges], want.shift)
        assert torch.equal(found.edges.vectors[edges], want.vectors)
        assert torch.equal(found.edges.row_start[rows] - found.starts[i], want.row_start)
        assert torch.equal(found.edges.source_row_start[rows] - found.starts[i], want.source_row_start)
        assert torch.equal(found.edges.by_source[edges] - found.starts[i], want.by_source)
        atoms += len(want.row_start) - 1
    assert found.starts[-1] == len(found.edges.source)
    assert found.edges.shortest == min(want.shortest for want in alone)


@pytest.mark.parametrize("cap", [None, 12])
def test_many_systems_at_once(cap):
    structures = [make() for make in STRUCTURES.values()]
    check_many(build_many(structures, 4.0, cap), [build(atoms, 4.0, cap) for atoms in structures])


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 12])
def test_many_systems_at_once_on_a_gpu(cap):
    structures = [make() for make in STRUCTURES.values()] * 3
    check_many(build_many(structures, CUTOFF, cap, "cuda"), [build(atoms, CUTOFF, cap, "cuda") for atoms in structures])


@kernels_run
def test_many_systems_at_once_by_kernels(monkeypatch):
    """Large and small bins, open axes and images in turn."""
    names = ("triclinic", "one atom alone", "wire", "molecule", "sparse", "one atom, simple cubic")
    structures = [STRUCTURES[name]() for name in names]
    monkeypatch.setattr(many_neighbours, "_search_plain", many_neighbours._search_triton)
    check_many(build_many(structures, 3.4), [build_by_kernels(atoms, 3.4) for atoms in structures])


@pytest.mark.parametrize("search", ["_search_plain", pytest.param("_search_triton", marks=kernels_run)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_faults_among_many_are_named(monkeypatch, search):
    good, flat, lost = (scattered(3, [[5, 0, 0], [0, 5, 0], [0, 0, 5]], True, seed) for seed in (1, 2, 3))
    flat.cell[1] = 2 * flat.cell[0]
    lost.positions[1, 2], lost.positions[2, 0] = np.nan, np.inf
    monkeypatch.setattr(many_neighbours, "_search_plain", getattr(many_neighbours, search))
    with pytest.raises(
        ValueError, match=r"cell: expected a height of at least 0\.006 A .* axis 0 in system 1, got 0 A"
    ):
        build_many([good, flat], 3.0)
    with pytest.raises(ValueError, match="positions: expected finite numbers, got NaN or infinity for atoms 4, 5"):
        build_many([good, lost], 3.0)


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("positions", torch.zeros(4, 3), TypeError, "positions: expected torch.float64, got torch.float32"),
        ("positions", torch.zeros(3, 3).double(), ValueError, r"positions: expected shape \[4, 3\], got \[3, 3\]"),
        ("cells", torch.eye(3).double(), ValueError, r"cells: expected shape \[2, 3, 3\], got \[3, 3\]"),
        ("cells", torch.zeros(2, 3, 3), TypeError, "cells: expected torch.float64, got torch.float32"),
        ("pbc", torch.ones(2, 3), TypeError, "pbc: expected torch.bool, got torch.float32"),
        ("pbc", torch.ones(3).bool(), ValueError, r"pbc: expected shape \[2, 3\], got \[3\]"),
        ("sizes", [4, 0], ValueError, r"sizes: expected at least one system and one atom in each, got \[4, 0\]"),
        ("cutoff", -1.0, ValueError, "cutoff: expected a positive length in A, got -1.0"),
        ("cap", 0, ValueError, "max_neighbours: expected None or at least 1, got 0"),
    ],
)
def test_arguments_of_many_are_checked(argument, value, error, message):
    arguments = {"sizes": [1, 3], "positions": torch.zeros(4, 3).double(), "cutoff": 3.0, "cap": None}
    arguments |= {"cells": torch.eye(3).double().expand(2, 3, 3), "pbc": torch.ones(2, 3).bool(), argument: value}
    with pytest.raises(error, match=message):
        search_many(**arguments)


# --- the neighbour cap ---


@pytest.mark.parametrize("repeat", [1, 2])
def test_cap_equals_fairchem_on_dense_aluminium(repeat):
    """fcc, a = 2.2 A: 320 neighbours against a cap of 300. The whole shell that holds number 301 stays."""
    atoms = bulk("Al", "fcc", a=2.2) * (repeat, 1, 1)
    edges = build(atoms, cap=300)
    assert build(atoms).row_start.diff().max() > 300
    assert edge_set(edges) == fairchem_set(atoms, cap=300)
    check_invariants(edges, atoms)


@pytest.mark.parametrize("cap", [1, 5, 12, 13, 54])
def test_cap_equals_fairchem_on_a_perturbed_crystal(cap):
    atoms = bulk("Cu", cubic=True) * (1, 1, 2)
    atoms.rattle(0.02, seed=3)
    atoms.wrap(eps=0)
    edges = build(atoms, cap=cap)
    assert edge_set(edges) == fairchem_set(atoms, cap=cap)
    assert edges.capped
    check_invariants(edges, atoms)


def test_cap_equals_fairchem_where_only_some_atoms_are_crowded():
    """The list loses its symmetry, and the two segment orders differ."""
    dense = scattered(30, [[4, 0, 0], [0, 4, 0], [0, 0, 4]], False, 20)
    atoms = dense + Atoms("He4", positions=[[8, 2, 2], [9, 2, 2], [2, 8.5, 2], [30, 30, 30]])
    atoms.cell = [60, 60, 60]
    edges = build(atoms, cap=10)
    assert edge_set(edges) == fairchem_set(atoms, cap=10)
    assert edges.capped
    assert not torch.equal(edges.row_start, edges.source_row_start)
    assert any((t, s, -a, -b, -c) not in edge_set(edges) for s, t, a, b, c in edge_set(edges))
    check_invariants(edges, atoms)


def test_cap_inside_the_outermost_shell_removes_nothing():
    """fcc: 12 nearest neighbours. A cap of 10 would split their shell, so all stay and the list is whole."""
    atoms = bulk("Cu", cubic=True)
    edges = build(atoms, cutoff=3.0, cap=10)
    assert edges.row_start.diff().tolist() == [12] * 4
    assert not edges.capped


@kernels_run
def test_cap_on_edges_found_by_kernels():
    atoms = bulk("Cu", cubic=True)
    edges, expected = build_by_kernels(atoms, cutoff=4.0, cap=12), build(atoms, cutoff=4.0, cap=12)
    assert edges.capped == expected.capped
    assert edge_set(edges) == edge_set(expected)
    check_invariants(edges, atoms)


# --- errors ---

POSITIONS, CELL = torch.zeros(1, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64) * 9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positions": POSITIONS.float()}, TypeError, "positions: expected a float64 tensor, got torch.float32"),
        ({"positions": [[0.0, 0.0, 0.0]]}, TypeError, "positions: expected a float64 tensor, got list"),
        ({"positions": POSITIONS[:0]}, ValueError, r"positions: expected shape \[N, 3\] with N >= 1, got \[0, 3\]"),
        ({"positions": POSITIONS[0]}, ValueError, r"positions: expected shape .* got \[3\]"),
        ({"cell": CELL.float()}, TypeError, "cell: expected a float64 tensor"),
        ({"cell": CELL[:2]}, ValueError, r"cell: expected shape \[3, 3\], got \[2, 3\]"),
        ({"cell": CELL * 0}, ValueError, "cell: expected a height of at least 0.012 A along periodic axis 0"),
        ({"cell": CELL[[0, 0, 2]]}, ValueError, "cell: expected a height"),
        ({"pbc": [True]}, ValueError, "pbc: expected three booleans, got 1"),
        ({"cutoff": 0.0}, ValueError, "cutoff: expected a positive length"),
        ({"cutoff": math.nan}, ValueError, "cutoff: expected a positive length"),
        ({"max_neighbours": 0}, ValueError, "max_neighbours: expected None or at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"positions": POSITIONS, "cell": CELL, "pbc": [True] * 3, "cutoff": CUTOFF, "max_neighbours": None}
    with pytest.raises(error, match=message):
        neighbour_list(**(arguments | change))


# --- GPU ---


@pytest.mark.gpu
@structures
def test_gpu_equals_plain_bitwise(name):
    atoms = STRUCTURES[name]()
    edges, expected = build(atoms, device="cuda"), build(atoms)
    for got, want in zip(canonical(edges), canonical(expected), strict=True):
        assert torch.equal(got, want)
    check_invariants(edges, atoms)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 12, 60])
def test_gpu_equals_plain_on_copper(cap):
    atoms = bulk("Cu", cubic=True) * (7, 8, 9)
    atoms.rattle(0.1, seed=1)
    edges, expected = build(atoms, cap=cap, device="cuda"), build(atoms, cap=cap)
    for got, want in zip(canonical(edges), canonical(expected), strict=True):
        assert torch.equal(got, want)
    check_invariants(edges, atoms)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 20, 30])
def test_gpu_counts_of_perfect_copper(size):
    """2048, 32,000 and 108,000 atoms: every atom has the 78 neighbours of an fcc shell sum (12 + 6 + 24 + 12 + 24)."""
    atoms = bulk("Cu", cubic=True) * size
    edges = build(atoms, device="cuda")
    assert (edges.row_start.diff() == 78).all()
    assert (edges.source_row_start.diff() == 78).all()
    check_invariants(edges, atoms)


@pytest.mark.gpu
def test_gpu_repeats_bitwise():
    atoms = bulk("Cu", cubic=True) * 10
    atoms.rattle(0.1, seed=1)
    first, second = build(atoms, device="cuda"), build(atoms, device="cuda")
    for field in fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.gpu
def test_gpu_synchronises_once():
    atoms = bulk("Cu", cubic=True) * 4
    positions = torch.tensor(atoms.positions, device="cuda")
    cell = torch.tensor(atoms.cell.array)
    neighbour_list(positions, cell, [True] * 3, CUTOFF)  # compile first
    with waits_counted() as waits:
        neighbour_list(positions, cell, [True] * 3, CUTOFF)
    assert len(waits) == 1, waits
