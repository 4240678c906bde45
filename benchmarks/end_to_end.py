"""Energy, forces and stress through ASE calculators: FastUMACalculator beside fairchem-core's presets, in one run.

    python benchmarks/end_to_end.py --checkpoint MODEL.pt --systems cu:32 cu:1000 water c60 \
        --impls fastuma:accurate fastuma:fast fairchem:nitro fairchem:multigpu --out ROWS.jsonl

Each structure is moved a little before every call, as in molecular dynamics: edges change and nothing is cached.
Times are host times from call to result. Forces are compared with fairchem-core's general mode in float64 on the same
structure, where that fits into memory. Weights may be random (a stand-in of the same shape): then fairchem-core's check
that a file is a known release is switched off for its nitro preset, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from ase import Atoms
from rows import Rows, add_arguments, brief, quantiles, times_of
from systems import build

REFERENCE = "fairchem:float64"


def calculator(impl: str, checkpoint: str, task: str):
    """The ASE calculator that a row's `impl` names."""
    family, _, preset = impl.partition(":")
    if family == "fastuma":
        from ase_fastuma import FastUMACalculator

        return FastUMACalculator(checkpoint, task=task, precision=preset, device="cuda", backend="fused")
    from fairchem.core import FAIRChemCalculator
    from fairchem.core.units.mlip_unit import load_predict_unit
    from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

    settings: str | InferenceSettings = preset
    if preset in ("general", "float64"):
        settings = InferenceSettings(
            tf32=False,
            activation_checkpointing=preset == "float64",
            merge_mole=preset == "general",
            compile=False,
            execution_mode="general",
            base_precision_dtype=torch.float64 if preset == "float64" else torch.float32,
        )
    if preset == "nitro":
        from fairchem.core.models.uma.uma_nitro import _inference

        _inference.verify_checkpoint_file = lambda path: None
    return FAIRChemCalculator(load_predict_unit(checkpoint, inference_settings=settings, device="cuda"), task_name=task)


def columns(impl: str) -> dict[str, str | None]:
    """What rows say of "fastuma:PRECISION" or of a peer."""
    family, _, preset = impl.partition(":")
    return {"impl": family, "precision": preset} if family == "fastuma" else {"impl": impl, "precision": None}


def evaluate(atoms: Atoms, calc) -> np.ndarray:
    """Energy, forces and, where something is periodic, stress; returns the forces (eV/A)."""
    atoms.calc = calc
    atoms.get_potential_energy()
    if atoms.pbc.any():
        atoms.get_stress()
    return atoms.get_forces()


def moving(atoms: Atoms) -> Iterator[Atoms]:
    """The structure, moved a little further each time, so that nothing is found in a cache."""
    rng, atoms = np.random.default_rng(2), atoms.copy()
    while True:
        atoms.positions += rng.normal(scale=1e-3, size=atoms.positions.shape)
        yield atoms


def measure(impl: str, options: argparse.Namespace, name: str, reference: np.ndarray | None) -> dict[str, Any]:
    """The measured columns of one row."""
    atoms, task = build(name)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    calc = calculator(impl, options.checkpoint, task)
    forces = evaluate(atoms.copy(), calc)
    first_call = time.perf_counter() - start
    call, steps = functools.partial(evaluate, calc=calc), moving(atoms)
    times = times_of(call, steps, 0.0, 1)
    if times[0] < 1e3 * options.long:  # else there is nothing to warm up, and no time
        times_of(call, steps, 0.0, 2)
        # The peak is that of everything since the start: what a CUDA graph holds was allocated when it was recorded.
        times = times_of(call, steps, options.seconds, 5)
    error = None if reference is None else float(np.linalg.norm(forces - reference) / np.linalg.norm(reference))
    return {
        **quantiles(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_call_s": first_call,
        "force_rel_err": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--systems", nargs="+", required=True)
    parser.add_argument("--impls", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the repeats of one row")
    parser.add_argument("--reference-atoms", type=int, default=1100, help="largest structure to compare with float64")
    parser.add_argument(
        "--long", type=float, default=5.0, help="calls of so many seconds are timed once, after the first"
    )
    add_arguments(parser)
    options = parser.parse_args()
    rows, references = Rows("end_to_end", options), {}
    for name in options.systems:
        atoms, task = build(name)
        if len(atoms) <= options.reference_atoms and not rows.time_is_up(f"float64 {name}"):
            try:
                references[name] = evaluate(atoms, calculator(REFERENCE, options.checkpoint, task))
            except Exception as error:  # the times are worth having without it
                print(f"float64 {name}: {brief(error)}", flush=True)
            atoms.calc = None
    for impl in options.impls:
        for name in options.systems:
            if rows.time_is_up(f"{impl} {name}"):
                continue
            try:
                found = measure(impl, options, name, references.get(name))
            except (torch.OutOfMemoryError, MemoryError):
                found = {"out_of_memory": True}
            except Exception as error:  # a peer that fails is a row too; the others still run
                found = {"error": brief(error)}
            row = {"system": name.split(":")[0], "atoms": len(build(name)[0]), **columns(impl), **found}
            rows.write(row, ("median_ms", "peak_gib", "first_call_s", "force_rel_err"))


if __name__ == "__main__":
    main()
