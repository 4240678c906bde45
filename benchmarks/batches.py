"""Many different systems in one call: `evaluate` beside fairchem-core's batches, in one run.

    python benchmarks/batches.py --checkpoint MODEL.pt --out ROWS.jsonl
    python benchmarks/batches.py --checkpoint MODEL.pt --out ROWS.jsonl --systems metals16x108 --impls fastuma:accurate

Energies and forces from lists of `Atoms` to arrays on the host, the work of the host included: what a user calls. All
structures move a little before every call.

| system | structures |
|---|---|
| g2xN | N molecules of ASE's g2 set with over 3 atoms, as "omol": 82 compositions, then these again, displaced |
| metalsNxA | N of the 16 fcc metals, A atoms each (systems.py has the sizes), as "omat" |

| key | meaning |
|---|---|
| median_ms | of calls with compositions that were seen before |
| new_batch_ms | median of calls whose mixtures of experts were not seen: ions of another charge, alloys |
| structures, structures_per_s | in a call; with median_ms |
| settings | fairchem-core's settings that ran in the end |

fairchem-core's rows ("fairchem:PRESET") go through its predict unit, `AtomicData.from_ase` and `data_list_collater`;
with its preset "batch" experts stay unmerged, since a merged model serves a single composition.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.collections import g2
from end_to_end import columns
from rows import Rows, add_arguments, brief, quantiles, times_of
from systems import CELLS

SYSTEMS = ("g2x64", "metals16x108", "g2x10000")
IMPLS = ("fastuma:accurate", "fastuma:fast", "fairchem:batch")
METALS = ("Al", "Ca", "Ni", "Cu", "Sr", "Rh", "Pd", "Ag", "Ce", "Yb", "Ir", "Pt", "Au", "Pb", "Ac", "Th")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

Evaluate = Callable[[list[Atoms]], list[np.ndarray]]
"""Energies and forces of structures; returns the forces (eV/A)."""


def molecules(count: int, charge: int = 0) -> list[Atoms]:
    """Different compositions first, then displaced copies; ions of a charge, with one or no unpaired electron."""
    different: dict[str, Atoms] = {}
    for name in g2.names:
        atoms = molecule(name)
        if len(atoms) > 3:
            different.setdefault(atoms.get_chemical_formula(), atoms)
    templates, found = list(different.values()), []
    for i in range(count):
        atoms = templates[i % len(templates)].copy()
        atoms.rattle(0.02, seed=i)
        atoms.info = {"charge": charge, "spin": 1 + (int(atoms.numbers.sum()) - charge) % 2}
        found.append(atoms)
    return found


def metals(count: int, size: int, replaced: int = 0) -> list[Atoms]:
    """fcc metals; `replaced` atoms of each are of the next one in the list."""
    found = []
    for i in range(count):
        atoms = bulk(METALS[i], "fcc", cubic=True) * CELLS[size]
        atoms.symbols[:replaced] = METALS[(i + 1) % len(METALS)]
        atoms.rattle(0.05, seed=i)
        atoms.info = {"charge": 0, "spin": 0}
        found.append(atoms)
    return found


def build(name: str, variant: int = 0) -> tuple[list[Atoms], str]:
    """The structures of a system, and their task; another variant has the same sizes and elements, other mixtures."""
    if found := re.fullmatch(r"g2x(\d+)", name):
        return molecules(int(found[1]), variant), "omol"
    found = re.fullmatch(r"metals(\d+)x(\d+)", name)
    if found and int(found[1]) <= len(METALS) and int(found[2]) in CELLS:
        return metals(int(found[1]), int(found[2]), variant), "omat"
    raise ValueError(f"system: expected g2xN or metalsNxA with N to {len(METALS)}, A of {list(CELLS)}, got {name!r}")


def fastuma(checkpoint: str, task: str, precision: str) -> tuple[Evaluate, Callable[[], str | None]]:
    """Ours, and a word on settings."""
    from ase_fastuma import FastUMACalculator, evaluate

    calc = FastUMACalculator(checkpoint, task=task, precision=precision, device=DEVICE)

    def forces(structures: list[Atoms]) -> list[np.ndarray]:
        return [result["forces"] for result in evaluate(structures, calc, progress=False)]

    return forces, lambda: None


def fairchem(checkpoint: str, task: str, preset: str, at_once: int) -> tuple[Evaluate, Callable[[], str | None]]:
    """fairchem-core's predict unit on batches of so many structures, and the settings that it runs with."""
    from fairchem.core.datasets import data_list_collater
    from fairchem.core.datasets.atomic_data import AtomicData
    from fairchem.core.units.mlip_unit import load_predict_unit
    from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

    settings: str | InferenceSettings = preset
    if preset == "float64":
        settings = InferenceSettings(execution_mode="general", base_precision_dtype=torch.float64)
    unit = load_predict_unit(checkpoint, inference_settings=settings, device=DEVICE)
    dtype, keys = unit.inference_settings.base_precision_dtype, ["charge", "spin"]

    def forces(structures: list[Atoms]) -> list[np.ndarray]:
        found = []
        for first in range(0, len(structures), at_once):
            part = structures[first : first + at_once]
            data = [AtomicData.from_ase(a, task_name=task, target_dtype=dtype, r_data_keys=keys) for a in part]
            out = unit.predict(data_list_collater(data, otf_graph=True))
            out["energy"].cpu()
            lengths = [len(atoms) for atoms in part]
            found += [f.numpy() for f in out["forces"].detach().cpu().split(lengths)]
        return found

    def running() -> str:
        s = unit.inference_settings
        names = ("execution_mode", "merge_mole", "activation_checkpointing", "compile", "tf32")
        return ", ".join(f"{name}={getattr(s, name)}" for name in names)

    return forces, running


