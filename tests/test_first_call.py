"""What a first evaluation compiles is all that others need, of whatever size. Kernels are asked for, and do not run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import standin as standin_module
import torch
from ase import Atoms
from ase_fastuma.kernels import _compile, _launch, edge, geometry, linear
from ase_fastuma.kernels.groups import RowGroups
from ase_fastuma.kernels.many_neighbours import Systems
from edge_graphs import random_edges
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ase_fastuma import curvature
from ase_fastuma import engine as engine_module
from ase_fastuma.checkpoint import Checkpoint, load_checkpoint
from ase_fastuma.engine import FusedBackend
from ase_fastuma.pack import Members
from ase_fastuma.replay import EdgeInputs
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

GPU = torch.device("cuda", 0)
FEW_ROWS, MANY_ROWS, PROCESSORS, CHUNK = 20, 160, 2, 250
"""What sets sizes apart, a hundredth of what it is and less."""
SIZES = [(2, 1), (1, 0), (7, 31), (16, 48), (30, 161), (170, 173)]
"""Atoms and edges: few and many for programs and for tiles, odd numbers and round ones."""
PARTS = [(7, 300), (41, 601)]
"""The same where edges are worked on in parts, unless systems are packed."""
PRECISIONS = ["accurate", "fast"]
MIXTURES = (1, 4)

interpreted = pytest.mark.skipif(
    not _launch.INTERPRETED, reason="engines on the CPU have kernels if TRITON_INTERPRET=1"
)


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
    monkeypatch.setattr(_launch, "_FEW_ROWS", FEW_ROWS)
    monkeypatch.setattr(_launch, "_MANY_ROWS", MANY_ROWS)
    monkeypatch.setattr(_launch, "_processors", lambda _: PROCESSORS)
    monkeypatch.setattr(_launch, "shared_memory_per_block", lambda _: (227 if request.param else 99) * 1024)
    for module in (edge, linear):
        for name in ("few_atoms", "hopper_tile", "matmul_tile"):
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


def members(mixtures: int, num_nodes: int, num_edges: int) -> Members:
    """Of a pack with a system for each mixture."""
    atoms, edges = ([total * i // mixtures for i in range(mixtures + 1)] for total in (num_nodes, num_edges))
    systems = Systems.of(torch.tensor(atoms).diff().tolist(), torch.device("cpu"))
    return Members(
        charge=torch.zeros(mixtures, dtype=torch.int64),
        spin=torch.ones(mixtures, dtype=torch.int64),
        systems=systems,
        mixture=torch.arange(mixtures).repeat_interleave(systems.atoms),
        edge_groups=RowGroups(edges, systems.atoms.device),
        atom_rows=RowGroups([0, num_nodes], systems.atoms.device),
    )


@pytest.mark.parametrize("kind", ["split", "half"])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("in_groups", [False, True])
def test_tiles_of_all_sizes(monkeypatch, hopper, in_groups, kind):
    monkeypatch.setattr(_launch, "_is_hopper", lambda _: hopper)
    for shared_memory in (99, 163, 227):
        monkeypatch.setattr(_launch, "shared_memory_per_block", lambda _, size=shared_memory: size * 1024)
        for shape in ((128, 1536), (128, 128), (768, 640), (1536, 128), (2304, 12)):

            def tile(rows: int, rows_a_group: int | None, shape: tuple[int, int] = shape) -> _launch.MatmulTile:
                on_hopper = _launch.hopper_tile(rows, [shape], kind, GPU, rows_a_group)
                return on_hopper or _launch.matmul_tile(rows, *shape, kind, GPU, rows_a_group)

            rows = [*range(1, 1000, 3), *range(1000, 20_000, 500), 2047, 2048, 16_384, 16_385]
            groups = [1, 2, 5, 20, 21, 22, 50, 64, 1000] if in_groups else [None]
            found = {tile(n, g and n // g) for n in rows for g in groups}
            assert found == set(itertools.starmap(tile, _launch.product_sizes(in_groups)))


@interpreted
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("first", "derivatives"),
    [(SIZES[0], True), (PARTS[0], True), (SIZES[0], False)],
    ids=["few", "parts", "no derivatives"],
)
def test_systems_of_all_sizes(asked, checkpoint, first, precision, derivatives):
    engine = FusedBackend(checkpoint, Settings(device="cpu", precision=precision))
    network = engine._networks.of(copper(0))
    asked.launched.clear()
    engine._step(network, Members(0, 1), derivatives, inputs(*first))
    compiled = set(asked.dry)
    for size in [first, *SIZES, *PARTS]:
        engine._step(network, Members(0, 1), derivatives, inputs(*size))
        assert compiled
        assert not asked.launched - compiled, size


@interpreted
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packs_of_all_sizes(asked, checkpoint, precision):
    engine = FusedBackend(checkpoint, Settings(device="cpu", precision=precision))
    networks = {n: engine.weights_of(engine.pack([copper(charge) for charge in range(n)])) for n in MIXTURES}
    asked.launched.clear()
    compiled: set[tuple] = set()
    sizes = [(n, *size) for size in [*SIZES, (50, 2000)] for n in MIXTURES if n <= size[0]]
    for mixtures, *size in sizes:
        engine._step(networks[mixtures], members(mixtures, *size), True, inputs(*size))
        compiled = compiled or set(asked.dry)
        assert compiled
        assert not asked.launched - compiled, (mixtures, size)


@interpreted
@pytest.mark.parametrize("first", [(2, 1, 1), (12, 201, 36)], ids=["few", "parts"])
def test_hessians_of_all_sizes(asked, checkpoint, monkeypatch, first):
    monkeypatch.setattr(curvature, "_ROWS", 700)
    monkeypatch.setattr(curvature, "_EDGES", 90)
    engine = FusedBackend(checkpoint, Settings(device="cpu", precision="accurate"))
    network = engine._networks.of(copper(0))
    asked.launched.clear()
    compiled: set[tuple] = set()
    for num_nodes, num_edges, num_directions in [first, (2, 5, 6), (7, 31, 21), (12, 201, 36), (40, 400, 5)]:
        directions = torch.zeros(num_directions, num_nodes, 3)
        engine._curvature(network, Members(0, 1), directions, inputs(num_nodes, num_edges))
        compiled = compiled or set(asked.dry)
        assert compiled
        assert not asked.launched - compiled, (num_nodes, num_edges, num_directions)
