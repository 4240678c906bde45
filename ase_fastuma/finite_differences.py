"""The Hessian from forces of displaced structures, many in one pass; a run that stops goes on from its file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import numpy as np

from ase_fastuma.batch import progress_bar, requests
from ase_fastuma.evaluation import evaluate_packed

if TYPE_CHECKING:
    from ase import Atoms

    from ase_fastuma.calculator import FastUMACalculator

STEP = 0.01
"""Displacement in A, as in ASE's Vibrations and in phonopy."""

# Shorter steps leave nothing but rounding of float64 forces, and longer ones another structure (A).
_STEPS = (1e-6, 1.0)

# What is lost at most when a run is killed (seconds); one that is interrupted or fails loses nothing.
_SAVE_EVERY = 10.0


def finite_difference_hessian(
    calc: FastUMACalculator,
    atoms: Atoms,
    indices: np.ndarray,
    step: float = STEP,
    file: str | Path | None = None,
    progress: bool | None = None,
) -> np.ndarray:
    """The block of the atoms `indices` [n]: float64 [3 n, 3 n] in eV/A^2, by central differences of `step` (A).

    See `FastUMACalculator.get_hessian` for `file` and `progress`.
    """
    if isinstance(step, bool) or not isinstance(step, Real):
        raise TypeError(f"step: expected a length in A, got {step!r}")
    if not _STEPS[0] <= step <= _STEPS[1]:
        raise ValueError(f"step: expected {_STEPS[0]:g} to {_STEPS[1]:g} A, got {step!r}")
    rows = _Rows(calc, atoms, indices, step, None if file is None else Path(file))
    missing = np.flatnonzero(np.isnan(rows.values[:, 0]))
    structures = _displaced(atoms, indices, missing, step)
    outcomes = evaluate_packed(calc._start().backend, requests(calc, structures, None, frozenset({"forces"})))
    upper = np.empty(0)
    try:
        for i, outcome in enumerate(progress_bar(outcomes, 2 * len(missing), progress)):
            if isinstance(outcome, Exception):
                raise outcome
            forces = outcome["forces"][indices].ravel()
            if i % 2:
                rows.set(missing[i // 2], (forces - upper) / (2 * step))
            else:
                upper = forces
    finally:
        rows.save()
    return (rows.values + rows.values.T) / 2


def _displaced(atoms: Atoms, indices: np.ndarray, coordinates: np.ndarray, step: float) -> Iterator[Atoms]:
    """The structure with each of the coordinates (of the atoms `indices`, in their order) raised, then lowered."""
    for coordinate in coordinates:
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[indices[coordinate // 3], coordinate % 3] += sign * step
            yield moved


def _described(calc: FastUMACalculator, atoms: Atoms, indices: np.ndarray, step: float) -> dict[str, Any]:
    """What rows depend on, as a file holds it."""
    model = [calc.checkpoint.digest, *calc._state(atoms), calc.parameters["precision"]]
    return {
        "numbers": atoms.numbers,
        "positions": atoms.positions,
        "cell": atoms.cell.array,
        "pbc": atoms.pbc,
        "indices": indices,
        "step": np.array(step),
        "model": np.array(json.dumps(model)),
    }


class _Rows:
    """Rows of the Hessian, NaN until they are known; kept in a .npz file, if there is one, with what they belong to."""

    def __init__(
        self, calc: FastUMACalculator, atoms: Atoms, indices: np.ndarray, step: float, file: Path | None
    ) -> None:
        self.values = np.full((3 * len(indices), 3 * len(indices)), np.nan)
        self._file, self._saved, self._changed = file, time.monotonic(), False
        self._made_of: dict[str, Any] = {}
        if file is not None:
            self._made_of = _described(calc, atoms, indices, step)
            if file.exists():
                self._load(file)

    def _load(self, file: Path) -> None:
        if not is_zipfile(file):
            raise ValueError(f"file: expected rows of a Hessian in .npz format, got {file}")
        with np.load(file) as stored:
            missing = {"hessian", *self._made_of} - set(stored)
            if missing:
                raise ValueError(f"file: expected rows of a Hessian, got {file} without {min(missing)}")
            for name, value in self._made_of.items():
                if not np.array_equal(stored[name], value):
                    raise ValueError(
                        f"file: expected a new one or one of this structure and these settings, "
                        f"got {file} with other {name}"
                    )
            self.values = stored["hessian"]

    def set(self, row: int, values: np.ndarray) -> None:
        """Keep a row; save if that was long ago."""
        self.values[row], self._changed = values, True
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write the file as a whole, so that there is always a complete one."""
        if self._file is None or not self._changed:
            return
        partial = self._file.with_name(self._file.name + ".partial")
        with partial.open("wb") as stream:
            np.savez(stream, hessian=self.values, **self._made_of)
        os.replace(partial, self._file)
        self._saved, self._changed = time.monotonic(), False
