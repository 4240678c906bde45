"""Products of rows in groups with weights of their own, at UMA-S's shapes: the kernels beside loops and torch's own.

    python benchmarks/grouped_products.py --out ROWS.jsonl
    python benchmarks/grouped_products.py --out ROWS.jsonl --groups 16 --shapes first --ways plain:split fastuma:split

Rows are as many as 1000 copper atoms have edges, in groups of unequal sizes with their own weights for each of three
column blocks, as in a pass over many systems.

| op | what is timed |
|---|---|
| forward, backward_x | the products with weights and with their transposes, of operands that are stored already |
| backward_w | the weights' gradient, from float32 rows and upstream gradient |
| double | derivatives of the gradients of rows and weights with respect to both: four products |

| way | |
|---|---|
| plain:KIND | the kernel with weights that all rows share: one product of the same total size |
| fastuma:KIND | the kernels over groups |
| loop:TYPE | torch's products, group by group and block by block |
| grouped_mm:bfloat16 | torch's own grouped product, block by block; eight bits, and the only type that it takes |

| key | meaning |
|---|---|
| shape, groups, rows | of the problem |
| to_forward, to_plain | time over that of the same way's forward; over that of "plain" for the same op and kind |

Other keys and the way of timing are those of ops.py; a call's waits for its own launches are in its time.
"""

from __future__ import annotations

import argparse
import functools
import gc
from typing import Any

import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels._launch import runs_kernels
from ase_fastuma.kernels.grouped_linear import grouped_linear
from ase_fastuma.kernels.groups import RowGroups
from ase_fastuma.kernels.linear import block_matmul, block_weights
from ase_fastuma.kernels.operand import to_operand
from ops import Call, Way, dense, measure, tf32_products
from rows import Rows, add_arguments, brief
from torch import Tensor

SHAPES = {
    "first": ((768, 640), (1024, 512), (512, 256)),
    "second": ((384, 384), (512, 512), (256, 256)),
    "tiny": ((16, 8), (8, 24), (8, 8)),
}
OPS = ("forward", "backward_x", "backward_w", "double")
WAYS = ("plain:split", "plain:half", "fastuma:split", "fastuma:half")
WAYS += ("loop:float16", "loop:tf32", "loop:float32", "grouped_mm:bfloat16")
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32}


