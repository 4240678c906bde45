"""Graphs of whole systems: placement on the device, the neighbour cap, atoms placed twice."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from ase_fastuma.graph import build_graph

CPU = torch.device("cpu")


def system(atoms: Atoms) -> SimpleNamespace:
    """The four fields of a System that a graph reads, read-only as a frozen System may hold them."""
    arrays = {
        "numbers": atoms.numbers.astype(np.int64),
        "positions": atoms.positions.copy(),
        "cell": atoms.get_cell(complete=True).array.copy(),
        "pbc": atoms.pbc.copy(),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def test_fields():
    atoms = bulk("NaCl", "rocksalt", a=5.64)
    graph = build_graph(system(atoms), 6.0, None, CPU)
    assert graph.numbers.tolist() == [11, 17]
    assert graph.numbers.dtype == torch.int64
    assert graph.positions.dtype == graph.cell.dtype == torch.float64
    np.testing.assert_array_equal(graph.positions, atoms.positions)
    np.testing.assert_array_equal(graph.cell, atoms.cell.array)
    edges = graph.edges
    vectors = graph.positions[edges.source] - graph.positions[edges.target] + edges.shift.double() @ graph.cell
    torch.testing.assert_close(edges.vectors, vectors, rtol=0, atol=1e-12)


def test_cap_is_passed_on():
    dense = system(bulk("Al", "fcc", a=2.2))
    assert build_graph(dense, 6.0, 300, CPU).edges.source.shape == (320,)
    assert len(build_graph(dense, 6.0, 200, CPU).edges.source) < 320


def test_molecule_has_no_shifts():
    graph = build_graph(system(molecule("H2O")), 6.0, 300, CPU)
    assert graph.edges.row_start.tolist() == [0, 2, 4, 6]
    assert not graph.edges.shift.any()


@pytest.mark.parametrize("gap", [0.0, 1e-5])
def test_atoms_placed_twice_are_named(gap):
    atoms = molecule("H2O")
    atoms.append("H")
    atoms.positions[3] = atoms.positions[1] + [gap, 0, 0]
    with pytest.raises(ValueError, match="atoms 1 and 3 coincide"):
        build_graph(system(atoms), 6.0, 300, CPU)


def test_atoms_placed_on_an_image_are_named():
    atoms = Atoms("He2", cell=[8, 8, 8], pbc=True, positions=[[0, 1, 1], [7.9999, 1, 1]])
    with pytest.raises(ValueError, match="atoms 0 and 1 coincide"):
        build_graph(system(atoms), 6.0, 300, CPU)


@pytest.mark.gpu
def test_graph_on_a_gpu_equals_the_cpu():
    atoms = bulk("Cu", cubic=True) * 3
    atoms.rattle(0.05, seed=2)
    gpu, cpu = (build_graph(system(atoms), 6.0, 300, torch.device(name)) for name in ("cuda", "cpu"))
    assert gpu.positions.device.type == gpu.cell.device.type == gpu.numbers.device.type == "cuda"
    assert torch.equal(gpu.edges.row_start.cpu(), cpu.edges.row_start)
    assert torch.equal(gpu.positions.cpu(), cpu.positions)
