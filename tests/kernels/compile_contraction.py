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
from ase_fastuma.kernels.symmetric_contraction import CHANNELS, LANES, _kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CONSTANTS = {"C": 128, "LANES": LANES, "BLOCK_C": CHANNELS}
TYPES = {"missing": "fp32", "num_nodes": "i32", "num_species": "i32", "species": "*i64"}


def compiled(kernel: Any) -> dict[str, int]:
    """Registers, local memory (spills) and shared memory of one kernel, and how many wide loads it has."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in CONSTANTS else TYPES.get(n, "*fp32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, {n: CONSTANTS[n] for n in names if n in CONSTANTS}, aligned)
    options = {"num_warps": LANES // 32, "enable_fp_fusion": True}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return {
        "registers": numbers["REG"],
        "local": numbers["STACK"] + numbers["LOCAL"],
        "shared": found.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4", found.asm["ptx"])),
    }


def main() -> None:
    result = {}
    for irreps_out, names in (("0e", ("forward", "grad_x", "double")), ("0e+1o", ("forward", "grad_x"))):
        kernels = _kernels(contraction("0e+1o+2e+3o", irreps_out, 3), "mul_ir")
        for name in names:
            result[f"{irreps_out} {name}"] = compiled(getattr(kernels, name))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
