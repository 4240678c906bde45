"""Single operations on the edges of a rattled copper crystal: the kernels beside plain PyTorch.

    python benchmarks/ops.py --out ROWS.jsonl
    python benchmarks/ops.py --out ROWS.jsonl --ops first_linear second_linear --kinds split half

What runs is what one layer of the engine launches: operands of products are stored in each kind, what products put out
as halves or in float32, and backward passes take the derivatives of the radial weights and of the envelope along.
Beside it stands the formula of kernels/reference.py in float32, for a backward pass autograd's part of it alone; beside
the block linears, torch's products of the blocks in float16, TF32 and IEEE float32, left unjoined. Inputs are random,
edges are real.

Times are those between CUDA events around each call, with the L2 cache flushed before (triton.testing.do_bench): device
time for all but `neighbour_list`, where the GPU waits for the host. Operations shorter than a launch are replayed from
a CUDA graph, as the engine does. `peak_gib` is what the call itself allocates, `first_call_s` its first call, and
`rel_err` the largest relative error among its outputs, in norm, against the formula in float64.

Without a GPU, TRITON_INTERPRET=1 runs everything interpreted on the CPU: a test of this script, no measurement.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from ase_fastuma.kernels import neighbours, reference
from ase_fastuma.kernels._launch import runs_kernels
from ase_fastuma.kernels.edge import (
    gather_rotate_scale_backward,
    gather_rotate_scale_forward,
    rotate_back_sum_backward,
    rotate_back_sum_forward,
    sorted_edges,
)
from ase_fastuma.kernels.forces import forces_and_virial
from ase_fastuma.kernels.gate import gate_backward, gate_forward
from ase_fastuma.kernels.layout import LMAX, M_BLOCKS, NUM_COEFFICIENTS, NUM_GATES, NUM_RADIAL
from ase_fastuma.kernels.linear import block_matmul, block_weights
from ase_fastuma.kernels.norm import add_rms_norm
from ase_fastuma.kernels.operand import Operand, to_operand
from ase_fastuma.kernels.radial import Radial, network_with_slope, tabulate
from rows import Rows, add_arguments, brief, quantiles
from systems import build
from torch import Tensor

from ase_fastuma.replay import capacity

KINDS = ("split", "half", "single")
WRONG = 0.05  # ten times bfloat16's rounding

Call = Callable[[], tuple[Any, ...]]


class Way(NamedTuple):
    """One way to do an operation; `prepare` makes the inputs of the call that is timed."""

    impl: str
    precision: str | None
    prepare: Callable[[], Call]


def dense(outputs: tuple[Tensor | Operand, ...]) -> list[Tensor]:
    """Outputs as plain tensors."""
    return [t.dense() if isinstance(t, Operand) else t for t in outputs]


@dataclass(frozen=True)
class Op:
    """An operation on the GPU.

    Attributes:
        exact: the formula in float64.
        ways: what is timed.
        flop: multiplications and additions, for products.
        short: shorter than its launch, and timed as a CUDA graph.
        compared: what of the outputs is compared.
    """

    name: str
    exact: Call
    ways: list[Way]
    flop: float | None = None
    short: bool = False
    compared: Callable[[tuple[Any, ...]], list[Tensor]] = dense


class Problem:
    """Inputs that operations share: N atoms, E edges, C channels (as many hidden ones), all on one device."""

    def __init__(self, atoms: int, channels: int, device: torch.device, kinds: list[str], cutoff: float) -> None:
        structure, _ = build(f"cu:{atoms}")
        self.kinds, self.channels, self.device, self.cutoff = kinds, channels, device, cutoff
        self.positions = torch.tensor(structure.positions, device=device)
        self.cell = torch.tensor(structure.cell.array)
        found = neighbours.neighbour_list(self.positions, self.cell, [True] * 3, cutoff)
        self.source, self.target = found.source, found.target
        self.edges = sorted_edges(found.source, found.target, atoms)
        self.exact_vectors = found.vectors
        self.vectors = found.vectors.float()
        self.distances = found.vectors.norm(dim=1)
        self.num_atoms, self.num_edges = atoms, len(found.source)
        self._generator = torch.Generator(device).manual_seed(1)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal random numbers in float32."""
        return scale * torch.randn(*shape, generator=self._generator, device=self.device)

    def along(self, value: Tensor, slope: Tensor, vectors: Tensor) -> Tensor:
        """A function of the edges' lengths with this value [E, ...] and slope, differentiable in the vectors."""
        change = vectors.norm(dim=1) - self.distances.to(vectors.dtype)
        return value.to(vectors) + slope.to(vectors) * change.view(-1, *[1] * (value.dim() - 1))

    def between(self, matrix: Tensor, kind: str) -> Operand:
        """Rows [M, ...] as a product of this kind leaves them to the kernel that reads them."""
        return to_operand(matrix.flatten(1), "half" if kind == "half" else "single")

    def ways(self, fused: Callable[[str], Call], plain: Callable[[], Call], reads_only: bool = False) -> list[Way]:
        """The kernels in each kind, and the formula in float32.

        Kernels that write no operand differ by what they read alone: halves, or float32 (`reads_only`).
        """
        kinds = [{"split": "single"}.get(kind, kind) for kind in self.kinds] if reads_only else self.kinds
        ours = [Way("fastuma", kind, functools.partial(fused, kind)) for kind in dict.fromkeys(kinds)]
        return [*ours, Way("torch", "float32", plain)]


