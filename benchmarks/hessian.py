"""Hessians: FastUMACalculator beside fairchem-core's own, in one run.

    python benchmarks/hessian.py --checkpoint MODEL.pt --out ROWS.jsonl
    python benchmarks/hessian.py --checkpoint MODEL.pt --out ROWS.jsonl --systems c60 --impls fastuma:accurate

Times are host times from the call to the matrix, for a structure that moves a little before every call. Matrices are
compared with general mode in float64 on the same structure, as they are found, before anything makes them symmetric:

| key | meaning |
|---|---|
| hessian_err, asymmetry | largest difference from float64 and largest |H - H^T|, eV/A^2 |
| hessian_max | largest entry, eV/A^2 |
| forces_before_ms, forces_after_ms | medians for energy and forces before the first Hessian and after the last |

`first_call_s` is without what the kernels of forces take to compile where those are timed first. fairchem-core's rows
are its general mode in float32, with all directions at once ("vmap") or one after another ("loop"), and the loop in its
fast mode ("fast_loop"); its calculators compute a Hessian with everything else, so forces have no times of their own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from ase import Atoms
from end_to_end import columns, moving
from rows import Rows, add_arguments, brief, quantiles, times_of
from systems import build

SYSTEMS = ("benzene", "c60", "nanotube", "cu:108")
IMPLS = ("fastuma:accurate", "fairchem:vmap", "fairchem:loop", "fairchem:fast_loop")
CUDA = torch.cuda.is_available()

Hessian = Callable[[Atoms], np.ndarray]
"""From a structure to [3 N, 3 N] in eV/A^2, row after row as it was found."""


def fastuma(checkpoint: str, task: str, precision: str, backend: str = "auto") -> tuple[Hessian, Any]:
    """Our Hessian of a structure, and the calculator for its forces."""
    from ase_fastuma import FastUMACalculator

    calc = FastUMACalculator(checkpoint, task=task, precision=precision, backend=backend)

    def hessian(atoms: Atoms) -> np.ndarray:
        size = 3 * len(atoms)
        return calc.hessian_vector_product(atoms, np.eye(size).reshape(size, -1, 3)).reshape(size, size)

    return hessian, calc


def fairchem(checkpoint: str, task: str, preset: str) -> tuple[Hessian, None]:
    """fairchem-core's Hessian of a structure."""
    from fairchem.core import FAIRChemCalculator
    from fairchem.core.units.mlip_unit import load_predict_unit
    from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

    modes = {"vmap": ("general", True), "loop": ("general", False), "fast_loop": ("umas_fast_gpu", False)}
    mode, vmap = modes[preset]
    settings = InferenceSettings(
        tf32=False,
        activation_checkpointing=False,
        merge_mole=True,
        compile=False,
        execution_mode=mode,
        predict_untrained_hessian={task},
        hessian_vmap=vmap,
    )
    device = "cuda" if CUDA else "cpu"
    unit = load_predict_unit(checkpoint, inference_settings=settings, device=device)
    calc = FAIRChemCalculator(unit, task_name=task)

    def hessian(atoms: Atoms) -> np.ndarray:
        calc.reset()
        return calc.get_property("hessian", atoms)

    return hessian, None


def opened(impl: str, checkpoint: str, task: str) -> tuple[Hessian, Any]:
    """What a row's `impl` names, and the calculator whose forces are timed (None for fairchem-core)."""
    family, _, preset = impl.partition(":")
    return fastuma(checkpoint, task, preset) if family == "fastuma" else fairchem(checkpoint, task, preset)


def median_of_forces(calc: Any, steps: Iterator[Atoms], seconds: float) -> float | None:
    """Median time (ms) of energy and forces, after the first calls, which record them."""
    if calc is None:
        return None
    forces = functools.partial(calc.get_property, "forces")
    times_of(forces, steps, 0.0, 3)
    return float(np.median(times_of(forces, steps, seconds, 5)))


def measure(
    impl: str, checkpoint: str, name: str, seconds: float, least: int, reference: np.ndarray | None
) -> dict[str, Any]:
    """One row."""
    atoms, task = build(name)
    steps = moving(atoms)
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    hessian, calc = opened(impl, checkpoint, task)
    opening = time.perf_counter() - start
    before = median_of_forces(calc, steps, seconds)
    start = time.perf_counter()
    matrix = hessian(atoms)
    first_call = opening + time.perf_counter() - start
    times_of(hessian, steps, 0.0, min(2, least))
    return {
        **quantiles(times_of(hessian, steps, seconds, least)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
        "first_call_s": first_call,
        "hessian_err": None if reference is None else float(np.abs(matrix - reference).max()),
        "hessian_max": float(np.abs(matrix).max()),
        "asymmetry": float(np.abs(matrix - matrix.T).max()),
        "forces_before_ms": before,
        "forces_after_ms": median_of_forces(calc, steps, seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--impls", nargs="+", default=IMPLS)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for the repeats of one row")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of one row at least")
    parser.add_argument("--no-reference", action="store_true", help="compare with nothing")
    add_arguments(parser)
    options = parser.parse_args()
    rows = Rows("hessian", options)
    for name in options.systems:
        atoms, task = build(name)
        reference = None
        if not options.no_reference and not rows.time_is_up(f"float64 {name}"):
            try:
                reference = fastuma(options.checkpoint, task, "float64", "general")[0](atoms)
            except Exception as error:  # the times are worth having without it
                print(f"float64 {name}: {brief(error)}", flush=True)
        for impl in options.impls:
            if rows.time_is_up(f"{impl} {name}"):
                continue
            try:
                found = measure(impl, options.checkpoint, name, options.seconds, options.repeats, reference)
            except (torch.OutOfMemoryError, MemoryError):
                found = {"out_of_memory": True}
            except Exception as error:  # a peer that fails is a row too; the others still run
                found = {"error": brief(error)}
            row = {"system": name.split(":")[0], "atoms": len(atoms), **columns(impl), **found}
            shown = ("median_ms", "peak_gib", "first_call_s", "hessian_err", "asymmetry", "hessian_max")
            rows.write(row, (*shown, "forces_before_ms", "forces_after_ms"))


if __name__ == "__main__":
    main()
