"""The radial networks of a checkpoint, tabulated for the pairs of elements that have come up so far."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ase_fastuma.kernels import reference
from ase_fastuma.kernels.radial import NUM_KNOTS, Radial, RadialTable, tabulate

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Architecture
    from ase_fastuma.experts import State
    from ase_fastuma.kernels.linear import BlockWeights

Pair = tuple[int, int]
"""Atomic numbers of an edge's source and target."""

# Tables are kept up to this size in bytes for all networks together; for more pairs the networks themselves run.
_TABLE_BYTES = 1 << 30
# Sum over neighbours of the edge-degree embedding is divided by this, as these models were trained.
_DEGREE_RESCALE = 5.0


class _Part(NamedTuple):
    """A radial network in one precision.

    Attributes:
        source, target: what each element adds to the first layer at either end [Z, B], the bias with the source.
        layers: the rest.
    """

    source: Tensor
    target: Tensor
    layers: reference.RadialLayers

    def pair_bias(self, pairs: Sequence[Pair]) -> Tensor:
        """What pairs add to the first layer [P, B]; of each pair whatever the others are."""
        source, target = torch.tensor(pairs, device=self.source.device).T
        return self.source[source] + self.target[target]


class Radials:
    """The radial network of the edge-degree embedding and that of each layer.

    Tables grow with the pairs; those of one pair do not depend on others, bit for bit. When they would grow past their
    limit they begin anew. They grow in place, in room that doubles: whoever still holds an earlier one mostly
    shares its memory with the latest, instead of holding a copy.
    """

    def __init__(
        self,
        load: Callable[[], State],
        architecture: Architecture,
        dtype: torch.dtype,
        store: Callable[[list[Tensor], Tensor], BlockWeights],
        tables: bool,
    ) -> None:
        """Networks from the state that `load` gives; `store` makes their last linears; `tables` allows tables."""
        self._load, self._architecture, self._dtype = load, architecture, dtype
        self._store, self._tables = store, tables
        self._rows: dict[Pair, int] = {}
        self._kept: list[Radial] = []
        self._room: list[Tensor] = []  # of the tables' coefficients; the first rows are those of the pairs
        self._parts: dict[tuple[str, torch.dtype], _Part] = {}

    def of(self, pairs: Sequence[Pair]) -> tuple[dict[Pair, int], list[tuple[Radial, BlockWeights]]]:
        """Where pairs are in what follows: the hidden part of each network, and its last linear."""
        if not self._fit(len(pairs)):
            return {pair: i for i, pair in enumerate(pairs)}, self._with_outs(self._made(pairs, False))
        missing = [pair for pair in pairs if pair not in self._rows]
        if not self._fit(len(self._rows) + len(missing)):
            self._rows, self._kept, self._room, missing = {}, [], [], list(pairs)
        if missing:
            made = self._made(missing, self._tables)
            self._kept = self._extended(made) if self._kept else made
            self._rows = self._rows | {pair: len(self._rows) + i for i, pair in enumerate(missing)}
        return self._rows, self._with_outs(self._kept)

    def _fit(self, num_pairs: int) -> bool:
        """Whether tables of so many pairs stay within their limit."""
        return not self._tables or num_pairs <= self._most

    @functools.cached_property
    def _most(self) -> int:
        """Pairs whose tables stay within their limit."""
        of_a_pair = 4 * len(self._names) * (NUM_KNOTS - 1) * 4 * self._architecture.edge_channels
        return _TABLE_BYTES // of_a_pair

    def _extended(self, made: list[Radial]) -> list[Radial]:
        """The networks that are kept, for the pairs of these too."""
        joined = [torch.cat([old.pair_bias, new.pair_bias]) for old, new in zip(self._kept, made, strict=True)]
        if not self._tables:
            return [Radial(bias, new.layers, None) for bias, new in zip(joined, made, strict=True)]
        old, new = ([_table(radial).coefficients for radial in radials] for radials in (self._kept, made))
        first, end = len(old[0]), len(joined[0])
        if not self._room or len(self._room[0]) < end:
            rows = min(max(2 * first, end), self._most)
            self._room = [torch.cat([t, t.new_empty(rows - first, *t.shape[1:])]) for t in old]
        for room, added in zip(self._room, new, strict=True):
            room[first:end] = added  # rows that no network reads yet
        tables = [
            RadialTable(room[:end], _table(radial).spacing) for room, radial in zip(self._room, made, strict=True)
        ]
        return [Radial(*of_one) for of_one in zip(joined, (radial.layers for radial in made), tables, strict=True)]

    def _with_outs(self, radials: list[Radial]) -> list[tuple[Radial, BlockWeights]]:
        return list(zip(radials, self._outs, strict=True))

    @functools.cached_property
    def _names(self) -> list[str]:
        layers = range(self._architecture.num_layers)
        inner = [f"backbone.blocks.{i}.edge_wise.so2_conv_1.rad_func.net." for i in layers]
        return ["backbone.edge_degree_embedding.rad_func.net.", *inner]

    @functools.cached_property
    def _outs(self) -> list[BlockWeights]:
        found, state = [], self._load()
        for name in self._names:
            weight, bias = state[f"{name}6.weight"].T.double(), state[f"{name}6.bias"].double()
            if name is self._names[0]:
                weight, bias = weight / _DEGREE_RESCALE, bias / _DEGREE_RESCALE
            found.append(self._store([weight], bias))
        return found

    def _made(self, pairs: Sequence[Pair], tables: bool) -> list[Radial]:
        found = []
        for name in self._names:
            table = None
            if tables:
                exact = self._part(name, torch.float64)
                table = tabulate(exact.pair_bias(pairs), exact.layers, self._architecture.cutoff)
            part = self._part(name, self._dtype)
            found.append(Radial(part.pair_bias(pairs), part.layers, table))
        return found

    def _part(self, name: str, dtype: torch.dtype) -> _Part:
        if (name, dtype) not in self._parts:
            self._parts[name, dtype] = self._build_part(name, dtype)
        return self._parts[name, dtype]

    def _build_part(self, name: str, dtype: torch.dtype) -> _Part:
        state, arch = self._load(), self._architecture
        centres = torch.linspace(0.0, arch.cutoff, arch.num_distance_basis, dtype=dtype)
        exponent = -0.5 / (2.0 * (centres[1] - centres[0])).item() ** 2
        weights = {n: state[f"{name}{n}"].to(dtype) for n in ("0.weight", "0.bias", "1.weight", "1.bias")}
        weights |= {n: state[f"{name}{n}"].to(dtype) for n in ("3.weight", "3.bias", "4.weight", "4.bias")}
        basis, source, target = weights["0.weight"].T.split(
            [arch.num_distance_basis, arch.edge_channels, arch.edge_channels]
        )
        layers = reference.RadialLayers(
            centres=centres.to(basis.device),
            gaussian_exponent=exponent,
            weight_distance=basis,
            norm_first=(weights["1.weight"], weights["1.bias"]),
            weight_second=weights["3.weight"].T,
            bias_second=weights["3.bias"],
            norm_second=(weights["4.weight"], weights["4.bias"]),
        )
        # All elements at once: a product of fewer rows may round otherwise.
        of_source = state["backbone.source_embedding.weight"].to(dtype) @ source + weights["0.bias"]
        return _Part(of_source, state["backbone.target_embedding.weight"].to(dtype) @ target, layers)


def _table(radial: Radial) -> RadialTable:
    assert radial.table is not None
    return radial.table
