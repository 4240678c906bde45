"""What a first evaluation compiles is all that others need, of whatever size. Kernels are asked for, and do not run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import standin as standin_module
import torch
from ase import Atoms
from ase_fastuma.kernels import _compile, _launch, edge, geometry, linear
from edge_graphs import random_edges
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ase_fastuma import engine as engine_module
from ase_fastuma.checkpoint import Checkpoint, load_checkpoint
from ase_fastuma.engine import FusedBackend
from ase_fastuma.pack import Members
from ase_fastuma.replay import EdgeInputs
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

GPU, PROCESSORS = torch.device("cuda", 0), 132
CHUNK = 20_000
SIZES = [(2, 1), (3, 6), (31, 1000), (108, 3001), (600, 5003), (40, 17_001), (2100, 9000), (17_000, 17_003)]
"""Atoms and edges: few of both, few and many programs of one atom, heights of tiles, odd numbers and round ones."""
CHARGES = [(0,), (0, 1), (0, 1, 2)]
PARTS = [(100, 45_001), (700, 60_000)]
"""The same where edges are worked on in parts."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Wide enough for products on Hopper GPUs."""
    path = tmp_path_factory.mktemp("first_call") / "wide.pt"
    return load_checkpoint(standin_module.write(path, channels=48, layers=1))


@functools.cache
def specialise(kernel: _compile.Kernel) -> Callable:
    """What Triton compiles a kernel for when it is launched on a Hopper GPU."""
    function = kernel._function
    if not isinstance(function, JITFunction):  # interpreted
        names = ("do_not_specialize", "do_not_specialize_on_alignment")
        function = JITFunction(function.fn, **{name: function.kwargs[name] for name in names})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(function.signature, function.params, backend)


class Asked:
    """Kernels that were asked for, as (name, what they are compiled for): in dry runs, and to be launched."""

    def __init__(self) -> None:
        self.dry: set[tuple] = set()
        self.launched: set[tuple] = set()

    def __call__(self, kernel: _compile.Kernel, grid: tuple[int, ...]) -> Callable:
        found = self.launched if _compile._asked.get() is None else self.dry

        def ask(*args: Any, **options: Any) -> None:
            values, kinds, options = specialise(kernel)(*args, **options)
            constants = [v for v, kind in zip(values.values(), kinds, strict=True) if kind[0] == "constexpr"]
            found.add((kernel.__name__, str(kinds), str(constants), str(sorted(options.items()))))

        return ask


@pytest.fixture(params=[False, True], ids=["no Hopper", "Hopper"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Launches as on a GPU, which are noted instead; the geometry comes from its plain form."""

    def on_gpu(function: Callable) -> Callable:
        return lambda *args: function(*(GPU if isinstance(a, torch.device) else a for a in args))

    monkeypatch.setattr(_launch, "_is_hopper", lambda _: request.param)
    monkeypatch.setattr(_launch, "_processors", lambda _: PROCESSORS)
    monkeypatch.setattr(_launch, "shared_memory_per_block", lambda _: (227 if request.param else 99) * 1024)
    for module in (edge, linear):
        for name in ("few_atoms", "segment_parts", "atom_sizes", "hopper_tile", "matmul_tile"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, on_gpu(getattr(module, name)))
    monkeypatch.setattr(geometry, "runs_kernels", lambda _: False)
    monkeypatch.setattr(engine_module, "_CHUNK_EDGES", CHUNK)
    found = Asked()
    monkeypatch.setattr(_compile.Kernel, "__getitem__", lambda kernel, grid: found(kernel, grid))
    return found


def inputs(num_nodes: int, num_edges: int) -> EdgeInputs:
    vectors, e = random_edges(num_nodes, num_edges, "cpu", torch.float64)
    numbers = torch.full((num_nodes,), 29)
    source, target = e.source.int(), e.target.int()
    return EdgeInputs(numbers, e.target_start, e.source_start, vectors, source, target, e.by_source)


def copper(charge: int) -> System:
    return System.from_atoms(Atoms("Cu"), "omol", charge, 1, 5.0)


@pytest.mark.parametrize("derivatives", [False, True])
@pytest.mark.parametrize("precision", ["accurate", "fast"])
@pytest.mark.parametrize("first", [SIZES[0], SIZES[5], PARTS[0]], ids=["few", "many", "parts"])
def test_other_sizes(asked, checkpoint, first, precision, derivatives):
    engine = FusedBackend(checkpoint, Settings(device="cpu", precision=precision))
    network, members = engine._networks.of(copper(0)), Members(0, 1)
    asked.launched.clear()
    engine._step(network, members, derivatives, inputs(*first))
    compiled = set(asked.dry)
    for size in [first, *SIZES, *PARTS]:
        engine._step(network, members, derivatives, inputs(*size))
        missing = asked.launched - compiled
        assert not missing, (size, sorted(missing))