def opened(impl: str, checkpoint: str, task: str, at_once: int) -> tuple[Evaluate, Callable[[], str | None]]:
    """What a row's `impl` names."""
    family, _, preset = impl.partition(":")
    return fastuma(checkpoint, task, preset) if family == "fastuma" else fairchem(checkpoint, task, preset, at_once)


def moving(structures: list[Atoms]) -> Iterator[list[Atoms]]:
    """The structures, moved a little further each time."""
    rng = np.random.default_rng(2)
    while True:
        for atoms in structures:
            atoms.positions += rng.normal(scale=1e-3, size=atoms.positions.shape)
        yield structures


def measure(
    impl: str, checkpoint: str, name: str, options: argparse.Namespace, reference: np.ndarray | None
) -> dict[str, Any]:
    """One row."""
    structures, task = build(name)
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    evaluate, running = opened(impl, checkpoint, task, options.at_once)
    forces = np.concatenate(evaluate(structures))
    first_call = time.perf_counter() - start
    calls, long = moving(structures), first_call > options.long
    times_of(evaluate, calls, 0.0, 0 if long else options.warm_up)
    found: dict[str, Any] = quantiles(times_of(evaluate, calls, options.seconds, 1 if long else options.repeats))
    variants = (build(name, variant)[0] for variant in range(1, 1 + (0 if long else options.new_batches)))
    new = times_of(evaluate, variants, float("inf"), options.new_batches)
    return found | {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
        "first_call_s": first_call,
        "force_rel_err": None if reference is None else relative_error(forces, reference),
        "new_batch_ms": float(np.median(new)) if new else None,
        "structures_per_s": 1e3 * len(structures) / found["median_ms"],
        "settings": running(),
    }


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """In norm, over all atoms."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--impls", nargs="+", default=IMPLS)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the repeats of one row")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of one row at least")
    parser.add_argument(
        "--warm-up", type=int, default=4, help="calls before the repeats, which record what comes again"
    )
    parser.add_argument("--new-batches", type=int, default=3, help="calls with mixtures that were not seen")
    parser.add_argument("--long", type=float, default=20.0, help="a first call of so many seconds is repeated once")
    parser.add_argument("--at-once", type=int, default=256, help="structures in a batch of fairchem-core")
    parser.add_argument("--reference-atoms", type=int, default=2000, help="most atoms to compare with float64")
    add_arguments(parser)
    options = parser.parse_args()
    rows = Rows("batches", options)
    for name in options.systems:
        structures, task = build(name)
        num_atoms, reference = sum(map(len, structures)), None
        if num_atoms <= options.reference_atoms and not rows.time_is_up(f"float64 {name}"):
            try:
                reference = np.concatenate(fairchem(options.checkpoint, task, "float64", 16)[0](structures))
            except Exception as error:  # the times are worth having without it
                print(f"float64 {name}: {brief(error)}", flush=True)
        for impl in options.impls:
            if rows.time_is_up(f"{impl} {name}"):
                continue
            try:
                found = measure(impl, options.checkpoint, name, options, reference)
            except (torch.OutOfMemoryError, MemoryError):
                found = {"out_of_memory": True}
            except Exception as error:  # a peer that fails is a row too; the others still run
                found = {"error": brief(error)}
            row = {"system": name, "atoms": num_atoms, **columns(impl), **found, "structures": len(structures)}
            shown = ("median_ms", "new_batch_ms", "structures_per_s", "peak_gib", "first_call_s", "force_rel_err")
            rows.write(row, shown)


if __name__ == "__main__":
    main()