def backward(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Call:
    """Autograd's backward pass of a function; the forward pass is done here."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad.view_as(out), retain_graph=True)


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same numbers in float64."""
    return tuple(t.double() for t in tensors)


def gather_rotate_scale(p: Problem) -> Iterator[Op]:
    x = p.random(p.num_atoms, NUM_COEFFICIENTS, p.channels)
    radial, slope = (p.random(p.num_edges, NUM_RADIAL, 2 * p.channels) for _ in range(2))
    grad = p.random(p.num_edges, NUM_COEFFICIENTS * 2 * p.channels)

    def formula(x: Tensor, vectors: Tensor, radial: Tensor) -> Tensor:
        return reference.gather_rotate_scale(x, vectors, radial, p.source, p.target)

    def chained(x: Tensor, vectors: Tensor) -> Tensor:
        return formula(x, vectors, p.along(radial, slope, vectors))

    def fused(kind: str) -> Call:
        stored = p.between(radial, kind)
        return lambda: (gather_rotate_scale_forward(x, p.vectors, stored, p.edges, kind),)

    def fused_backward(kind: str) -> Call:
        stored = [p.between(t, kind) for t in (grad, radial, slope)]

        def call() -> tuple[Tensor, ...]:
            grad_x = x.new_empty(2, *x.shape)
            grads, weights, slopes = stored
            grad_vectors, _ = gather_rotate_scale_backward(grads, x, p.vectors, weights, slopes, p.edges, grad_x)
            return grad_x[0] + grad_x[1], grad_vectors

        return call

    yield Op(
        "gather_rotate_scale",
        lambda: (formula(*double(x, p.vectors, radial)),),
        p.ways(fused, lambda: lambda: (formula(x, p.vectors, radial),)),
    )
    yield Op(
        "gather_rotate_scale_backward",
        lambda: backward(chained, double(x, p.vectors), grad.double())(),
        p.ways(fused_backward, lambda: backward(chained, (x, p.vectors), grad), reads_only=True),
    )


def rotate_back_sum(p: Problem) -> Iterator[Op]:
    z = p.random(p.num_edges, NUM_COEFFICIENTS, p.channels)
    weight = reference.envelope(p.distances, p.cutoff).float()
    slope = reference.envelope_slope(p.distances, p.cutoff).float()
    grad = p.random(p.num_atoms, NUM_COEFFICIENTS, p.channels)

    def formula(z: Tensor, vectors: Tensor, weight: Tensor) -> Tensor:
        return reference.rotate_back_sum(z, vectors, weight, p.target, p.num_atoms)

    def chained(z: Tensor, vectors: Tensor) -> Tensor:
        return formula(z, vectors, p.along(weight, slope, vectors))

    def fused(kind: str) -> Call:
        stored = p.between(z, kind)
        return lambda: (rotate_back_sum_forward(stored, p.vectors, weight, p.edges, p.channels),)

    def fused_backward(kind: str) -> Call:
        stored = p.between(z, kind)
        return lambda: rotate_back_sum_backward(grad, stored, p.vectors, weight, p.edges, kind, slope)[:2]

    yield Op(
        "rotate_back_sum",
        lambda: (formula(*double(z, p.vectors, weight)),),
        p.ways(fused, lambda: lambda: (formula(z, p.vectors, weight),), reads_only=True),
    )
    yield Op(
        "rotate_back_sum_backward",
        lambda: backward(chained, double(z, p.vectors), grad.double())(),
        p.ways(fused_backward, lambda: backward(chained, (z, p.vectors), grad)),
    )


def gate(p: Problem) -> Iterator[Op]:
    width = p.channels
    x = p.random(p.num_edges, NUM_GATES + NUM_COEFFICIENTS, width)
    grad = p.random(p.num_edges, NUM_COEFFICIENTS * width)

    def fused(kind: str) -> Call:
        stored = p.between(x, kind)
        return lambda: (gate_forward(stored, width, kind),)

    def fused_backward(kind: str) -> Call:
        stored, grads = p.between(x, kind), p.between(grad, kind)
        return lambda: (gate_backward(grads, stored, width, kind),)

    yield Op(
        "gate",
        lambda: (reference.gate(x.double()),),
        p.ways(fused, lambda: lambda: (reference.gate(x),)),
    )
    yield Op(
        "gate_backward",
        lambda: backward(reference.gate, double(x), grad.double())(),
        p.ways(fused_backward, lambda: backward(reference.gate, (x,), grad)),
    )


@contextmanager
def tf32_products() -> Iterator[None]:
    """Torch's float32 products in TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def so2_linear(p: Problem, name: str, extra: int, before: int, after: int) -> Iterator[Op]:
    """An SO(2) linear from `before` channels to `after`, with `extra` more outputs in its first block."""
    outputs = (extra + M_BLOCKS[0], *M_BLOCKS[1:])
    shapes = [(k * before, n * after) for k, n in zip(M_BLOCKS, outputs, strict=True)]
    matrices = [p.random(*shape, scale=shape[0] ** -0.5) for shape in shapes]
    bias = p.random(shapes[0][1])
    flop = 2.0 * p.num_edges * sum(k * n for k, n in shapes)

    def op(suffix: str, transposed: bool) -> Op:
        blocks = [m.T for m in matrices] if transposed else matrices
        added = None if transposed else bias
        x = p.random(p.num_edges, sum(m.shape[0] for m in blocks))

        def fused(kind: str) -> Call:
            operand, weights = to_operand(x, kind), block_weights(matrices, bias, kind)
            return lambda: (block_matmul(operand, weights, transposed, half=kind == "half"),)

        def products(dtype: torch.dtype, tf32: bool = False) -> Call:
            sizes = [m.shape[0] for m in blocks]
            parts = x.to(dtype).split(sizes, dim=1)
            stored = [m.to(dtype).contiguous() for m in blocks]
            start = None if added is None else added.to(dtype)

            def call() -> tuple[Tensor, ...]:
                rest = [part @ m for part, m in zip(parts[1:], stored[1:], strict=True)]
                first = parts[0] @ stored[0] if start is None else torch.addmm(start, parts[0], stored[0])
                return first, *rest

            def call_tf32() -> tuple[Tensor, ...]:
                with tf32_products():
                    return call()

            return call_tf32 if tf32 else call

        def exact() -> tuple[Tensor, ...]:
            wide = None if added is None else added.double()
            return (reference.block_linear(x.double(), [m.double() for m in blocks], wide),)

        ways = [Way("fastuma", kind, functools.partial(fused, kind)) for kind in p.kinds]
        ways += [
            Way("torch", "float16", lambda: products(torch.float16)),
            Way("torch", "tf32", lambda: products(torch.float32, tf32=True)),
            Way("torch", "float32", lambda: products(torch.float32)),
        ]
        return Op(name + suffix, exact, ways, flop)

    yield op("", transposed=False)
    yield op("_transposed", transposed=True)


def first_linear(p: Problem) -> Iterator[Op]:
    yield from so2_linear(p, "first_linear", NUM_GATES, 2 * p.channels, p.channels)


def second_linear(p: Problem) -> Iterator[Op]:
    yield from so2_linear(p, "second_linear", 0, p.channels, p.channels)


def radial(p: Problem) -> Iterator[Op]:
    """The radial weights: look-up and last linear, without and with their slopes."""
    width, pair = p.channels, torch.zeros(p.num_edges, dtype=torch.int64, device=p.device)
    norms = [(1 + p.random(width, scale=0.1), p.random(width, scale=0.1)) for _ in range(2)]
    centres = torch.linspace(0, p.cutoff, 32, device=p.device)
    first, second = p.random(32, width, scale=0.3), p.random(width, width, scale=width**-0.5)
    bias, pair_bias = p.random(width, scale=0.1), p.random(1, width, scale=0.5)
    last = p.random(width, NUM_RADIAL * 2 * p.channels, scale=width**-0.5)
    last_bias = p.random(last.shape[1])

    def layers(dtype: torch.dtype) -> reference.RadialLayers:
        cast = [tuple(t.to(dtype) for t in norm) for norm in norms]
        return reference.RadialLayers(
            centres.to(dtype), -3.3, first.to(dtype), cast[0], second.to(dtype), bias.to(dtype), cast[1]
        )

    table = tabulate(pair_bias.double(), layers(torch.float64), p.cutoff)

    def fused(with_slope: bool, kind: str) -> Call:
        network = Radial(pair_bias, layers(torch.float32), table)
        weights = block_weights([last], last_bias, kind)

        def call() -> tuple[Operand, ...]:
            hidden, slope = network.hidden(p.distances, pair, kind, with_slope)
            half = kind == "half"
            value = block_matmul(hidden, weights, half=half)
            return (value,) if slope is None else (value, block_matmul(slope, weights, biased=False, half=half))

        return call

    def plain(with_slope: bool, dtype: torch.dtype = torch.float32) -> Call:
        weights, distances, out = layers(dtype), p.distances.to(dtype), [last.to(dtype)]
        biases = pair_bias.to(dtype), last_bias.to(dtype)

        def value_alone() -> tuple[Tensor, ...]:
            hidden = reference.radial_network(distances, biases[0], pair, weights)
            return (reference.block_linear(hidden, out, biases[1]),)

        def value_and_slope() -> tuple[Tensor, ...]:
            hidden, slope = network_with_slope(distances, biases[0], pair, weights)
            return reference.block_linear(hidden, out, biases[1]), reference.block_linear(slope, out, None)

        return value_and_slope if with_slope else value_alone

    for name, with_slope in (("radial", False), ("radial_with_slope", True)):
        yield Op(
            name,
            plain(with_slope, torch.float64),
            p.ways(functools.partial(fused, with_slope), functools.partial(plain, with_slope)),
        )


def neighbour_list(p: Problem) -> Iterator[Op]:
    pbc = (True,) * 3

    def found(positions: Tensor) -> tuple[neighbours.NeighbourList]:
        return (neighbours.neighbour_list(positions, p.cell, pbc, p.cutoff),)

    def plain() -> tuple[neighbours.NeighbourList]:
        bins = neighbours._plan_bins(p.cell, pbc, p.cutoff, p.num_atoms)
        return (neighbours.assemble(neighbours.search_plain(p.positions, bins), None),)

    def ordered(outputs: tuple[neighbours.NeighbourList]) -> list[Tensor]:
        """The vectors by target, source and image: within a target each search has an order of its own."""
        (edges,) = outputs
        key = edges.target.long() * p.num_atoms + edges.source
        for axis in range(3):
            key = key * 64 + edges.shift[:, axis] + 32
        return [edges.vectors[key.argsort()].to(p.device)]

    yield Op(
        "neighbour_list",
        lambda: found(p.positions.cpu()),
        [
            Way("fastuma", "float64", lambda: lambda: found(p.positions)),
            Way("torch", "float64", lambda: plain),
        ],
        compared=ordered,
    )


def search_within(p: Problem) -> Iterator[Op]:
    """The neighbour list that recorded evaluations hold: on the device alone."""

    def fused() -> Call:
        found = neighbours.search_numbers(p.cell.numpy(), (True,) * 3, p.cutoff, p.num_atoms)
        numbers = torch.tensor(found, dtype=torch.float64, device=p.device)
        room = neighbours.EdgeRoom.of(capacity(p.num_edges), p.cutoff, p.device)

        def call() -> tuple[Tensor, ...]:
            neighbours.search_within(p.positions, numbers, room)
            return (room.vectors[: p.num_edges],)

        return call

    yield Op("search_within", lambda: (p.exact_vectors,), [Way("fastuma", "float64", fused)], short=True)


def forces(p: Problem) -> Iterator[Op]:
    gradient = p.random(p.num_edges, 3)

    def formula() -> tuple[Tensor, ...]:
        g = gradient.double()
        zeros = g.new_zeros(p.num_atoms, 3)
        return zeros.index_add(0, p.target, g).index_add(0, p.source, -g), p.exact_vectors.T @ g

    yield Op(
        "forces",
        formula,
        [
            Way("fastuma", "float64", lambda: lambda: forces_and_virial(gradient, p.exact_vectors, p.edges)),
            Way("torch", "float64", lambda: formula),
        ],
        short=True,
    )


def norm(p: Problem) -> Iterator[Op]:
    """The residual sum and its norm."""
    x, y, grad = (p.random(p.num_atoms, NUM_COEFFICIENTS, p.channels) for _ in range(3))
    weight, bias = 1 + p.random(LMAX + 1, p.channels, scale=0.1), p.random(p.channels)

    def fused(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, y, weight, bias)

    def formula(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, reference.rms_norm(x + y, weight.to(x), bias.to(x))

    def whole(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], *inputs: Tensor) -> Call:
        return backward(lambda *both: torch.cat(function(*both)), inputs, torch.cat([grad, grad]).to(inputs[0]))

    yield Op(
        "norm",
        lambda: formula(*double(x, y)),
        [
            Way("fastuma", "float32", lambda: lambda: fused(x, y)),
            Way("torch", "float32", lambda: lambda: formula(x, y)),
        ],
        short=True,
    )
    yield Op(
        "norm_backward",
        lambda: whole(formula, *double(x, y))(),
        [
            Way("fastuma", "float32", lambda: whole(fused, x, y)),
            Way("torch", "float32", lambda: whole(formula, x, y)),
        ],
        short=True,
    )


OPS = (gather_rotate_scale, rotate_back_sum, gate, first_linear, second_linear, radial)
OPS += (neighbour_list, search_within, forces, norm)


def relative_error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error among the outputs, in norm. Blocks that were left unjoined are joined."""
    if len(got) > len(want):
        got = [torch.cat(got, dim=1)]
    pairs = zip(got, want, strict=True)
    return max(((g.double().view_as(w) - w).norm() / w.norm()).item() for g, w in pairs)


def recorded(prepare: Callable[[], Call]) -> Callable[[], None]:
    """A call as a CUDA graph. `prepare` may run a forward pass: autograd goes back on the stream of that."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def measure(
    way: Way, want: list[Tensor], p: Problem, short: bool, seconds: float, compared: Callable[..., list[Tensor]] = dense
) -> dict[str, Any]:
    """The measured columns of one row."""
    call = way.prepare()
    on_gpu = p.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    outputs = call()
    if on_gpu:
        torch.cuda.synchronize()
    first_call = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None
    error = relative_error(compared(outputs), want)
    if not error < WRONG:
        raise ArithmeticError(f"outputs are off by {error:.2g} in norm: their time would mean nothing")
    del outputs
    if on_gpu:
        call = recorded(way.prepare) if short else call
        times = triton.testing.do_bench(call, warmup=20, rep=1e3 * seconds, return_mode="all")
    else:
        times = [1e3 * first_call]
    return {**quantiles(times), "peak_gib": peak, "first_call_s": first_call, "rel_err": error}


def run(op: Op, p: Problem, rows: Rows, seconds: float) -> None:
    """Time all ways of an operation; one that fails is a row too."""
    want: list[Tensor] | None = None
    for way in op.ways:
        if rows.time_is_up(f"{op.name} {way.impl} {way.precision}"):
            continue
        try:
            want = op.compared(op.exact()) if want is None else want
            found = measure(way, want, p, op.short, seconds, op.compared)
            if op.flop is not None:
                found["tflop_per_s"] = op.flop / found["median_ms"] * 1e-9
        except torch.OutOfMemoryError:
            found = {"out_of_memory": True}
        except Exception as error:
            found = {"error": brief(error)}
        row = {"system": "cu", "atoms": p.num_atoms, "impl": way.impl, "precision": way.precision}
        row |= found | {"op": op.name, "edges": p.num_edges, "channels": p.channels}
        shown = ["median_ms", "peak_gib", "first_call_s", "rel_err"]
        rows.write(row, shown if op.flop is None else [*shown, "tflop_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [make.__name__ for make in OPS]
    parser.add_argument("--ops", nargs="+", choices=names, default=names)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="operand kinds of the kernels")
    parser.add_argument("--atoms", type=int, default=1000, help="copper atoms: 4, 32, 108, ...")
    parser.add_argument("--channels", type=int, default=128, help="sphere, hidden and radial channels")
    parser.add_argument("--cutoff", type=float, default=6.0, help="A")
    parser.add_argument("--seconds", type=float, default=0.1, help="time for the repeats of one row")
    add_arguments(parser)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not runs_kernels(torch.empty(0, device=device)):
        parser.error("expected a CUDA device, got none; TRITON_INTERPRET=1 runs the kernels interpreted, as a test")
    rows = Rows("ops", options)
    problem = Problem(options.atoms, options.channels, device, options.kinds, options.cutoff)
    print(f"{problem.num_atoms} atoms, {problem.num_edges} edges, {problem.channels} channels, {device}", flush=True)
    for make in OPS:
        if make.__name__ in options.ops and not rows.time_is_up(make.__name__):
            try:
                for op in make(problem):
                    run(op, problem, rows, options.seconds)
            except Exception as error:  # the inputs of these operations; the others still run
                print(f"{make.__name__}: {brief(error)}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
