"""Symmetric contraction of MACE beside its peers, and a whole MACE step with each, in one run.

    python benchmarks/symmetric_contraction.py --out ROWS.jsonl
    python benchmarks/symmetric_contraction.py --out ROWS.jsonl --species 3 10 89 --impls fastuma cuequivariance
    python benchmarks/symmetric_contraction.py --out ROWS.jsonl --what step --nodes 1000 3000

Peers are taken where they can be imported; the others are named in the output. They contract as mace-torch calls them:
one-hot species for mace-torch, indices for cuEquivariance with its reduced coefficients. OpenEquivariance's contraction
has mace-torch's signature and takes its place, although mace-torch 0.3.16 does not call it. 128 channels, 89 species in
the weights, float32.

`eager_us` is host time from call to call, work on the GPU included. `device_us` is that of a CUDA graph that holds many
calls on inputs of their own, together beyond the cache, or the sum of kernel times where a peer cannot be recorded
(`device_by`). Backward passes are timed alone, forward passes done. `floor_us` is the larger of what must be moved at
4 TB/s and what our coupling trees must compute at 60 TFLOP/s. `rel_err` is that of outputs and of the gradient, in
norm, against the formula of kernels/reference.py in float64. A step is energy and forces of a random model with two
layers on a rattled alloy; its `force_rel_err` is against mace-torch's own contraction. OpenEquivariance replaces only
the convolutions in it.

Without a GPU, TRITON_INTERPRET=1 and small --nodes run everything interpreted: a test of this script, no measurement.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ase.build import bulk
from ase_fastuma.kernels import reference
from ase_fastuma.kernels._couplings import Contraction, contraction
from ase_fastuma.kernels.symmetric_contraction import _kernels, symmetric_contraction
from rows import Rows, add_arguments, brief, quantiles
from torch import Tensor

IRREPS_IN = "0e+1o+2e+3o"
OUTPUTS = {"L0": "0e", "L1": "0e+1o", "L2": "0e+1o+2e"}
MODES = ("forward", "backward_x", "backward_xw", "double")
IMPLS = ("fastuma", "mace-torch", "cuequivariance", "openequivariance", "fastuma_ir_mul")
STEP_IMPLS = ("mace-torch", "fastuma", "cuequivariance", "openequivariance")
SPECIES = 89
CACHE_BYTES = 256e6  # several times the second-level cache
BYTES_PER_US = 4e6
FLOP_PER_US = 60e6


class Contract(NamedTuple):
    """One implementation of a contraction.

    Attributes:
        call: of features and `species_of` species.
        species_of: indices -> what the implementation takes.
        weights: its parameters.
        shape: of the features, without nodes.
        recordable: into a CUDA graph.
    """

    call: Callable[[Tensor, Tensor], Tensor]
    species_of: Callable[[Tensor], Tensor]
    weights: list[Tensor]
    shape: tuple[int, ...]
    recordable: bool = True


def wide(irreps: str, channels: int) -> str:
    """Irreps with a multiplicity."""
    return "+".join(f"{channels}x{part}" for part in irreps.split("+"))


def fastuma(irreps_out: str, channels: int, device: str, layout: str) -> Contract:
    """Our own."""
    spec = contraction(IRREPS_IN, irreps_out, 3)
    weights = torch.randn(SPECIES, len(spec.terms), channels, device=device, requires_grad=True)
    shape = (channels, spec.size_in) if layout == "mul_ir" else (spec.size_in, channels)
    return Contract(
        lambda x, z: symmetric_contraction(x, z, weights, irreps_out, layout=layout), lambda z: z, [weights], shape
    )


def peer(impl: str, irreps_out: str, channels: int, device: str) -> Contract:
    """That of a peer; ImportError where it is not installed."""
    from e3nn import o3

    irreps = o3.Irreps(wide(IRREPS_IN, channels)), o3.Irreps(wide(irreps_out, channels))
    size_in = o3.Irreps(IRREPS_IN).dim
    if impl == "cuequivariance":
        import cuequivariance_torch  # noqa: F401
        from mace.modules.wrapper_ops import CuEquivarianceConfig, SymmetricContractionWrapper

        config = CuEquivarianceConfig(enabled=True, layout="mul_ir", group="O3_e3nn", optimize_all=True)
        module = SymmetricContractionWrapper(*irreps, 3, SPECIES, cueq_config=config, use_reduced_cg=True).to(device)
        return Contract(module, lambda z: z.int(), list(module.parameters()), (size_in * channels,))
    if impl == "openequivariance":
        from openequivariance._torch import extlib
        from openequivariance._torch.symmetric_contraction import SymmetricContraction

        if not extlib.BUILT_EXTENSION:  # the import itself does not fail
            raise ImportError(f"extension of openequivariance: {extlib.BUILT_EXTENSION_ERROR}")
    else:
        from mace.modules.symmetric_contraction import SymmetricContraction
    module = SymmetricContraction(*irreps, 3, num_elements=SPECIES).to(device)
    return Contract(
        module,
        lambda z: torch.nn.functional.one_hot(z.long(), SPECIES).float(),
        [p for p in module.parameters() if p.requires_grad],
        (channels, size_in),
        recordable=impl != "openequivariance",  # it waits for the host and multiplies on the default stream
    )


def build(impl: str, irreps_out: str, channels: int, device: str) -> Contract:
    """What `impl` names."""
    if impl.startswith("fastuma"):
        return fastuma(irreps_out, channels, device, impl.removeprefix("fastuma").removeprefix("_") or "mul_ir")
    return peer(impl, irreps_out, channels, device)


def calls(mode: str, contract: Contract, species: Tensor) -> Callable[[], Any]:
    """A call of one mode on inputs of its own, all before it done."""
    x = torch.randn(len(species), *contract.shape, device=species.device, requires_grad=True)
    if mode == "forward":
        return lambda: contract.call(x, species)
    out = contract.call(x, species)
    g = torch.randn_like(out).requires_grad_()
    if mode == "backward_x":
        return lambda: torch.autograd.grad(out, x, g, retain_graph=True)
    if mode == "backward_xw":
        return lambda: torch.autograd.grad(out, (x, *contract.weights), g, retain_graph=True)
    (grad,) = torch.autograd.grad(out, x, g, create_graph=True)
    h = torch.randn_like(x)
    return lambda: torch.autograd.grad(grad, (x, g), h, retain_graph=True)


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def eager(call: Callable[[], Any], seconds: float) -> list[float]:
    """Times of a call in ms, each a mean over enough calls to fill the queue."""
    call()
    synchronise()
    start = time.perf_counter()
    call()
    synchronise()
    once = time.perf_counter() - start
    number = max(1, min(100, round(seconds / 5 / once)))
    times = []
    for _ in range(5 if once < seconds else 1):
        start = time.perf_counter()
        for _ in range(number):
            call()
        synchronise()
        times.append(1e3 * (time.perf_counter() - start) / number)
    return times


def replayed(prepared: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> float:
    """Device time of a call in us: a CUDA graph of one call after another, on the stream that prepared them."""
    with torch.cuda.stream(stream):
        prepared[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in prepared:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(prepared))
    return float(np.median(times))


def summed(call: Callable[[], Any]) -> float:
    """Device time of a call in us as the sum of its kernels' times."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.self_device_time_total for e in kernels) / 3


