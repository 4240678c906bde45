"""Nodes grouped by species on the device: a stable counting sort and chunks of one species. Nothing waits for the host.

Sums over the nodes of a species are made in two steps, each in a fixed order: over chunks of at most `size` nodes, then
over the chunks of a species. How many chunks there are the host does not know; it launches as many as there can be, and
those beyond the last are empty. Species outside 0 ... E - 1 are in no chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, next_power_of_2

_TILE = 64
"""Nodes of a program: their ranks within it are a comparison of each with each."""


class NodesBySpecies(NamedTuple):
    """Nodes in the order of their species.

    Attributes:
        order: [N] int32, nodes of species 0, then of 1, ..., each in their own order.
        totals: [E] int32, nodes of each species.
        chunk_size: the most nodes in a chunk.
        max_chunks: how many chunks there can be.
    """

    order: Tensor
    totals: Tensor
    chunk_size: int
    max_chunks: int


@triton.jit
def _species_of_tile(species, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """Nodes of this program [TILE], their species, and which species each is [TILE, BLOCK_E]."""
    nodes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    z = tl.load(species + nodes, mask=nodes < num_nodes, other=-1).to(tl.int32)
    e = tl.arange(0, BLOCK_E)
    return nodes, z, (z[:, None] == e[None, :]) & (e < num_species)[None, :]


@triton.jit(do_not_specialize=["num_nodes", "num_species"])
def _count_kernel(species, counts, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts[tile, z]: nodes of each species in a tile."""
    _, _, hit = _species_of_tile(species, num_nodes, num_species, TILE, BLOCK_E)
    tl.store(counts + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.sum(hit.to(tl.int32), axis=0))


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
def _order_kernel(species, counts, totals, order, num_nodes, num_species, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """A node's place: nodes of smaller species, those of its own in the tiles before, and before it in its tile."""
    nodes, z, hit = _species_of_tile(species, num_nodes, num_species, TILE, BLOCK_E)
    e = tl.arange(0, BLOCK_E)
    n = tl.load(totals + e, mask=e < num_species, other=0)
    first = tl.cumsum(n, axis=0) - n + tl.load(counts + tl.program_id(0) * BLOCK_E + e, mask=e < num_species, other=0)
    place = tl.sum(tl.where(hit, first[None, :], 0), axis=1)
    earlier = (z[:, None] == z[None, :]) & (nodes[:, None] > nodes[None, :])
    place += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order + place, nodes, mask=(z >= 0) & (z < num_species))


@triton.jit
def nodes_of_chunk(totals, i_chunk, num_species, chunk_size, BLOCK_E: tl.constexpr):
    """Places (first, last) in the order of a chunk's nodes; both zero beyond the last chunk."""
    e = tl.arange(0, BLOCK_E)
    n = tl.load(totals + e, mask=e < num_species, other=0)
    end = tl.cumsum(n, axis=0)
    chunks = (n + chunk_size - 1) // chunk_size
    chunks_end = tl.cumsum(chunks, axis=0)
    here = (chunks_end > i_chunk) & (chunks_end - chunks <= i_chunk)
    start = end - n + (i_chunk - (chunks_end - chunks)) * chunk_size
    first = tl.sum(tl.where(here, start, 0), axis=0)
    last = tl.sum(tl.where(here, tl.minimum(start + chunk_size, end), 0), axis=0)
    return first, last


@triton.jit
def chunks_of_species(totals, i_species, chunk_size, BLOCK_E: tl.constexpr):
    """Chunks (first, last) of a species."""
    e = tl.arange(0, BLOCK_E)
    n = tl.load(totals + e, mask=e <= i_species, other=0)
    chunks = (n + chunk_size - 1) // chunk_size
    last = tl.sum(chunks, axis=0)
    return last - tl.sum(tl.where(e == i_species, chunks, 0), axis=0), last


def padded_species(num_species: int) -> int:
    """BLOCK_E, the species of a program's row."""
    return max(16, next_power_of_2(num_species))


def nodes_by_species(species: Tensor, num_species: int) -> NodesBySpecies:
    """Sort nodes by species and cut them into chunks.

    A chunk is the work of a warp for each block of channels, and costs a row of partial sums: there are some thousand
    of them, of 8 to 64 nodes.
    """
    num_nodes = species.shape[0]
    size = min(64, max(8, next_power_of_2(num_nodes // 1024)))
    tiles, block = cdiv(num_nodes, _TILE), padded_species(num_species)
    like = {"dtype": torch.int32, "device": species.device}
    counts, totals, order = (
        torch.empty(tiles, block, **like),
        torch.empty(num_species, **like),
        torch.empty(num_nodes, **like),
    )
    _count_kernel[(tiles,)](species, counts, num_nodes, num_species, TILE=_TILE, BLOCK_E=block, num_warps=4)
    _offset_kernel[(num_species,)](counts, totals, tiles, BLOCK_E=block, BLOCK=128, num_warps=1)
    _order_kernel[(tiles,)](
        species, counts, totals, order, num_nodes, num_species, TILE=_TILE, BLOCK_E=block, num_warps=4
    )
    return NodesBySpecies(order, totals, size, cdiv(num_nodes, size) + num_species)
