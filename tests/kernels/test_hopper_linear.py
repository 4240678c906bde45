"""Products on Hopper GPUs equal those of the ordinary kernel, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ase_fastuma.kernels import _launch, hopper_linear, linear
from ase_fastuma.kernels._launch import hopper_tile, matmul_tile
from ase_fastuma.kernels.groups import RowGroups
from ase_fastuma.kernels.linear import block_matmul, block_weights
from ase_fastuma.kernels.operand import to_operand
from edge_graphs import random

SHAPES = {
    "one block": [(128, 1536)],
    "so2": [(768, 640), (1024, 512), (512, 256)],
    "no multiples of tiles": [(136, 264), (40, 72), (8, 8)],
}
# Rows of each group; one number: weights that all rows share.
ROWS = {
    "shared, high tiles": 20011,
    "shared, low tiles": 2500,
    "one group": (20011,),
    "high tiles": (9000, 0, 1, 513, 5000, 256, 4000, 1241),
    "low tiles": (900, 0, 1301, 513),
}
GPU = torch.device("cuda", 0)


def test_kernels_fit():
    """Compiled without a GPU: shared memory of a Hopper GPU, no spills to speak of, and what its instructions must be.

    One thread frees a place of the ring for all warps, which is right after a barrier alone.
    """
    script = Path(__file__).with_name("compile_hopper.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        split, high = "split" in name, "256" in name
        assert found["shared"] <= 227 * 1024, (name, found)
        assert found["local"] <= 16, (name, found)
        # 64 x 128 x 16 each, by two groups of warps; three products of depth 32 or one of depth 64.
        assert found["products"] == (6 if split else 4) * (2 if high else 1), (name, found)
        assert found["waits"] == 2, (name, found)
        assert found["arrivals"] == found["arrivals after a barrier"] == 2, (name, found)


@pytest.mark.parametrize(
    ("rows", "shapes", "rows_a_group", "height"),
    [
        (2047, SHAPES["so2"], None, None),
        (2048, SHAPES["so2"], None, 128),
        (16384, SHAPES["so2"], None, 128),
        (16385, SHAPES["so2"], None, 256),
        (20000, SHAPES["so2"], 768, 256),
        (20000, SHAPES["so2"], 767, 128),
        (20000, SHAPES["so2"], 384, 128),
        (20000, SHAPES["so2"], 383, None),
        (20000, [(128, 120)], None, None),
        (20000, [(768, 640), (12, 512)], None, None),
    ],
)
@pytest.mark.parametrize("kind", ["split", "half"])
def test_where_they_run(kind, rows, shapes, rows_a_group, height, monkeypatch):
    monkeypatch.setattr(_launch, "_is_hopper", lambda _: True)
    monkeypatch.setattr(_launch, "shared_memory_per_block", lambda _: 227 * 1024)
    tile = hopper_tile(rows, shapes, kind, GPU, rows_a_group)
    assert (tile and tile.m) == height
    if tile is not None and kind == "split":  # else results would depend on which kernel runs, hence on other groups
        assert tile.k == matmul_tile(rows, shapes[0][0], shapes[0][1], kind, GPU, rows_a_group or rows).k
    monkeypatch.setattr(_launch, "_is_hopper", lambda _: False)
    assert hopper_tile(rows, shapes, kind, GPU, rows_a_group) is None
    assert hopper_tile(rows, shapes, kind, torch.device("cpu"), rows_a_group) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("kind", "half"), [("split", False), ("half", True), ("half", False)])
def test_products_equal_the_ordinary_kernel(kind, half, shapes, transposed, rows, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these products run on compute capability 9.0 alone")
    groups, many = None, ()
    if isinstance(rows, tuple):
        groups, many = RowGroups([sum(rows[:i]) for i in range(len(rows) + 1)], GPU), (len(rows),)
    matrices = [random((*many, *shape), "cuda", torch.float32, i) for i, shape in enumerate(shapes)]
    bias = random((shapes[0][1],), "cuda", torch.float32, 9)
    weights = block_weights(matrices, bias, kind)
    num_rows = groups.num_rows if groups else rows
    depth = sum(shape[transposed] for shape in shapes)
    x = to_operand(random((num_rows, depth), "cuda", torch.float32, 5), kind)
    monkeypatch.setattr(linear, "library_multiplies", lambda *_: False)
    launch, launches = hopper_linear.hopper_matmul, []
    monkeypatch.setattr(hopper_linear, "hopper_matmul", lambda *args: launches.append(launch(*args)))
    got = block_matmul(x, weights, transposed, half=half, groups=groups)
    assert len(launches) == 1
    monkeypatch.setattr(linear, "hopper_tile", lambda *_: None)
    monkeypatch.setattr(linear, "matmul_tile", lambda *args: matmul_tile(*args[:5], args[5] or num_rows))
    want = block_matmul(x, weights, transposed, half=half, groups=groups)
    assert len(launches) == 1
    assert got.high.isfinite().all()
    assert torch.equal(got.high, want.high)
    assert got.unscale is None if not half else torch.equal(got.unscale, want.unscale)


def test_groups_are_needed():
    weights = block_weights([torch.zeros(2, 8, 16)], None, "single")
    x = to_operand(torch.zeros(4, 8), "single")
    with pytest.raises(ValueError, match="groups: expected 2 groups of rows, got none"):
        block_matmul(x, weights)