def floor_us(spec: Contraction, mode: str, nodes: int, channels: int, present: int) -> float | None:
    """What a call takes at least: memory traffic or arithmetic; None where gradients of weights come in."""
    operations = _kernels(spec, "mul_ir").operations()
    features = {
        "forward": (spec.size_in + spec.size_out, operations["forward"]),
        "backward_x": (2 * spec.size_in + spec.size_out, operations["backward x"]),
        "double": (3 * spec.size_in + 2 * spec.size_out, operations["double"]),
    }
    if mode not in features:
        return None
    size, count = features[mode]
    moved = 4 * channels * (nodes * size + present * len(spec.terms))
    return max(moved / BYTES_PER_US, 2 * count * nodes * channels / FLOP_PER_US)


def error_of(impl: str, contract: Contract, irreps_out: str, device: str) -> float:
    """Relative error of our outputs and gradients against the formula in float64."""
    z = torch.randint(0, SPECIES, (50,), device=device)
    x = torch.randn(50, *contract.shape, device=device, requires_grad=True)
    out = contract.call(x, z)
    exact = x.detach().double().requires_grad_()
    layout = "mul_ir" if impl == "fastuma" else "ir_mul"
    spec = contraction(IRREPS_IN, irreps_out, 3)
    want = reference.symmetric_contraction(exact, z, contract.weights[0].double(), spec, layout)
    (grad,) = torch.autograd.grad(out.sum(), x)
    (grad_want,) = torch.autograd.grad(want.sum(), exact)
    return max(((a - b).norm() / b.norm()).item() for a, b in ((out, want), (grad, grad_want)))


def operations(rows: Rows, options: argparse.Namespace, device: str) -> None:
    """The table of single operations."""
    for label, impl in itertools.product(options.outputs, options.impls):
        try:
            contract = build(impl, OUTPUTS[label], options.channels, device)
        except ImportError as error:
            print(f"{impl}: left out, {brief(error)}", flush=True)
            continue
        error = error_of(impl, contract, OUTPUTS[label], device) if impl.startswith("fastuma") else None
        for nodes, present, mode in itertools.product(options.nodes, options.species, options.modes):
            if rows.time_is_up(f"{impl} {label} {nodes} {mode}"):
                return
            z = torch.randperm(SPECIES)[:present][torch.randint(0, present, (nodes,))].to(device)
            row = {"op": mode, "system": f"{label}_z{present}", "atoms": nodes, "impl": impl, "precision": "float32"}
            row |= {"rel_err": error}
            floor = floor_us(contraction(IRREPS_IN, OUTPUTS[label], 3), mode, nodes, options.channels, present)
            row["floor_us"] = floor
            try:
                row |= time_one(mode, contract, contract.species_of(z), options.seconds)
            except torch.cuda.OutOfMemoryError:
                row["out_of_memory"] = True
            except RuntimeError as failure:
                row["error"] = brief(failure)
            if floor and row.get("device_us"):
                row["of_floor"] = row["device_us"] / floor
            rows.write(row, ("eager_us", "device_us", "floor_us", "of_floor", "rel_err"))
            gc.collect()


