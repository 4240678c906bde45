"""Rows in consecutive groups, and the tiles of rows that products over groups work through.

The schedule of the tiles is made on the device from the starts of the groups, which may come from there: nothing waits
for them. There are at most M / rows + G tiles of M rows in G groups; those that are left over are empty.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor


class RowGroups:
    """Rows in consecutive groups, group g being rows starts[g] : starts[g + 1].

    Attributes:
        first: first row of each group, and the number of rows [G + 1], increasing or equal; int64, on the device.
        num_rows, num_groups: M and G.
    """

    def __init__(self, starts: Sequence[int] | Tensor, device: torch.device, num_rows: int | None = None) -> None:
        """Take starts from the host, or from the device together with the number of rows, which they then lead to.

        Raises TypeError for starts that are no integers and ValueError for such that do not begin at 0 or decrease, as
        far as that is known without waiting.
        """
        if isinstance(starts, Tensor):
            if num_rows is None or starts.dim() != 1 or not len(starts) or starts.dtype != torch.int64:
                raise ValueError("starts: expected an int64 tensor [G + 1] and the number of rows that it leads to")
            self._starts: tuple[int, ...] | None = (0, num_rows) if len(starts) == 2 else None
            self.first, self.num_rows = starts.to(device), num_rows
        else:
            try:
                self._starts = tuple(map(operator.index, starts))
            except TypeError as error:
                raise TypeError(f"starts: expected integers, got {starts!r}") from error
            if self._starts[:1] != (0,) or any(a > b for a, b in itertools.pairwise(self._starts)):
                raise ValueError(f"starts: expected numbers from 0 on that do not decrease, got {list(starts)}")
            self.first, self.num_rows = torch.tensor(self._starts).to(device), self._starts[-1]
        self.num_groups = len(self.first) - 1
        self._tiles: dict[int, Tensor] = {}

    @property
    def starts(self) -> tuple[int, ...]:
        """`first` on the host; waits for the device, once, where the starts came from there."""
        if self._starts is None:
            self._starts = (0, self.num_rows) if self.num_groups == 1 else tuple(self.first.tolist())
        return self._starts

    @property
    def counts(self) -> Tensor:
        """Rows of each group [G], int64."""
        return self.first.diff()

    def tile_counts(self, rows: int) -> Tensor:
        """Tiles of so many rows in each group [G], int64."""
        return (self.counts + rows - 1) // rows

    def tiles(self, rows: int) -> Tensor:
        """Group, first row and last row + 1 of each tile of so many rows [3, T], int64; kept. Empty tiles end it."""
        if rows not in self._tiles:
            # An even number, so that each of the three rows begins where a compiled kernel may expect it to.
            most = (self.num_rows // rows + self.num_groups + 1) // 2 * 2
            tile = torch.arange(most, device=self.first.device)
            tiles = self.tile_counts(rows)
            ends = tiles.cumsum(0)
            # Tiles beyond the last one lie past the end of the last group.
            group = torch.searchsorted(ends, tile, right=True).clamp(max=self.num_groups - 1)
            first = self.first[group] + (tile - (ends - tiles)[group]) * rows
            self._tiles[rows] = torch.stack([group, first, torch.minimum(first + rows, self.first[group + 1])])
        return self._tiles[rows]
