"""Nodes grouped by species on the device, and walks along their order. Nothing waits for the host.

Groups are one array, int32 [2 N + E + 1]: the nodes in the order of their species and then of their own, the species
of those, and where each species starts. Species outside 0 ... E - 1 count as one more, E, the last.

Sums over the nodes of a species are made in two steps, each in a fixed order. Program p walks along places p * walk to
(p + 1) * walk of the order and leaves a sum, in row p + z, where it leaves species z: from one sum to the next either
p or z grows, so every sum has a row of its own, and those of a species lie side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, next_power_of_2

_TILE = 64
"""Nodes of a program: their ranks within it are a comparison of each with each."""
MAX_ORDERED = 16384
"""Nodes up to which programs of :func:`order_species`, each of which looks at all of them twice, are done before the
rest of a contraction's forward pass. They count in halves of 32 bits."""
MAX_ORDERED_SPECIES = 1023
"""Species up to which those programs are few."""


@triton.jit
def _species_of_nodes(species, nodes, num_nodes, num_species):
    """Species of nodes: E for unknown ones, -1 beyond the last node."""
    z = tl.load(species + nodes, mask=nodes < num_nodes, other=0)
    z = tl.where((z >= 0) & (z < num_species), z, num_species).to(tl.int32)
    return tl.where(nodes < num_nodes, z, -1)


@triton.jit
def order_species(species, groups, i_species, num_nodes, num_species, BLOCK: tl.constexpr):
    """Place the nodes of one species, by counting among all: no program waits for another."""
    counts = tl.zeros([BLOCK], tl.int32)  # of smaller species, and 2^16 times its own
    for start in range(0, num_nodes, BLOCK):
        z = _species_of_nodes(species, start + tl.arange(0, BLOCK), num_nodes, num_species)
        counts += tl.where(z == i_species, 65536, ((z >= 0) & (z < i_species)).to(tl.int32))
    total = tl.sum(counts, axis=0)
    place = total & 65535
    tl.store(groups + 2 * num_nodes + i_species, place)
    if total > 65535:
        for start in range(0, num_nodes, BLOCK):
            nodes = start + tl.arange(0, BLOCK)
            z = _species_of_nodes(species, nodes, num_nodes, num_species)
            found = (z == i_species).to(tl.int32)
            places = place + tl.cumsum(found, axis=0) - 1
            tl.store(groups + places, nodes, mask=z == i_species)
            tl.store(groups + num_nodes + places, z, mask=z == i_species)
            place += tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["num_nodes", "num_species"])
def _count_kernel(species, counts, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts[tile, z]: nodes of each species in a tile."""
    nodes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    z = _species_of_nodes(species, nodes, num_nodes, num_species)
    e = tl.arange(0, BLOCK_E)
    n = tl.sum((z[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * BLOCK_E + e, n)


@triton.jit(do_not_specialize=["num_tiles"])
def _offset_kernel(counts, totals, num_tiles, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """counts[tile, z] becomes the nodes of species z in the tiles before; totals[z] those in all tiles."""
    i_species = tl.program_id(0)
    before = tl.sum(tl.zeros([BLOCK], tl.int32), axis=0)
    for first in range(0, num_tiles, BLOCK):
        tiles = first + tl.arange(0, BLOCK)
        at = counts + tiles * BLOCK_E + i_species
        n = tl.load(at, mask=tiles < num_tiles, other=0)
        tl.store(at, before + tl.cumsum(n, axis=0) - n, mask=tiles < num_tiles)
        before += tl.sum(n, axis=0)
    tl.store(totals + i_species, before)


@triton.jit(do_not_specialize=["num_nodes", "num_species"])
def _order_kernel(species, counts, totals, groups, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """A node's place: nodes of smaller species, those of its own in the tiles before, and before it in its tile."""
    nodes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    z = _species_of_nodes(species, nodes, num_nodes, num_species)
    e = tl.arange(0, BLOCK_E)
    n = tl.load(totals + e, mask=e <= num_species, other=0)
    start = tl.cumsum(n, axis=0) - n
    if tl.program_id(0) == 0:
        tl.store(groups + 2 * num_nodes + e, start, mask=e <= num_species)
    first = start + tl.load(counts + tl.program_id(0) * BLOCK_E + e, mask=e <= num_species, other=0)
    place = tl.sum(tl.where(z[:, None] == e[None, :], first[None, :], 0), axis=1)
    earlier = (z[:, None] == z[None, :]) & (nodes[:, None] > nodes[None, :])
    place += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(groups + place, nodes, mask=nodes < num_nodes)
    tl.store(groups + num_nodes + place, z, mask=nodes < num_nodes)


@triton.jit
def sums_of_species(groups, i_species, num_nodes, walk):
    """Rows (first, last) of a species' sums."""
    start = tl.load(groups + 2 * num_nodes + i_species)
    end = tl.load(groups + 2 * num_nodes + i_species + 1)
    first = i_species + start // walk
    return first, tl.where(end > start, i_species + (end - 1) // walk + 1, first)


def empty_groups(species: Tensor, num_species: int) -> Tensor:
    """Groups to be written, e.g. by :func:`order_species` for all species and the unknown one."""
    return torch.empty(2 * species.shape[0] + num_species + 1, dtype=torch.int32, device=species.device)


def nodes_by_species(species: Tensor, num_species: int) -> Tensor:
    """Groups of any number of nodes: a stable counting sort by kernels of its own."""
    num_nodes = species.shape[0]
    tiles, block = cdiv(num_nodes, _TILE), max(16, next_power_of_2(num_species + 1))
    groups = empty_groups(species, num_species)
    counts, totals = groups.new_empty(tiles, block), groups.new_empty(num_species + 1)
    sizes = {"TILE": _TILE, "BLOCK_E": block}
    _count_kernel[(tiles,)](species, counts, num_nodes, num_species, **sizes, num_warps=4)
    _offset_kernel[(num_species + 1,)](counts, totals, tiles, BLOCK_E=block, BLOCK=128, num_warps=1)
    _order_kernel[(tiles,)](species, counts, totals, groups, num_nodes, num_species, **sizes, num_warps=4)
    return groups
