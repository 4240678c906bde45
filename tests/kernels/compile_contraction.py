"""Compiles kernels of the symmetric contraction for sm_90, without a GPU, and prints what they need as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported; interpreted kernels cannot be compiled

import triton
from ase_fastuma.kernels._couplings import contraction
from ase_fastuma.kernels.symmetric_contraction import CHANNELS, Programs, _kernels, programs_of_nodes, walk_registers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"missing": "fp32", "num_nodes": "i32", "num_species": "i32", "walk": "i32", "species": "*i64"}
TYPES["groups"] = "*i32"


def usage(found: Any) -> dict[str, int]:
    """Registers, local memory (spills) and shared memory of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", printed)}
    return {
        "registers": numbers["REG"],
        "local": numbers["STACK"] + numbers["LOCAL"],
        "shared": found.metadata.shared,
    }


def compiled(kernel: Any, programs: Programs, groups: bool) -> dict[str, int]:
    """Registers, local memory (spills) and shared memory of one kernel, and how many wide loads and stores it has.

    `groups`: whether it is given an array of them.
    """
    constants: dict[str, int | None] = {"C": 128, "LANES": programs.lanes, "BLOCK_C": programs.channels}
    if not groups:
        constants["groups"] = None
    function = kernel._function
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*fp32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(function, signature, {n: constants[n] for n in names if n in constants}, aligned)
    options = {"num_warps": programs.lanes // 32, "enable_fp_fusion": True, "maxnreg": programs.registers}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return usage(found) | {
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4", found.asm["ptx"])),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4", found.asm["ptx"])),
    }


def main() -> None:
    result = {}
    for irreps_out, names in (
        ("0e", ("forward", "grad_x", "grad_xw", "double")),
        ("0e+1o", ("forward", "grad_x", "grad_xw")),
    ):
        spec = contraction("0e+1o+2e+3o", irreps_out, 3)
        kernels = _kernels(spec, "mul_ir")
        for name in names:
            terms = len(spec.terms)
            walk = Programs(CHANNELS, CHANNELS, walk_registers(terms))
            programs = walk if name == "grad_xw" else programs_of_nodes(name, terms)
            groups = name in ("forward", "grad_xw")
            result[f"{irreps_out} {name}"] = compiled(getattr(kernels, name), programs, groups)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
