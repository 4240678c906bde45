"""Copper at constant energy in TorchSim: replicas that move together, with our model and with fairchem-core's own.

    python benchmarks/torchsim.py --checkpoint MODEL.pt --out ROWS.jsonl
    python benchmarks/torchsim.py --checkpoint MODEL.pt --out ROWS.jsonl --replicas 8 --atoms 108 --impls fastuma:fast

TorchSim's velocity Verlet, with TorchSim 0.6 or 0.3; fairchem-core's model ("torchsim:fairchem", as it comes: with the
preset "batch") needs 0.6. The rows' times are those of single steps on the host; `wall_s` is the whole run, and
`steps_per_s` its steps a second. Energies are those of the second half: `drift` in meV/atom/ps by a linear fit,
`fluctuation` about it in meV/atom, each the largest of the replicas. `force_rel_err` compares the forces at the start
with general mode in float64.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from ase import Atoms
from end_to_end import columns
from rows import Rows, add_arguments, brief, quantiles
from systems import build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchSim 0.3 uses torch.jit
    import torch_sim as ts

TASK = "omat"
PEER = "torchsim:fairchem"
ENERGY_INTERVAL = 5  # steps
DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def replicas(count: int, size: int) -> list[Atoms]:
    """Rattled copper, each in its own way."""
    found = []
    for seed in range(count):
        atoms, _ = build(f"cu:{size}")
        atoms.rattle(0.05, seed=seed)
        found.append(atoms)
    return found


def model_of(impl: str, checkpoint: str) -> Any:
    """The TorchSim model that a row's `impl` names."""
    family, _, precision = impl.partition(":")
    if family == "fastuma":
        from ase_fastuma.torchsim import FastUMAModel

        return FastUMAModel(checkpoint, task=TASK, precision=precision, device=DEVICE)
    if impl != PEER:
        raise ValueError(f"impl: expected {PEER!r} or 'fastuma:PRECISION', got {impl!r}")
    from fairchem.core.calculate.torchsim_interface import FairChemModel

    return FairChemModel(checkpoint, device=DEVICE, task_name=TASK)


def integrator(model: Any, structures: list[Atoms], timestep: float, temperature: float) -> tuple[Any, Callable]:
    """State at the start (K), and what makes a step (fs); TorchSim's versions differ in the words."""
    state = ts.initialize_state(structures, model.device, model.dtype)
    metal = ts.units.UnitSystem.metal  # of time: ps
    dt, kT = (torch.tensor(x, device=model.device, dtype=model.dtype) for x in (timestep * 1e-3, temperature))
    dt, kT = dt * metal.time, kT * metal.temperature
    if hasattr(ts, "nve_init"):
        state.rng = 1
        return ts.nve_init(state=state, model=model, kT=kT), lambda moving: ts.nve_step(moving, model, dt=dt)
    begin, step = ts.nve(model=model, dt=dt, kT=kT, seed=1)
    return begin(state), step


def total_energies(state: Any) -> torch.Tensor:
    """Potential and kinetic energy of each system [S], eV; on the device."""
    kinetic = 0.5 * (state.momenta.double() ** 2).sum(1) / state.masses.double()
    return state.energy.double().index_add(0, state.system_idx, kinetic)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(impl: str, options: argparse.Namespace, structures: list[Atoms], reference: np.ndarray) -> dict[str, Any]:
    """The measured columns of one row."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    state, step = integrator(model_of(impl, options.checkpoint), structures, options.timestep, options.temperature)
    forces = state.forces.double().cpu().numpy()
    first_call = time.perf_counter() - start
    for _ in range(options.warm_up):
        state = step(state)
    wait()
    times, energies = [], []
    begin = last = time.perf_counter()
    for i in range(options.steps):
        state = step(state)
        if i % ENERGY_INTERVAL == 0:
            energies.append(total_energies(state))
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    wait()
    wall = time.perf_counter() - begin
    energy = 1e3 * torch.stack(energies).cpu().numpy() / options.atoms  # [times, S]
    half = len(energy) // 2
    picoseconds = 1e-3 * options.timestep * ENERGY_INTERVAL * np.arange(len(energy))[half:]
    slopes, levels = np.polyfit(picoseconds, energy[half:], 1)
    return {
        **quantiles(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None,
        "first_call_s": first_call,
        "force_rel_err": float(np.linalg.norm(forces - reference) / np.linalg.norm(reference)),
        "steps": options.steps,
        "timestep_fs": options.timestep,
        "wall_s": wall,
        "steps_per_s": options.steps / wall,
        "drift": float(np.abs(slopes).max()),
        "fluctuation": float((energy[half:] - picoseconds[:, None] * slopes - levels).std(axis=0).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--atoms", type=int, default=32, help="atoms of each: 4, 32, 108, 256, 500, ...")
    parser.add_argument("--impls", nargs="+", default=["fastuma:accurate", "fastuma:fast", PEER])
    parser.add_argument("--steps", type=int, default=200, help="at least 40")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--timestep", type=float, default=1.0, help="fs")
    parser.add_argument("--temperature", type=float, default=300.0, help="of the momenta at the start, K")
    add_arguments(parser)
    options = parser.parse_args()
    if options.steps < 8 * ENERGY_INTERVAL:
        parser.error(f"--steps: expected at least {8 * ENERGY_INTERVAL}, got {options.steps}")
    logging.getLogger("torch_sim").setLevel(logging.WARNING)
    from ase_fastuma import FastUMACalculator, evaluate

    rows, structures = Rows("torchsim", options), replicas(options.replicas, options.atoms)
    exact = FastUMACalculator(options.checkpoint, task=TASK, backend="general", precision="float64", device=DEVICE)
    reference = np.concatenate([result["forces"] for result in evaluate(structures, exact, progress=False)])
    for impl in options.impls:
        if rows.time_is_up(impl):
            continue
        try:
            found = measure(impl, options, structures, reference)
        except torch.OutOfMemoryError:
            found = {"out_of_memory": True}
        except Exception as error:  # a peer that fails is a row too; the others still run
            found = {"error": brief(error)}
        row = {"system": f"cu{options.replicas}x{options.atoms}", "atoms": options.replicas * options.atoms}
        row |= columns(impl) | found | {"torch_sim": version("torch-sim-atomistic")}
        rows.write(row, ("median_ms", "steps_per_s", "drift", "fluctuation", "force_rel_err", "peak_gib"))


if __name__ == "__main__":
    main()
