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

from ._compile import kernel
from ._device import wait_for_previous
from ._launch import cdiv, next_power_of_2

_TILE = 64
"""Nodes of a program: their ranks within it are a comparison of each with each."""
ORDERED = 16
"""Nodes of a program of :func:`order_tile`, which reads all others: as many as registers of a forward pass hold."""
_AHEAD = tl.constexpr(4)
"""Blocks of others on their way at once: these programs wait for little else."""
MAX_ORDERED = 4096
"""Nodes up to which those programs, who compare each node with all, are few beside the forward pass's own."""
MAX_SPECIES = 2**31 // (2 * MAX_ORDERED) - 1
"""Species up to which what those programs compare fits 32 bits."""


@triton.jit
def _species_of_nodes(species, nodes, num_nodes, num_species):
    """Species of nodes: E for unknown ones, -1 beyond the last node."""
    z = tl.load(species + nodes, mask=nodes < num_nodes, other=0)
    z = tl.where((z >= 0) & (z < num_species), z, num_species).to(tl.int32)
    return tl.where(nodes < num_nodes, z, -1)


@triton.jit
def order_tile(
    species, groups, i_tile, num_nodes, num_species, TILE: tl.constexpr, MAX_NODES: tl.constexpr, BLOCK: tl.constexpr
):
    """Place a tile of nodes, or of species, by comparison with all nodes: no program waits for another.

    Nodes are numbered on by species, each before all of its nodes: where it would be placed is where those start.
    """
    i = i_tile * TILE + tl.arange(0, TILE)
    is_node = i < num_nodes
    own = tl.where(is_node, _species_of_nodes(species, i, num_nodes, num_species), i - num_nodes)
    key = own * (2 * MAX_NODES) + tl.where(is_node, i, -1)
    smaller = tl.zeros([TILE, BLOCK], tl.int32)
    for start in range(0, num_nodes, _AHEAD * BLOCK):
        for i_block in tl.static_range(_AHEAD):
            j = start + i_block * BLOCK + tl.arange(0, BLOCK)
            z = _species_of_nodes(species, j, num_nodes, num_species)
            other = tl.where(j < num_nodes, z * (2 * MAX_NODES) + j, 2147483647)
            smaller += (other[None, :] < key[:, None]).to(tl.int32)
    place = tl.sum(smaller, axis=1)
    at, value = tl.where(is_node, place, num_nodes + i), tl.where(is_node, i, place)
    tl.store(groups + at, value, mask=i <= num_nodes + num_species)
    tl.store(groups + num_nodes + place, own, mask=is_node)


@kernel(do_not_specialize=["num_nodes", "num_species"])
def _count_kernel(species, counts, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts[tile, z]: nodes of each species in a tile."""
    wait_for_previous()
    nodes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    z = _species_of_nodes(species, nodes, num_nodes, num_species)
    e = tl.arange(0, BLOCK_E)
    n = tl.sum((z[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * BLOCK_E + e, n)


@kernel(do_not_specialize=["num_tiles"])
def _offset_kernel(counts, totals, num_tiles, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """counts[tile, z] becomes the nodes of species z in the tiles before; totals[z] those in all tiles."""
    wait_for_previous()
    i_species = tl.program_id(0)
    before = tl.sum(tl.zeros([BLOCK], tl.int32), axis=0)
    for first in range(0, num_tiles, BLOCK):
        tiles = first + tl.arange(0, BLOCK)
        at = counts + tiles * BLOCK_E + i_species
        n = tl.load(at, mask=tiles < num_tiles, other=0)
        tl.store(at, before + tl.cumsum(n, axis=0) - n, mask=tiles < num_tiles)
        before += tl.sum(n, axis=0)
    tl.store(totals + i_species, before)


@kernel(do_not_specialize=["num_nodes", "num_species"])
def _order_kernel(species, counts, totals, groups, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """A node's place: nodes of smaller species, those of its own in the tiles before, and before it in its tile."""
    wait_for_previous()
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
    """Groups to be written, e.g. by :func:`order_tile` for all of :func:`order_tiles`."""
    return torch.empty(2 * species.shape[0] + num_species + 1, dtype=torch.int32, device=species.device)


def order_tiles(num_nodes: int, num_species: int) -> int:
    """Tiles of :func:`order_tile`: of nodes, and of species with the unknown one."""
    return (num_nodes + num_species) // ORDERED + 1


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
