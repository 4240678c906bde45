"""Nodes grouped by species: the order against torch's stable sort, and walks whose sums hold every node once."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ase_fastuma.kernels._launch import cdiv
from ase_fastuma.kernels._species import (
    MAX_ORDERED,
    ORDERED,
    empty_groups,
    nodes_by_species,
    order_tile,
    order_tiles,
    sums_of_species,
)
from devices import DEVICES


@triton.jit
def _order_kernel(species, groups, num_nodes, num_species, TILE: tl.constexpr, MAX_NODES: tl.constexpr):
    order_tile(species, groups, tl.program_id(0), num_nodes, num_species, TILE, MAX_NODES, 128)


@triton.jit
def _rows_kernel(groups, rows, num_nodes, walk):
    i = tl.program_id(0)
    first, last = sums_of_species(groups, i, num_nodes, walk)
    tl.store(rows + 2 * i, first)
    tl.store(rows + 2 * i + 1, last)


def by_comparison(species, num_species):
    """Groups as a contraction's forward pass writes them."""
    groups = empty_groups(species, num_species)
    grid = (order_tiles(len(species), num_species) + 1,)  # one too many does no harm
    _order_kernel[grid](species, groups, len(species), num_species, TILE=ORDERED, MAX_NODES=MAX_ORDERED, num_warps=4)
    return groups


@pytest.mark.parametrize("group", [by_comparison, nodes_by_species])
@pytest.mark.parametrize(
    ("num_nodes", "num_species", "present"), [(1, 1, 1), (7, 3, 2), (300, 1, 1), (300, 89, 5), (333, 17, 17)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_order_and_rows(device, num_nodes, num_species, present, group):
    check_order_and_rows(device, num_nodes, num_species, present, group)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_nodes", "group"), [(MAX_ORDERED, by_comparison), (20000, nodes_by_species)])
def test_order_and_rows_of_many_nodes(num_nodes, group):
    check_order_and_rows("cuda", num_nodes, 89, 40, group)


def check_order_and_rows(device, num_nodes, num_species, present, group, walk=6):
    generator = torch.Generator().manual_seed(num_nodes)
    chosen = torch.randperm(num_species, generator=generator)[:present]
    species = chosen[torch.randint(0, present, (num_nodes,), generator=generator)].to(device)
    groups = group(species, num_species)
    ordered, order = torch.sort(species, stable=True)
    totals = torch.bincount(species, minlength=num_species + 1)
    assert torch.equal(groups.long(), torch.cat([order, ordered, totals.cumsum(0) - totals]))

    rows = torch.empty(num_species, 2, dtype=torch.int32, device=device)
    _rows_kernel[(num_species,)](groups, rows, num_nodes, walk)
    places = torch.arange(num_nodes, device=device)
    left = sorted(set((places // walk + ordered).tolist()))
    assert len(left) == len(set(zip((places // walk).tolist(), ordered.tolist(), strict=True)))
    assert left[-1] < cdiv(num_nodes, walk) + num_species
    assert [row for first, last in rows.tolist() for row in range(first, last)] == left
    for z, (first, last) in enumerate(rows.tolist()):
        assert set((places[ordered == z] // walk + z).tolist()) == set(range(first, last))


@pytest.mark.parametrize("group", [by_comparison, nodes_by_species])
@pytest.mark.parametrize(("unknown", "dtype"), [(16, torch.int32), (2**32, torch.int64)])  # whose lower half is 0
@pytest.mark.parametrize("device", DEVICES)
def test_unknown_species_come_last(device, unknown, dtype, group):
    species = torch.tensor([2, -1, 0, 3, 2, unknown, 0], dtype=dtype, device=device)
    groups = group(species, 3).tolist()
    assert groups == [2, 6, 0, 4, 1, 3, 5, 0, 0, 2, 2, 3, 3, 3, 0, 2, 2, 4]
