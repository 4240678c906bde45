"""Molecular dynamics of copper at constant energy: time of a step, the GPU's share of it, and the drift of the energy.

    python benchmarks/md.py --checkpoint MODEL.pt --out ROWS.jsonl
    python benchmarks/md.py --checkpoint MODEL.pt --out ROWS.jsonl --system cu:108 --impls fastuma:fast fairchem:nitro

ASE's velocity Verlet. The rows' times are those of single steps on the host; `wall_s` is the whole run and `step_ms`
its mean step. `gpu_ms` is how long the GPU is busy in a step, from a profile of some further steps (kernels and copies,
overlaps counted once), and `gpu_fraction` its share of `step_ms`, which is measured without the profiler. Energies are
those of the second half: `drift` in meV/atom/ps by a linear fit, `fluctuation` about it in meV/atom. Random weights
conserve energy as trained ones do, if the time step suits them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from ase import units
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from end_to_end import calculator, columns
from rows import Rows, add_arguments, brief, quantiles
from systems import build
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM_UP = 20  # steps before the clock starts
PROFILED = 20  # steps after it has stopped
ENERGY_INTERVAL = 10  # steps


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (first, last)."""
    total, end = 0.0, -np.inf
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def busy_ms(dynamics: VelocityVerlet) -> float | None:
    """Milliseconds in which the GPU works, a step; None, and a line that says why, where no profile can be taken."""
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            dynamics.run(PROFILED)
            torch.cuda.synchronize()
        events = [e for e in trace.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        if not events:
            raise RuntimeError("no kernels in the profile")
    except RuntimeError as error:  # the run itself is worth its row
        print(f"gpu_ms: {brief(error)}", flush=True)
        return None
    return covered((e.time_range.start, e.time_range.end) for e in events) / PROFILED / 1e3


def measure(impl: str, options: argparse.Namespace) -> dict[str, Any]:
    """The measured columns of one row."""
    atoms, task = build(options.system)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    atoms.calc = calculator(impl, options.checkpoint, task)
    atoms.get_forces()
    first_call = time.perf_counter() - start
    thermalize_momenta(atoms, options.temperature, rng=np.random.default_rng(1))
    Stationary(atoms)
    dynamics = VelocityVerlet(atoms, timestep=options.timestep * units.fs)
    dynamics.run(WARM_UP)
    torch.cuda.synchronize()

    times, energies = [], []
    begin = last = time.perf_counter()
    for step, _ in enumerate(dynamics.irun(options.steps)):  # the present state, then each step
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
        if step % ENERGY_INTERVAL == 0:
            energies.append((step, atoms.get_total_energy()))
    wall = last - begin
    times = times[1:]

    gpu = busy_ms(dynamics)
    step, energy = np.array(energies[len(energies) // 2 :]).T
    picoseconds, energy = 1e-3 * options.timestep * step, 1e3 * energy / len(atoms)
    slope, level = np.polyfit(picoseconds, energy, 1)
    return {
        **quantiles(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_call_s": first_call,
        "steps": options.steps,
        "timestep_fs": options.timestep,
        "wall_s": wall,
        "step_ms": 1e3 * wall / options.steps,
        "gpu_ms": gpu,
        "gpu_fraction": None if gpu is None else gpu / (1e3 * wall / options.steps),
        "drift": float(slope),
        "fluctuation": float((energy - slope * picoseconds - level).std()),
        "temperature": float(atoms.get_temperature()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--system", default="cu:1000")
    parser.add_argument("--impls", nargs="+", default=["fastuma:accurate"], help="as in end_to_end.py")
    parser.add_argument("--steps", type=int, default=1000, help="at least 40")
    parser.add_argument("--timestep", type=float, default=1.0, help="fs")
    parser.add_argument("--temperature", type=float, default=300.0, help="of the momenta at the start, K")
    add_arguments(parser)
    options = parser.parse_args()
    if options.steps < 4 * ENERGY_INTERVAL:
        parser.error(f"--steps: expected at least {4 * ENERGY_INTERVAL}, got {options.steps}")
    rows = Rows("md", options)
    for impl in options.impls:
        if rows.time_is_up(impl):
            continue
        try:
            found = measure(impl, options)
        except Exception as error:  # the others still run
            found = {"error": brief(error)}
        row = {"system": options.system.split(":")[0], "atoms": len(build(options.system)[0]), **columns(impl), **found}
        rows.write(row, ("median_ms", "step_ms", "gpu_ms", "gpu_fraction", "drift", "fluctuation", "peak_gib"))


if __name__ == "__main__":
    main()
