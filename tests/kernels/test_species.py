"""Nodes grouped by species: the order against torch's stable sort, and chunks that hold every node once."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ase_fastuma.kernels._species import chunks_of_species, nodes_by_species, nodes_of_chunk, padded_species
from devices import DEVICES


@triton.jit
def _chunks_kernel(totals, bounds, of_species, num_species, chunk_size, BLOCK_E: tl.constexpr):
    i = tl.program_id(0)
    first, last = nodes_of_chunk(totals, i, num_species, chunk_size, BLOCK_E)
    tl.store(bounds + 2 * i, first)
    tl.store(bounds + 2 * i + 1, last)
    if i < num_species:
        first, last = chunks_of_species(totals, i, chunk_size, BLOCK_E)
        tl.store(of_species + 2 * i, first)
        tl.store(of_species + 2 * i + 1, last)


@pytest.mark.parametrize(
    ("num_nodes", "num_species", "present"), [(1, 1, 1), (7, 3, 2), (300, 1, 1), (300, 89, 5), (333, 17, 17)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_order_and_chunks(device, num_nodes, num_species, present):
    check_order_and_chunks(device, num_nodes, num_species, present)


@pytest.mark.gpu
def test_order_and_chunks_of_many_nodes():
    check_order_and_chunks("cuda", 20000, 89, 40)


def check_order_and_chunks(device, num_nodes, num_species, present):
    generator = torch.Generator().manual_seed(num_nodes)
    chosen = torch.randperm(num_species, generator=generator)[:present]
    species = chosen[torch.randint(0, present, (num_nodes,), generator=generator)].to(device)
    nodes = nodes_by_species(species, num_species)
    ordered, order = torch.sort(species, stable=True)
    assert torch.equal(nodes.order.long(), order)
    assert torch.equal(nodes.totals.long(), torch.bincount(species, minlength=num_species))

    bounds = torch.full((nodes.max_chunks, 2), -1, dtype=torch.int32, device=device)
    of_species = torch.full((num_species, 2), -1, dtype=torch.int32, device=device)
    sizes = (num_species, nodes.chunk_size)
    _chunks_kernel[(nodes.max_chunks,)](nodes.totals, bounds, of_species, *sizes, BLOCK_E=padded_species(num_species))
    bounds, of_species, ordered = bounds.tolist(), of_species.tolist(), ordered.tolist()
    seen = 0
    for z, (first_chunk, last_chunk) in enumerate(of_species):
        for first, last in bounds[first_chunk:last_chunk]:
            assert first == seen
            assert 0 < last - first <= nodes.chunk_size
            assert set(ordered[first:last]) == {z}
            seen = last
    assert seen == num_nodes
    assert all(bound == [0, 0] for bound in bounds[of_species[-1][1] :])


@pytest.mark.parametrize("device", DEVICES)
def test_species_outside_the_range_are_left_out(device):
    species = torch.tensor([2, -1, 0, 3, 2, 16, 0], dtype=torch.int32, device=device)
    nodes = nodes_by_species(species, 3)
    assert nodes.totals.tolist() == [2, 0, 2]
    assert nodes.order[:4].tolist() == [2, 6, 0, 4]
