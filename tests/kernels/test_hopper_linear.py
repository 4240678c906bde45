"""Products on Hopper GPUs equal those of the ordinary kernel, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ase_fastuma.kernels import linear
from ase_fastuma.kernels._launch import hopper_tile
from ase_fastuma.kernels.groups import RowGroups
from ase_fastuma.kernels.linear import block_matmul, block_weights
from ase_fastuma.kernels.operand import to_operand
from edge_graphs import random

SHAPES = {
    "one block": [(128, 1536)],
    "so2": [(768, 640), (1024, 512), (512, 256)],
    "no multiples of tiles": [(72, 136), (40, 264), (8, 8)],
}
GROUPS = {"shared": None, "one": (20011,), "many": (9000, 0, 1, 513, 5000, 256, 4000, 1241)}


def test_kernels_fit():
    """Compiled without a GPU: shared memory that a Hopper GPU has, (nearly) no spills, one wait a step for products."""
    script = Path(__file__).with_name("compile_hopper.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forms = json.loads(done.stdout)
    assert len(forms) == 12
    for name, found in forms.items():
        assert found["shared"] <= 227 * 1024, (name, found)
        assert found["local"] <= 16, (name, found)
        assert found["products"] >= 4, (name, found)
        assert found["copies"] >= 4, (name, found)
        assert found["waits"] == 2, (name, found)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("kind", "half"), [("split", False), ("half", True), ("half", False)])
def test_products_equal_the_ordinary_kernel(kind, half, shapes, transposed, counts, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    grouped = counts is not None
    matrices = [random((len(counts), *s) if grouped else s, "cuda", torch.float32, i) for i, s in enumerate(shapes)]
    bias = random((shapes[0][1],), "cuda", torch.float32, 9)
    weights = block_weights(matrices, bias, kind)
    depth = sum(shape[transposed] for shape in shapes)
    for rows in (sum(counts),) if grouped else (20011, 2500):
        assert hopper_tile(rows, shapes, kind, torch.device("cuda", 0)) is not None
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)] if grouped else [0, rows]
        groups = RowGroups(starts, torch.device("cuda"))
        x = to_operand(random((rows, depth), "cuda", torch.float32, 5), kind)
        got = block_matmul(x, weights, transposed, half=half, groups=groups)
        with monkeypatch.context() as patched:
            patched.setattr(linear, "hopper_tile", lambda *_: None)
            want = block_matmul(x, weights, transposed, half=half, groups=groups)
        assert got.high.isfinite().all()
        assert torch.equal(got.high, want.high)
        assert got.unscale is None if not half else torch.equal(got.unscale, want.unscale)
