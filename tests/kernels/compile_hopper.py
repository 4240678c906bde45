"""Compiles the products for Hopper GPUs, without one, and prints what they need as JSON."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported; interpreted kernels cannot be compiled

import triton
from ase_fastuma.kernels._launch import _HOPPER_TILES, MatmulTile
from ase_fastuma.kernels.hopper_linear import _hopper_linear_kernel
from compile_contraction import usage
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

KERNEL = _hopper_linear_kernel._function


def descriptor(box: list[int], dtype: str) -> str:
    """The type of a tensor descriptor."""
    layout = gl.NVMMASharedLayout.get_default_for(box, {"fp16": gl.float16, "fp32": gl.float32}[dtype])
    return f"tensordesc<{dtype}{box},{layout!r}>"


def compiled(tile: MatmulTile, split: bool, half: bool, grouped: bool, in_place: bool) -> dict[str, Any]:
    """Resources of the kernel in one of its forms, and its instructions for products and copies."""
    constants: dict[str, Any] = {"SPLIT": 1 + split, "HALF": half, "GROUPED": grouped, "IN_PLACE": in_place}
    constants |= {"BM": tile.m, "BN": tile.n, "BK": tile.k, "STAGES": tile.stages, "num_warps": tile.warps}
    constants |= {} if grouped else dict.fromkeys(("tile_group", "tile_first", "tile_last"))
    constants |= {} if split else dict.fromkeys(("x_low", "l0", "l1", "l2"))
    constants |= {} if half else dict.fromkeys(("w_bound", "out_unscale"))
    out = "fp16" if half else "fp32"
    weights = descriptor([1, tile.k, tile.n] if in_place else [1, tile.n, tile.k], "fp16")
    types = {"x_high": descriptor([tile.m, tile.k], "fp16"), "x_low": descriptor([tile.m, tile.k], "fp16")}
    types |= {f"{part}{block}": weights for part in "hl" for block in range(3)}
    types |= {f"o{block}": descriptor([tile.m, 64 if half else 32], out) for block in range(3)}
    types |= {"out": f"*{out}"} | dict.fromkeys(("tile_group", "tile_first", "tile_last"), "*i64")
    types |= dict.fromkeys(("x_unscale", "w_unscale", "w_bound", "bias", "out_unscale"), "*fp32")
    names = KERNEL.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = GluonASTSource(KERNEL, signature, constants, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
    ptx = found.asm["ptx"]
    arrival = r"mbarrier\.arrive\.shared"
    patterns = {
        "products": r"wgmma\.mma_async",
        "waits": r"wgmma\.wait_group",
        "copies": r"cp\.async\.bulk\.tensor",
        "arrivals": arrival,
        "arrivals after a barrier": rf"bar\.sync\s+0, 256;(?:(?!wgmma|bar\.sync|{arrival})[\s\S])*?{arrival}",
    }
    return usage(found) | {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


def form(name: str) -> dict[str, Any]:
    """What a form's name says: "KIND ROWS[ float32][ grouped][ in place]"."""
    kind, rows, *rest = name.split()
    (tile,) = (tile for tile in _HOPPER_TILES[kind] if tile.m == int(rows))
    return {
        "tile": tile,
        "split": kind == "split",
        "half": kind == "half" and "float32" not in rest,
        "grouped": "grouped" in rest,
        "in_place": "place" in rest,
    }


FORMS = (
    "split 256",
    "split 128",
    "split 256 grouped",
    "split 256 grouped in place",
    "split 128 grouped in place",
    "half 256",
    "half 128 float32",
    "half 256 grouped in place",
)


def main() -> None:
    with ThreadPoolExecutor() as threads:
        print(json.dumps(dict(zip(FORMS, threads.map(lambda name: compiled(**form(name)), FORMS), strict=True))))


if __name__ == "__main__":
    main()
