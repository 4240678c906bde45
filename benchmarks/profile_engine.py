"""Where the time of one fused evaluation goes: summed kernel times by name, and host time beside them.

python benchmarks/profile_engine.py --checkpoint MODEL.pt --system cu:1000 --precision accurate
"""

from __future__ import annotations

import argparse
import time

import torch
from systems import build
from torch.profiler import ProfilerActivity, profile

from ase_fastuma import FastUMACalculator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--system", default="cu:1000")
    parser.add_argument("--precision", default="accurate")
    parser.add_argument("--rows", type=int, default=25)
    options = parser.parse_args()
    atoms, task = build(options.system)
    atoms.calc = FastUMACalculator(
        options.checkpoint, task=task, precision=options.precision, device="cuda", backend="fused"
    )

    def step() -> None:
        atoms.rattle(1e-3)
        atoms.get_forces()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        step()
    wall = (time.perf_counter() - start) / 5 * 1e3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0 and e.self_cpu_time_total == 0]
    total = sum(e.self_device_time_total for e in events) / 1e3
    print(f"{options.system} {options.precision}: wall {wall:.2f} ms, kernels {total:.2f} ms")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[: options.rows]:
        print(f"{event.self_device_time_total / 1e3:9.3f} ms {event.count:5d}x {event.key[:90]}")


if __name__ == "__main__":
    main()
