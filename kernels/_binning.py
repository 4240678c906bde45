"""Bins of the neighbour search: what follows from cells, periodic axes and a cutoff alone, for many systems at once.

A bin is at least one cutoff wide, and a system has at most as many of them as atoms (or 27). An open axis has no box,
so its bins repeat. Kernels read two tensors, since a Triton scalar argument is at most float32 and may cause a
compilation; for each system

    box float64 [22]: lattice 0..8 (rows), inverse 9..17 (rows), density 18..20, cutoff^2 21
    grid int32 [13]: number 0..2, low 3..5, visits 6..8, periodic 9..11, first bin 12

with three numbers each, one per lattice axis:

| name | meaning |
|---|---|
| lattice | the cell, open axes replaced by unit vectors at right angles to all others |
| inverse | coordinates = x @ inverse |
| density | bins per unit of coordinate: fractional along periodic axes, A along open ones |
| number | bins along the axis |
| low, visits | the raw bins around a target in bin b are b + low, ..., b + low + visits - 1 |
| first bin | bins of the systems before this one, where bins of several are numbered through |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

BOX = tl.constexpr(22)
GRID = tl.constexpr(13)

THINNEST = 1 / 500
"""Thinnest periodic cell, as a fraction of the cutoff: about 1000 images along each axis, so counters fit int32."""
FEWEST_BINS = 27
"""Bins are at most as many as the atoms, or this many: a step of the search visits 27 of them anyway."""

# Bins are wider than the cutoff by this fraction; it covers the rounding of bin indices (1e-15 of a coordinate).
_MARGIN = 1e-6


class Bins(NamedTuple):
    """Bins of S systems.

    | field | type | meaning |
    |---|---|---|
    | box, grid | float64 [S, 22], int32 [S, 13] | see the top of the file |
    | heights | float64 [S, 3] | distances between opposite faces of the lattice, A |
    | sound | bool [S, 3] | which heights serve; what is found with others, without volume or NaN, means nothing |
    """

    box: Tensor
    grid: Tensor
    heights: Tensor
    sound: Tensor

    @property
    def number(self) -> Tensor:
        """Bins along each axis [S, 3]."""
        return self.grid[:, :3]

    def check(self) -> None:
        """Raise ValueError where a periodic cell has no volume, naming the first and its system. Waits for the device.

        `sound` tells beforehand where this is so.
        """
        faults = (~self.sound).nonzero().tolist()
        if faults:
            system, axis = faults[0]
            least = THINNEST * float(self.box[system, 21]) ** 0.5
            where = f" in system {system}" if len(self.box) > 1 else ""
            raise ValueError(
                f"cell: expected a height of at least {least:.3g} A along periodic axis {axis}{where}, "
                f"got {float(self.heights[system, axis]):.3g} A"
            )


def plan(cells: Tensor, periodic: Tensor, cutoff: float, atoms: Tensor, first_bin: Tensor) -> Bins:
    """Choose the bins, on the device of the cells and without waiting for it.

    cells: float64 [S, 3, 3], rows are lattice vectors, A. periodic: bool [S, 3]. atoms, first_bin: int64 [S].
    """
    lattice = _completed(cells, periodic)
    faces = _faces(lattice)
    volume = _dot(lattice[:, 0], faces[:, 0])
    heights = volume.abs()[:, None] / _lengths(faces)
    reach = cutoff * (1 + _MARGIN)
    sound = ~periodic | (heights >= cutoff * THINNEST)  # NaN is not
    served = torch.where(periodic & sound, heights, reach)
    number, left = _shared((served / reach).floor().clamp(min=1), atoms.clamp(min=FEWEST_BINS).double())
    # Open axes share what the periodic ones leave.
    share = _root(left, (~periodic).sum(1).clamp(min=1).double())[:, None]
    number = torch.where(periodic, number, share)
    images = (reach * number / served).ceil()  # 1 unless the whole cell is thinner than reach
    # Bins repeat along an open axis: none may be visited twice.
    visits = torch.where(periodic, 2 * images + 1, number.clamp(max=3))
    low = torch.where(periodic, -images, -1.0)
    density = torch.where(periodic, number, 1 / reach)
    squared = torch.full_like(volume, cutoff * cutoff)
    box = torch.cat([lattice.flatten(1), (faces.mT / volume[:, None, None]).flatten(1), density, squared[:, None]], 1)
    grid = torch.cat([number, low, visits, periodic, first_bin[:, None]], 1).int()
    return Bins(box, grid, heights, sound)


def _completed(cells: Tensor, periodic: Tensor) -> Tensor:
    """Cells with every open axis replaced by a unit vector at right angles to all other vectors."""
    count = periodic.sum(1)[:, None, None]
    unit = torch.eye(3, dtype=cells.dtype, device=cells.device)
    vectors = torch.where(periodic[..., None], cells, 0.0)
    # Nothing is periodic: x, y, z. One axis is: the next one is at right angles to it and to that of x, y, z from which
    # it is furthest.
    alone = vectors.sum(1)
    across = _normalised(torch.linalg.cross(alone, unit[alone.abs().argmin(1)]))
    after = periodic.roll(1, 1)[..., None] & (count == 1)
    vectors = torch.where(count == 0, unit, torch.where(after, across[:, None], vectors))
    there = periodic[..., None] | (count == 0) | after
    return torch.where(there, vectors, _normalised(_faces(vectors)))


def _faces(lattice: Tensor) -> Tensor:
    """Normals of the faces that each vector does not lie in, as long as their areas."""
    return torch.linalg.cross(lattice.roll(-1, 1), lattice.roll(-2, 1))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Product of vectors, summed in one order however many there are."""
    x, y, z = (a * b).unbind(-1)
    return x + y + z


def _lengths(vectors: Tensor) -> Tensor:
    return _dot(vectors, vectors).sqrt()


def _normalised(vectors: Tensor) -> Tensor:
    return vectors / _lengths(vectors)[..., None]


def _root(value: Tensor, degree: Tensor | int) -> Tensor:
    """The root rounded down, whole powers exactly."""
    return (value ** (1 / degree) + 1e-9).floor()


def _shared(most: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of at most `most` [S, 3] with a product within `limit` [S], the larger ones alike; what is left."""
    rising, order = most.sort(1)
    chosen, left = [], limit
    for k, number in enumerate(rising.unbind(1)):
        chosen.append(torch.minimum(number, _root(left, 3 - k)))
        left = (left / chosen[-1]).floor()
    return torch.empty_like(most).scatter_(1, order, torch.stack(chosen, 1)), left