class Problem:
    """Random rows, weights and upstream gradients [M, K_b], [G, K_b, N_b], [M, N_b] of each block."""

    def __init__(self, shapes: tuple[tuple[int, int], ...], num_groups: int, rows: int, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(num_groups)
        cuts = torch.randint(0, rows + 1, (num_groups - 1,), generator=generator).sort().values
        # Halfway to equal groups, which leaves none out of proportion.
        equal = torch.arange(1, num_groups) * rows // num_groups
        self.starts = [0, *((cuts + equal) // 2).tolist(), rows]
        generator = torch.Generator(device).manual_seed(1)

        def random(*size: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(size, generator=generator, device=device)

        self.x = [random(rows, k) for k, _ in shapes]
        self.w = [random(num_groups, k, n, scale=k**-0.5) for k, n in shapes]
        self.g = [random(rows, n) for _, n in shapes]

    def cast(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """x, w and g in a type."""
        x, w, g = ([t.to(dtype) for t in blocks] for blocks in (self.x, self.w, self.g))
        return x, w, g


def derivatives(op: str, linear: Any, x: list[Tensor], w: list[Tensor], g: list[Tensor]) -> Call:
    """Gradients of weights, or derivatives of all gradients, of `linear(x, w)` for each block, by autograd."""
    graphs = []
    for block in zip(x, w, g, strict=True):
        b_x, b_w, b_g = (t.detach().requires_grad_() for t in block)
        y = linear(b_x, b_w)
        if op == "backward_w":
            graphs.append(([y], [b_w], [b_g.detach()]))
        else:
            found = torch.autograd.grad(y, (b_x, b_w), b_g, create_graph=True)
            graphs.append((list(found), [b_x, b_w, b_g], [b_x.detach(), b_w.detach()]))
    return lambda: tuple(t for graph in graphs for t in torch.autograd.grad(*graph, retain_graph=True))


def fastuma(op: str, p: Problem, kind: str) -> Call:
    """The kernels over groups."""
    groups = RowGroups(p.starts, p.device)
    if op in ("backward_w", "double"):
        return derivatives(op, lambda x, w: grouped_linear(x, w, groups, kind=kind), p.x, p.w, p.g)
    transposed = op == "backward_x"
    operand, weights = to_operand(torch.cat(p.g if transposed else p.x, dim=1), kind), block_weights(p.w, None, kind)
    return lambda: (block_matmul(operand, weights, transposed, half=kind == "half", groups=groups),)


def plain(op: str, p: Problem, kind: str) -> Call:
    """One product of the same size, with the weights of the first group."""
    transposed = op == "backward_x"
    operand = to_operand(torch.cat(p.g if transposed else p.x, dim=1), kind)
    weights = block_weights([w[0] for w in p.w], None, kind)
    return lambda: (block_matmul(operand, weights, transposed, half=kind == "half"),)


def loop(op: str, p: Problem, name: str) -> Call:
    """Torch's products of one group after another."""
    x, w, g = p.cast(TYPES.get(name, torch.float64))
    linear = functools.partial(reference.grouped_linear, starts=p.starts)
    if op == "double":
        call = derivatives(op, linear, x, w, g)
    elif op == "backward_w":
        call = lambda: tuple(map(functools.partial(reference.grouped_outer, starts=p.starts), x, g))  # noqa: E731
    else:
        rows, weights = (g, [m.mT for m in w]) if op == "backward_x" else (x, w)
        call = lambda: tuple(map(linear, rows, weights))  # noqa: E731
    if name != "tf32":
        return call

    def call_tf32() -> tuple[Any, ...]:
        with tf32_products():
            return call()

    return call_tf32


def grouped_mm(op: str, p: Problem, name: str) -> Call:
    """Torch's own."""
    multiply = torch.nn.functional.grouped_mm
    x, w, g = p.cast(TYPES[name])
    multiply = functools.partial(multiply, offs=torch.tensor(p.starts[1:], dtype=torch.int32, device=p.device))
    if op == "double":
        return derivatives(op, multiply, x, w, g)
    pairs = {"forward": (x, w), "backward_x": (g, [m.mT for m in w]), "backward_w": ([m.T for m in x], g)}[op]
    return lambda: tuple(map(multiply, *pairs))


FAMILIES = {"fastuma": fastuma, "plain": plain, "loop": loop, "grouped_mm": grouped_mm}


def exact(op: str, p: Problem, family: str) -> list[Tensor]:
    """The outputs in float64; those of "plain" have the first group's weights for all rows."""
    if family == "plain":
        shared = [w[:1].double() for w in p.w]
        rows, weights = (p.g, [m.mT for m in shared]) if op == "backward_x" else (p.x, shared)
        return [torch.cat([r.double() @ m[0] for r, m in zip(rows, weights, strict=True)], dim=1)]
    found = dense(loop(op, p, "float64")())
    return [torch.cat(found, dim=1)] if op in ("forward", "backward_x") else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["first", "second"])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4, 16, 64, 256, 512])
    parser.add_argument("--rows", type=int, default=78_848)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--seconds", type=float, default=0.1, help="time for the repeats of one row")
    add_arguments(parser)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not runs_kernels(torch.empty(0, device=device)):
        parser.error("expected a CUDA device, got none; TRITON_INTERPRET=1 runs the kernels interpreted, as a test")
    rows = Rows("grouped_products", options)
    for shape in options.shapes:
        for num_groups in options.groups:
            problem = Problem(SHAPES[shape], num_groups, options.rows, device)
            times: dict[tuple[str, str], float] = {}
            for op in options.ops:
                for name in options.ways:
                    family, _, kind = name.partition(":")
                    left_out = family == "plain" and op not in ("forward", "backward_x")
                    if left_out or rows.time_is_up(f"{shape} {num_groups} {op} {name}"):
                        continue
                    try:
                        way = Way(family, kind, functools.partial(FAMILIES[family], op, problem, kind))
                        found = measure(way, exact(op, problem, family), problem, False, options.seconds)
                        times[name, op] = found["median_ms"]
                        for key, base in (("to_forward", (name, "forward")), ("to_plain", (f"plain:{kind}", op))):
                            found[key] = found["median_ms"] / times[base] if base in times else None
                    except torch.OutOfMemoryError:
                        found = {"out_of_memory": True}
                    except Exception as error:  # a way that fails is a row too; the others still run
                        found = {"error": brief(error)}
                    row = {"system": f"{shape}/{num_groups}", "impl": family, "precision": kind, "op": op} | found
                    row |= {"shape": shape, "groups": num_groups, "rows": options.rows}
                    rows.write(row, ("median_ms", "to_forward", "to_plain", "peak_gib", "rel_err"))
            del problem
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
