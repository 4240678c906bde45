"""Rows of measurements: what every row says about the machine and the code, one JSON object a line.

| key | meaning |
|---|---|
| bench, system, atoms | script, structure (systems.py) |
| impl, precision | what ran: "fastuma" in a precision, a peer, or plain "torch" |
| median_ms, p20_ms, p80_ms | median and quantiles of the repeats |
| peak_gib | peak of the allocated GPU memory |
| first_call_s | from nothing to the first result, compilation included |
| force_rel_err | relative error of the forces against float64 |
| gpu, torch, triton, commit, date, command | where, with what and how |

A number that was not measured is null. Scripts add keys of their own after these. A run is what was measured with one
commit on one day on one machine; comparisons stay within a run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

KEYS = ("bench", "system", "atoms", "impl", "precision", "median_ms", "p20_ms", "p80_ms", "peak_gib", "first_call_s")
KEYS += ("force_rel_err", "gpu", "torch", "triton", "commit", "date", "command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all scripts share."""
    parser.add_argument("--out", type=Path, required=True, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to write into the rows; default: that of this checkout")
    parser.add_argument("--budget", type=float, default=1e9, help="stop before a new row after this many seconds")


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Median, 20 % and 80 % quantiles of times in ms, under their keys."""
    return {name: float(np.quantile(times, q)) for name, q in (("median_ms", 0.5), ("p20_ms", 0.2), ("p80_ms", 0.8))}


def times_of(function: Callable[[Any], object], arguments: Iterable[Any], seconds: float, least: int) -> list[float]:
    """Times (ms) of calls with one argument after another: so many at least, at most 100, for about so many seconds."""
    times: list[float] = []
    stop = time.perf_counter() + seconds
    for argument in arguments:
        if len(times) >= least and (time.perf_counter() > stop or len(times) >= 100):
            break
        start = time.perf_counter()
        function(argument)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def brief(error: Exception) -> str:
    """An error on one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class Rows:
    """Appends rows to a file and prints each on a line."""

    def __init__(self, bench: str, options: argparse.Namespace) -> None:
        self._path, self._began, self._budget = options.out, time.perf_counter(), options.budget
        self._bench = bench
        self._fixed = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": options.commit or _checkout(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": " ".join(["python", *sys.argv]),
        }

    def time_is_up(self, name: str) -> bool:
        """Whether the budget is used up; then says that `name` is left out."""
        up = time.perf_counter() - self._began > self._budget
        if up:
            print(f"{name}: left out, the time is up", flush=True)
        return up

    def write(self, row: dict[str, Any], shown: Sequence[str]) -> None:
        """Append a row, missing keys as null, and print the numbers under the keys `shown`."""
        row = {"bench": self._bench} | row | self._fixed
        ordered = {key: row.get(key) for key in KEYS} | {k: v for k, v in row.items() if k not in KEYS}
        with self._path.open("a") as file:
            file.write(json.dumps(ordered) + "\n")
        name = " ".join(str(row[key]) for key in ("op", "impl", "precision", "system", "atoms") if row.get(key))
        numbers = [f"{key}={row[key]:.4g}" if row.get(key) is not None else f"{key}=-" for key in shown]
        state = "out of memory" if row.get("out_of_memory") else row.get("error", "")
        print(f"{name:52}", *numbers, state, flush=True)


def _checkout() -> str:
    """The commit of this checkout, marked where files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("--commit: expected a name for this code, got none, and this is no git checkout")
    return done.stdout.strip()
