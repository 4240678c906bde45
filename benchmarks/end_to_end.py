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
import gc
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import triton
from ase import Atoms
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


def evaluate(atoms: Atoms, calc) -> np.ndarray:
    """Energy, forces and, where something is periodic, stress; returns the forces (eV/A)."""
    atoms.calc = calc
    atoms.get_potential_energy()
    if atoms.pbc.any():
        atoms.get_stress()
    return atoms.get_forces()


def measure(impl: str, checkpoint: str, name: str, seconds: float, reference: np.ndarray | None) -> tuple[dict, object]:
    """One row, and the forces on the unmoved structure."""
    atoms, task = build(name)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    calc = calculator(impl, checkpoint, task)
    forces = evaluate(atoms.copy(), calc)
    first_call = time.perf_counter() - start
    rng = np.random.default_rng(2)
    moving, times = atoms.copy(), []
    for _ in range(3):
        moving.positions += rng.normal(scale=1e-3, size=moving.positions.shape)
        evaluate(moving, calc)
    # The peak is that of everything since the start: what a CUDA graph holds was allocated when it was recorded.
    stop = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < stop and len(times) < 100):
        moving.positions += rng.normal(scale=1e-3, size=moving.positions.shape)
        start = time.perf_counter()
        evaluate(moving, calc)
        times.append(1e3 * (time.perf_counter() - start))
    error = None if reference is None else float(np.linalg.norm(forces - reference) / np.linalg.norm(reference))
    found = {
        "median_ms": float(np.median(times)),
        "p20_ms": float(np.quantile(times, 0.2)),
        "p80_ms": float(np.quantile(times, 0.8)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_call_s": first_call,
        "force_rel_err": error,
    }
    return found, forces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--systems", nargs="+", required=True)
    parser.add_argument("--impls", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the repeats of one row")
    parser.add_argument("--reference-atoms", type=int, default=1100, help="largest structure to compare with float64")
    parser.add_argument("--commit", help="commit to write into the rows; default: that of this checkout")
    parser.add_argument("--budget", type=float, default=1e9, help="stop before a new row after this many seconds")
    options = parser.parse_args()
    commit = (
        options.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    began, references = time.perf_counter(), {}
    fixed = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }
    for name in options.systems:
        atoms, task = build(name)
        if len(atoms) <= options.reference_atoms and time.perf_counter() - began < options.budget:
            calc = calculator(REFERENCE, options.checkpoint, task)
            references[name] = evaluate(atoms, calc)
            del calc, atoms.calc
    for impl in options.impls:
        for name in options.systems:
            if time.perf_counter() - began > options.budget:
                print(f"{impl} {name}: left out, the time is up", flush=True)
                continue
            row = {"bench": "end_to_end", "system": name.split(":")[0], "atoms": len(build(name)[0]), "impl": impl}
            if impl.startswith("fastuma"):
                row["impl"] = "fastuma"
            row["precision"] = impl.partition(":")[2] if impl.startswith("fastuma") else None
            try:
                found, _ = measure(impl, options.checkpoint, name, options.seconds, references.get(name))
            except torch.OutOfMemoryError:
                found = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "peak_gib", "first_call_s", "force_rel_err"))
                found["out_of_memory"] = True
            except Exception as error:  # a peer that fails is a row too; the others still run
                found = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "peak_gib", "first_call_s", "force_rel_err"))
                found["error"] = f"{type(error).__name__}: {error}"[:300]
            row |= found | fixed
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = {k: row[k] for k in ("median_ms", "peak_gib", "first_call_s", "force_rel_err")}
            numbers = " ".join(f"{k}={v:.4g}" if v is not None else f"{k}=-" for k, v in shown.items())
            print(f"{impl:24} {name:8} {numbers} {row.get('error', '')}", flush=True)


if __name__ == "__main__":
    main()