def time_one(mode: str, contract: Contract, species: Tensor, seconds: float) -> dict[str, Any]:
    """Eager and device time of one cell of the table."""
    times = eager(calls(mode, contract, species), seconds)
    row: dict[str, Any] = quantiles(times) | {"eager_us": 1e3 * float(np.median(times))}
    if not torch.cuda.is_available():
        return row
    if not contract.recordable:
        return row | {"device_us": summed(calls(mode, contract, species)), "device_by": "profiler"}
    # Calls of some milliseconds push one another's inputs out of the cache by themselves.
    inputs = 4 * len(species) * float(np.prod(contract.shape))
    number = 1 if row["median_ms"] > 5 else int(np.clip(CACHE_BYTES // inputs, 4, 32))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prepared = [calls(mode, contract, species) for _ in range(number)]
    return row | {"device_us": replayed(prepared, stream), "device_by": "graph"}


def random_model(hidden: str) -> torch.nn.Module:
    """A MACE of the usual size with random weights."""
    import mace.modules
    from e3nn import o3

    torch.manual_seed(0)
    block = mace.modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return mace.modules.ScaleShiftMACE(
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=SPECIES,
        hidden_irreps=o3.Irreps(hidden),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(SPECIES),
        avg_num_neighbors=40.0,
        atomic_numbers=list(range(1, SPECIES + 1)),
        correlation=3,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )


def converted(impl: str, model: torch.nn.Module, device: str) -> torch.nn.Module:
    """The model with an implementation's operations; ImportError where it is not installed."""
    model = copy.deepcopy(model)
    if impl == "fastuma":
        from ase_fastuma.mace import accelerate

        return accelerate(model)
    if impl == "cuequivariance":
        import cuequivariance_torch  # noqa: F401
        from mace.cli.convert_e3nn_cueq import run

        return run(model, device=device).to(device)
    if impl == "openequivariance":
        import openequivariance  # noqa: F401
        from mace.cli.convert_e3nn_oeq import run

        return run(model, device=device).to(device)
    return model


def steps(rows: Rows, options: argparse.Namespace, device: str) -> None:
    """Energy and forces of a whole model."""
    try:
        from mace.calculators import MACECalculator
    except ImportError as error:
        print(f"steps: left out, {brief(error)}", flush=True)
        return
    for label in options.outputs:
        hidden = wide(OUTPUTS[label], options.channels)
        model = random_model(hidden).to(device)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for nodes in options.nodes:
            repeats = max(1, round((nodes / 4) ** (1 / 3)))
            atoms = bulk("Cu", cubic=True) * (repeats, repeats, repeats)
            rng = np.random.default_rng(0)
            atoms.numbers = rng.permutation(SPECIES)[:10][rng.integers(0, 10, len(atoms))] + 1
            atoms.rattle(0.05, seed=0)
            batch = (
                MACECalculator(models=model, device=device, default_dtype="float32")._atoms_to_batch(atoms).to_dict()
            )
            batch = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
            forces = None
            for impl in STEP_IMPLS:
                if rows.time_is_up(f"step {impl} {label} {nodes}"):
                    return
                row = {"op": "step", "system": label, "atoms": len(atoms), "impl": impl, "precision": "float32"}
                try:
                    chosen = converted(impl, model, device)
                    call = lambda chosen=chosen, batch=batch: chosen(dict(batch))["forces"]  # noqa: E731
                    found = call()
                    forces = found if forces is None else forces
                    times = eager(call, 5 * options.seconds)
                    row |= quantiles(times) | {"force_rel_err": ((found - forces).norm() / forces.norm()).item()}
                except ImportError as error:
                    print(f"step {impl}: left out, {brief(error)}", flush=True)
                    continue
                except torch.cuda.OutOfMemoryError:
                    row["out_of_memory"] = True
                except RuntimeError as error:
                    row["error"] = brief(error)
                rows.write(row, ("median_ms", "force_rel_err"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--what", nargs="+", choices=("ops", "step"), default=("ops",))
    parser.add_argument("--outputs", nargs="+", choices=tuple(OUTPUTS), default=tuple(OUTPUTS))
    parser.add_argument("--nodes", nargs="+", type=int, default=(1000, 3000, 10000))
    parser.add_argument("--species", nargs="+", type=int, default=(10,), help="species present, of 89")
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=IMPLS[:4])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.1, help="time for the repeats of one cell, eager")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of peers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = Rows("symmetric_contraction", options)
    if "ops" in options.what:
        operations(rows, options, device)
    if "step" in options.what:
        steps(rows, options, device)


if __name__ == "__main__":
    main()
