"""Alternating compositions: one calculator for Cu, CuAu and Ni3Al in turn, beside a calculator for each of them alone.

    python benchmarks/compositions.py --checkpoint MODEL.pt --out ROWS.jsonl
    python benchmarks/compositions.py --checkpoint MODEL.pt --out ROWS.jsonl --atoms 1000 --impls fastuma:accurate

Every call sees atoms that have moved a little. The rows' times are those in turn, from call to result on the host;
`alone_ms` is the median of calls one after another, and `ratio` compares the two: 1 is full speed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from ase import Atoms
from end_to_end import calculator, columns, evaluate
from rows import Rows, add_arguments, brief, quantiles
from systems import build

COMPOSITIONS = ("cu", "cuau", "ni3al")
WARM_UP = 3  # calls: what is merged, compiled and recorded happens in the first two


class Moving:
    """A structure whose atoms move a little before each call, as in molecular dynamics."""

    def __init__(self, name: str) -> None:
        self.atoms: Atoms
        self.atoms, self.task = build(name)
        self._random = np.random.default_rng(2)

    def timed(self, calc) -> float:
        """Milliseconds of one call."""
        self.atoms.positions += self._random.normal(scale=1e-3, size=self.atoms.positions.shape)
        start = time.perf_counter()
        evaluate(self.atoms, calc)
        return 1e3 * (time.perf_counter() - start)


def measure(impl: str, checkpoint: str, atoms: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each composition."""
    torch.cuda.reset_peak_memory_stats()
    names = [f"{composition}:{atoms}" for composition in COMPOSITIONS]
    rows: list[dict[str, Any]] = []
    for name in names:
        start = time.perf_counter()
        structure = Moving(name)
        calc = calculator(impl, checkpoint, structure.task)
        structure.timed(calc)
        first_call = time.perf_counter() - start
        alone = [structure.timed(calc) for _ in range(WARM_UP + repeats)][WARM_UP:]
        rows.append({"first_call_s": first_call, "alone_ms": float(np.median(alone))})
        del calc
    structures = [Moving(name) for name in names]
    calc = calculator(impl, checkpoint, structures[0].task)
    times = np.array([[s.timed(calc) for s in structures] for _ in range(WARM_UP + repeats)])[WARM_UP:]
    for composition, row, in_turn in zip(COMPOSITIONS, rows, times.T, strict=True):
        row |= {"system": composition, "atoms": atoms, **columns(impl), **quantiles(in_turn)}
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "ratio": row["median_ms"] / row["alone_ms"]}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--atoms", type=int, default=108, help="atoms of each structure: 32, 108, 256, 500, 1000, ...")
    parser.add_argument("--impls", nargs="+", default=["fastuma:accurate", "fastuma:fast"], help="as in end_to_end.py")
    parser.add_argument("--repeats", type=int, default=30)
    add_arguments(parser)
    options = parser.parse_args()
    rows = Rows("compositions", options)
    for impl in options.impls:
        if rows.time_is_up(impl):
            continue
        try:
            found = measure(impl, options.checkpoint, options.atoms, options.repeats)
        except Exception as error:  # the others still run
            print(f"{impl}: {brief(error)}", flush=True)
            continue
        for row in found:
            rows.write(row, ("alone_ms", "median_ms", "ratio", "peak_gib", "first_call_s"))


if __name__ == "__main__":
    main()
