"""The fused backend: UMA's network, layer by layer, in the operations of :mod:`ase_fastuma.kernels`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from ase_fastuma import curvature
from ase_fastuma.experts import mixture_key
from ase_fastuma.graph import build_graph, upload
from ase_fastuma.hessian import at_a_time, hessian_of_products, products, unit_directions
from ase_fastuma.kernels import convolution, reference
from ase_fastuma.kernels._compile import dry_run
from ase_fastuma.kernels._launch import runs_kernels
from ase_fastuma.kernels.atomwise import atomwise
from ase_fastuma.kernels.balance import balanced_sum
from ase_fastuma.kernels.edge import EdgeList
from ase_fastuma.kernels.forces import forces_and_virial
from ase_fastuma.kernels.geometry import edge_geometry
from ase_fastuma.kernels.layout import NUM_COEFFICIENTS, NUM_GATES, NUM_RADIAL
from ase_fastuma.kernels.linear import BlockWeights, block_linear
from ase_fastuma.kernels.norm import add_rms_norm
from ase_fastuma.kernels.operand import ieee_products
from ase_fastuma.memory import free_memory
from ase_fastuma.network import Network, Networks, Norm
from ase_fastuma.pack import Members, Pack
from ase_fastuma.repeats import Repeats
from ase_fastuma.replay import EdgeInputs, Replays, Step, capacity

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.settings import Precision, Settings
    from ase_fastuma.system import System

OPERAND_KINDS = {"accurate": "split", "fast": "half", "float32": "single", "float64": "double"}
"""How each precision mode stores matrix-product operands (kernels/operand.py)."""

SAFER: dict[str, Precision] = {"fast": "accurate", "accurate": "float64", "float32": "float64"}
"""What is tried where a mode's output is not finite."""

logger = logging.getLogger(__name__)

# Edges worked on at a time: enough to fill the largest GPU many times over, while the intermediates of UMA-S stay below
# 3 GiB. Systems within one part are recorded as CUDA graphs; beyond, launching costs nothing beside the kernels.
_CHUNK_EDGES = 1 << 17
# Bytes of a pass over many systems: some ten thousand atoms fill any GPU.
_PASS_BYTES = 12 << 30
# The part of a GPU's memory for what spares the backward pass second linears and radial weights: all of them for 1000
# atoms in "accurate", while nearly nine tenths stay for larger systems and for others.
_KEPT_SHARE = 1 / 8

# A direction through the plain operations takes as long as so many side by side in the kernels. A first estimate: by
# operations and bytes 0.35 ms each for C60 on an H200, where the plain ones were measured at 18 ms.
_DIRECTIONS_A_PRODUCT = 30


class FusedBackend:
    """UMA and eSEN models (lmax = mmax = 2, conservative) through the kernels; the interface is `backend.Backend`.

    `plain` runs the same network through the kernels' plain PyTorch references instead, on any device: the ground truth
    of the tests.
    """

    name = "fused"

    def __init__(self, checkpoint: Checkpoint, settings: Settings, plain: bool = False) -> None:
        self._checkpoint, self._architecture, self._settings = checkpoint, checkpoint.architecture, settings
        self._device = torch.device(settings.device or "cuda")
        self._precision = settings.precision
        self._kind = OPERAND_KINDS[settings.precision]
        self._dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self._plain = plain or not runs_kernels(torch.empty(0, device=self._device))
        self._networks = Networks(checkpoint, self._device, self._kind, tables=not self._plain)
        # What kernels depend on but for the model, whatever the size: which evaluations have had theirs compiled.
        self._compiled: set[tuple[bool, bool, bool]] = set()
        self._compiled_hessians = False
        self._hessians = curvature.Recordings()
        self._replays = Replays(self._architecture.cutoff, self._architecture.max_neighbors)
        self._repeats = Repeats(self._architecture)

    # ------------------------------------------------------------------------------------------------ the interface

    def prepare(self, system: System) -> None:
        """Merge the experts for the system and tabulate its radial networks; both are kept."""
        with self._on_device():
            self._networks.of(system)

    def _on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def evaluate(self, system: System, properties: frozenset[str]) -> dict[str, np.ndarray]:
        """Energies (eV), forces (eV/A), stress (eV/A^3) as float64 arrays; see the interface."""
        with self._on_device():
            return self._run(system, properties)

    def evaluate_many(self, systems: Sequence[System], properties: frozenset[str]) -> list[dict[str, np.ndarray]]:
        """See `backend.Backend.evaluate_many`. One pass for each task.

        The results of a system do not depend on the others, bit for bit, where products are our own ("accurate" and
        "fast" precision).
        """
        results: list[dict[str, np.ndarray]] = [{} for _ in systems]
        with self._on_device(), ieee_products(), torch.inference_mode(False), torch.enable_grad():
            for task in dict.fromkeys(system.task for system in systems):
                chosen = [i for i, system in enumerate(systems) if system.task == task]
                for i, found in zip(chosen, self._run_pack([systems[i] for i in chosen], properties), strict=True):
                    results[i] = found
        return results

    def _in_range(
        self, system: System, properties: frozenset[str], results: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The results; where they are not finite, those of the next safer precision, which has more range or as much.

        In the last one nothing is left to try: what is not finite then is not for want of range.
        """
        if self._safer is None or all(np.isfinite(value).all() for value in results.values()):
            return results
        logger.warning(
            "the output for %d atoms is not finite in %r precision; evaluating it again in %r",
            len(system.numbers),
            self._precision,
            self._safer._precision,
        )
        return self._safer.evaluate(system, properties)

    @functools.cached_property
    def _safer(self) -> FusedBackend | None:
        if self._precision not in SAFER:
            return None
        settings = dataclasses.replace(self._settings, precision=SAFER[self._precision])
        return FusedBackend(self._checkpoint, settings, self._plain)

    def hessian(self, system: System, indices: np.ndarray) -> np.ndarray:
        """See `backend.Backend.hessian`. Through the kernels, float32-grade at least."""
        if self._kind == "half" and self._safer is not None:
            return self._safer.hessian(system, indices)
        num_nodes, size = len(system.numbers), 3 * len(indices)
        if not self._has_tangents(size, num_nodes):
            return hessian_of_products(self, system, indices)
        with self._on_device(), ieee_products(), torch.inference_mode(False), torch.enable_grad():
            network, inputs = self._networks.of(system), self._inputs(system)
            if inputs.num_edges == 0:
                return np.zeros((size, size))
            directions = upload(unit_directions(indices, num_nodes), self._device).to(self._dtype)
            members = Members(system.charge, system.spin)
            body = functools.partial(self._curvature, network, members, directions)
            found = None
            if self._device.type == "cuda" and size * inputs.num_edges <= curvature.RECORDED_ROWS:
                key = (mixture_key(self._architecture, system), num_nodes, indices.tobytes())
                found = self._hessians.run(key, inputs, body)
            if found is None:
                found = body(inputs).cpu().numpy()
        return found * self._checkpoint.tasks[system.task].rmsd

    def _has_tangents(self, num_directions: int, num_nodes: int) -> bool:
        """Whether so many tangents of all atoms' features can be there at once, in kernels."""
        if self._plain:
            return False
        needed = curvature.node_bytes(
            num_directions, num_nodes, self._architecture.sphere_channels, self._dtype.itemsize
        )
        return self._device.type != "cuda" or needed < free_memory(self._device) / 2

    def _curvature(self, network: Network, members: Members, directions: Tensor, inputs: EdgeInputs) -> Tensor:
        """Second derivatives along directions [K, N, 3]: float64 [K, K], before normalisation."""
        geometry = self._geometry(network, members, inputs)
        slices = [channels for channels, _ in self._balanced(members)]

        def work() -> Tensor:
            vectors, trace = geometry.vectors.detach().requires_grad_(), list[Tensor]()
            energy = self._atomic_energies(network, members, geometry, vectors, inputs.numbers, trace).sum()
            return curvature.hessian(energy, trace, network, geometry, inputs, directions, slices)

        if not self._compiled_hessians:
            self._compiled_hessians = True
            with dry_run():
                work()
        return work()

    def hessian_products(self, system: System, directions: np.ndarray) -> np.ndarray:
        """See `backend.Backend.hessian_products`.

        Many directions are multiplied by the matrix. Few go through the plain forms of the operations, which are
        differentiable twice and for many directions at once.
        """
        num_nodes = len(system.numbers)
        if 3 * num_nodes <= _DIRECTIONS_A_PRODUCT * len(directions) and self._has_tangents(3 * num_nodes, num_nodes):
            matrix = self.hessian(system, np.arange(num_nodes))
            return (directions.reshape(len(directions), -1) @ matrix).reshape(directions.shape)
        plain = copy.copy(self)  # with the same weights
        plain._plain = True
        with self._on_device(), ieee_products(), torch.inference_mode(False), torch.enable_grad():
            network, inputs = self._networks.of(system), self._inputs(system)
            members = Members(system.charge, system.spin)
            geometry = self._geometry(network, members, inputs)

            def energy(displacements: Tensor) -> Tensor:
                vectors = inputs.vectors + displacements[inputs.source] - displacements[inputs.target]
                vectors = vectors.to(self._dtype)
                return plain._atomic_energies(network, members, geometry, vectors, inputs.numbers).sum()

            arch = self._architecture
            numbers = inputs.num_edges * max(arch.sphere_channels, arch.hidden_channels) * arch.num_layers
            count = functools.partial(at_a_time, numbers, self._dtype, self._device)
            found = products(energy, directions, self._device, count)
        return found * self._checkpoint.tasks[system.task].rmsd

    def footprint(self, system: System) -> float:
        """See `backend.Backend.footprint`: bytes of its edges."""
        return self._edge_bytes * system.estimated_edges(self._architecture.cutoff)

    def shared_footprint(self, system: System) -> tuple[Hashable, float]:
        """See `backend.Backend.shared_footprint`: bytes of merged weights."""
        arch, itemsize = self._architecture, 2 if self._kind == "half" else self._dtype.itemsize
        if not arch.num_experts:
            return None, 0.0
        numbers = arch.num_layers * 99 * arch.sphere_channels * arch.hidden_channels  # of SO(2) weights
        return mixture_key(arch, system), numbers * itemsize

    @property
    def _edge_bytes(self) -> int:
        """What an edge takes in a pass."""
        arch, itemsize = self._architecture, 2 if self._kind == "half" else self._dtype.itemsize
        c, h = arch.sphere_channels, arch.hidden_channels
        # Kept of each layer: both linears' outputs and radial weights. At once in the backward pass: gradients of both
        # ends' features and of the first linear, radial weights made again and their slopes.
        return itemsize * (arch.num_layers * (11 * h + 21 * c) + 18 * c + 11 * h + 24 * c)

    def capacity(self) -> float:
        """See `backend.Backend.capacity`: half of the bytes that are free, and no more than a pass needs to be fast."""
        if self._device.type != "cuda":
            return _PASS_BYTES
        return min(_PASS_BYTES, 0.5 * free_memory(self._device))

    def describe(self) -> dict[str, str]:
        """What runs, for the report."""
        ways = {
            "split": "three half-precision products a float32 product (float32-grade)",
            "half": "one half-precision product with exact scales (TF32-grade)",
            "single": "IEEE float32",
            "double": "float64",
        }
        return {"precision": f"{self._precision}: {ways[self._kind]}"}

    # -------------------------------------------------------------------------------------------------- evaluation

    def _run(self, system: System, properties: frozenset[str]) -> dict[str, np.ndarray]:
        members = Members(system.charge, system.spin)
        return self._derive(system, self._networks.of(system), members, properties)

    def _run_pack(self, systems: list[System], properties: frozenset[str]) -> list[dict[str, np.ndarray]]:
        """One pass over systems of one task."""
        if self._plain:
            return [self._run(s, properties) for s in systems]
        pack = self._repeats.of(self, systems)
        ordered = [systems[i] for i in pack.order]
        derivatives = bool(properties & {"forces", "stress"})
        flat, finite = pack.run(self, ordered, derivatives)
        found = self._results(ordered, flat, derivatives, properties)
        if not finite:
            found = [self._in_range(s, properties, one) for s, one in zip(ordered, found, strict=True)]
        of_system = dict(zip(pack.order, found, strict=True))
        return [of_system[i] for i in range(len(systems))]

    def pack(self, systems: Sequence[System]) -> Pack:
        """Systems of one task for `step_pack`, which is not for the plain form."""
        mixtures = [self._networks.mixture(system) for system in systems]
        return Pack.of(systems, mixtures, self._architecture.max_num_elements, self._device)

    def step_pack(self, pack: Pack, inputs: EdgeInputs, members: Members, derivatives: bool) -> Tensor:
        """`_step` for a pack with its edges. A single system that does not fit into a pass runs in parts."""
        with self._on_device():
            edges = inputs.num_edges
            if len(pack.order) == 1 and edges > _CHUNK_EDGES and self._edge_bytes * edges > self.capacity():
                system = pack.mixtures[0].system
                return self._step(self._networks.of(system), Members(system.charge, system.spin), derivatives, inputs)
            return self._step(self.weights_of(pack), members, derivatives, inputs)

    def weights_of(self, pack: Pack) -> Network:
        """The weights that passes of the pack read."""
        return self._networks.of_pack(pack.mixtures)

    def recordable(self, pack: Pack, num_edges: int) -> bool:
        """Whether a pass with so many edges is better recorded: launching it takes longer than running it."""
        small = num_edges <= _CHUNK_EDGES and self._edge_bytes * num_edges <= self.capacity()
        # The library multiplies group by group, and must be told where each begins.
        silent = self._kind in ("split", "half") or len(pack.mixtures) == 1
        return small and silent and self._device.type == "cuda"

    @torch.inference_mode(False)
    def _inputs(self, system: System) -> EdgeInputs:
        arch = self._architecture
        graph = build_graph(system, arch.cutoff, arch.max_neighbors, self._device)
        e = graph.edges
        return EdgeInputs(graph.numbers, e.row_start, e.source_row_start, e.vectors, e.source, e.target, e.by_source)

    def _derive(
        self, system: System, network: Network, members: Members, properties: frozenset[str]
    ) -> dict[str, np.ndarray]:
        derivatives = bool(properties & {"forces", "stress"})
        step = functools.partial(self._step, network, members, derivatives)
        if self._device.type != "cuda" or self._plain:
            flat = step(self._inputs(system)).cpu().numpy()
        else:
            key = (mixture_key(self._architecture, system), len(system.numbers), derivatives)
            replayed = self._replays.run(key, system, self._device, step)
            flat = self._run_once(key, system, step) if replayed is None else replayed
        results = self._results([system], flat, derivatives, properties)[0]
        return results if np.isfinite(flat).all() else self._in_range(system, properties, results)

    def _run_once(self, key: Hashable, system: System, step: Step) -> np.ndarray:
        """Evaluate without a recording; the next evaluation of this kind is recorded, if that is one part then."""
        inputs = self._inputs(system)
        flat = step(inputs).cpu().numpy()
        if capacity(inputs.num_edges) <= _CHUNK_EDGES:
            self._replays.saw(key, inputs.num_edges)
        return flat

    # A caller's own no_grad or inference_mode must not reach the derivatives that make the forces.
    @ieee_products()
    @torch.inference_mode(False)
    @torch.enable_grad()
    def _step(self, network: Network, members: Members, derivatives: bool, inputs: EdgeInputs) -> Tensor:
        """All work on the device, in one float64 tensor: energies [N]; if wanted, forces [N, 3] and virials [S, 3, 3].

        S is one but for a pack. Not yet scaled to physical units. Small systems wait for the device nowhere in here.
        """
        geometry = self._geometry(network, members, inputs)
        kernels = (network.packed, derivatives, inputs.num_edges > 0)
        if not self._plain and kernels not in self._compiled:
            self._compiled.add(kernels)
            with dry_run():
                self._work(network, members, derivatives, inputs, geometry)
        return self._work(network, members, derivatives, inputs, geometry)

    def _work(
        self,
        network: Network,
        members: Members,
        derivatives: bool,
        inputs: EdgeInputs,
        geometry: convolution.Geometry,
    ) -> Tensor:
        """`_step` where the geometry of the edges is known."""
        vectors = geometry.vectors.detach().requires_grad_(derivatives)
        with torch.set_grad_enabled(derivatives):
            energies = self._atomic_energies(network, members, geometry, vectors, inputs.numbers)
        if not derivatives:
            return energies
        (gradient,) = torch.autograd.grad(energies.sum(), vectors)
        num_nodes = inputs.numbers.shape[0]
        edges = _whole(inputs, num_nodes, network.packed)
        forces, virials = forces_and_virial(gradient, inputs.vectors, edges, members.systems and members.systems.atoms)
        return torch.cat([energies.detach(), forces.flatten(), virials.flatten()])

    @torch.no_grad()
    def _geometry(self, network: Network, members: Members, inputs: EdgeInputs) -> convolution.Geometry:
        cutoff, num_nodes = self._architecture.cutoff, inputs.numbers.shape[0]
        element = network.element[inputs.numbers]
        edges = edge_geometry(
            inputs.vectors, inputs.source, inputs.target, element, network.num_elements, cutoff, self._dtype
        )
        edges = edges._replace(pair=network.pairs[edges.pair])
        return convolution.Geometry(
            **edges._asdict(),
            source=inputs.source,
            target=inputs.target,
            chunks=_chunks(inputs, num_nodes, network.packed),
            keep=self._keep(inputs.num_edges),
            cutoff=cutoff,
            num_nodes=num_nodes,
            groups=members.edge_groups,
        )

    def _keep(self, num_edges: int) -> convolution.Keep:
        """What fits into a share of the device's memory, and for systems in parts into what is free of it.

        The first linears' outputs spare the most work: what is free is bound enough for those.
        """
        arch = self._architecture
        itemsize = 2 if self._kind == "half" else self._dtype.itemsize
        numbers = itemsize * num_edges * arch.num_layers
        first = numbers * (NUM_GATES + NUM_COEFFICIENTS) * arch.hidden_channels
        second = first + numbers * NUM_COEFFICIENTS * arch.sphere_channels
        radial = second + numbers * NUM_RADIAL * 2 * arch.sphere_channels
        free = room = math.inf
        if self._device.type == "cuda":
            room = _KEPT_SHARE * torch.cuda.get_device_properties(self._device).total_memory
            if num_edges > _CHUNK_EDGES:
                free = 0.4 * free_memory(self._device)
                room = min(room, free)
        return convolution.Keep(first < free, second <= room, radial <= room)

    def _atomic_energies(
        self,
        network: Network,
        members: Members,
        geometry: convolution.Geometry,
        vectors: Tensor,
        numbers: Tensor,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """The network's output for each atom [N], in float64, before normalisation.

        With `trace` each step's results are added to it, in the order of `curvature.hessian`.
        """

        def traced(*results: Tensor) -> None:
            if trace is not None:
                trace.extend(results)

        if self._plain:
            x = convolution.edge_degree_reference(vectors, geometry, network.degree_radial, network.degree_out)
        else:
            x = convolution.edge_degree(vectors, geometry, network.degree_radial, network.degree_out, self._kind)
        traced(x)
        scalars = torch.zeros_like(x)
        scalars[:, 0] = network.atoms[numbers]
        x, h = self._add_norm(x, scalars, network.norms[0], members)
        traced(x, h)
        balanced = self._balanced(members)
        convolve = convolution.edge_convolution_reference if self._plain else convolution.edge_convolution
        for layer, norm in zip(network.layers, network.norms[1:], strict=True):
            convolved = convolve(h, vectors, geometry, layer.convolution)
            x, h = self._add_norm(x, convolved, layer.norm, members)
            update = layer.atomwise.plain(h) if self._plain else atomwise(h, layer.atomwise)
            traced(convolved, x, h, update)
            for channels, total in balanced:
                x, update = self._balanced_sum(x, update, channels, total, members), None
            x, h = self._add_norm(x, update, norm, members)
            traced(x, h)
        hidden, (*inner, last) = h[:, 0], network.head
        for weights in inner:
            hidden = silu(self._linear(hidden, weights, members))
        return self._linear(hidden, last, members)[:, 0].double()

    def _linear(self, x: Tensor, weights: BlockWeights, members: Members) -> Tensor:
        if self._plain:
            return reference.block_linear(x, list(weights.matrices), weights.bias)
        return block_linear(x, weights, members.atom_rows)

    def _add_norm(self, x: Tensor, y: Tensor | None, norm: Norm, members: Members) -> tuple[Tensor, Tensor]:
        """The residual sum x + y and its norm."""
        shift = norm.shift
        if shift is not None and members.mixture is not None:
            shift = shift[members.mixture]
        if not self._plain:
            return add_rms_norm(x, y, norm.weight, norm.bias, shift)
        total = x if y is None else x + y
        return total, reference.rms_norm(total, norm.weight, norm.bias if shift is None else norm.bias + shift)

    def _balanced(self, members: Members) -> list[tuple[slice, int | Tensor]]:
        """Channels whose scalars are shifted, and what they then sum to: the charge, and the spin less one."""
        arch, found = self._architecture, list[tuple[slice, int | Tensor]]()
        if channels := arch.charge_balanced_channels:
            found.append((slice(min(channels), max(channels) + 1), members.charge))
        if channels := arch.spin_balanced_channels:
            found.append((slice(min(channels), max(channels) + 1), members.spin - 1))
        return found

    def _balanced_sum(
        self, x: Tensor, y: Tensor | None, channels: slice, total: int | Tensor, members: Members
    ) -> Tensor:
        systems = members.systems
        if self._plain:
            return reference.balanced_sum(x, y, channels, total, systems and systems.atoms)
        return balanced_sum(x, y, channels, total, systems)

    def _results(
        self, systems: Sequence[System], flat: np.ndarray, derivatives: bool, properties: frozenset[str]
    ) -> list[dict[str, np.ndarray]]:
        """Physical units and element references, for systems of one task; arrays that the caller owns.

        `flat` is what `_step` gives for the systems in their order.
        """
        task, sizes = self._checkpoint.tasks[systems[0].task], [len(system.numbers) for system in systems]
        starts = [0, *itertools.accumulate(sizes)]
        num_atoms, flat = starts[-1], flat * task.rmsd
        energies = flat[:num_atoms]
        if task.mean:
            energies += np.repeat(task.mean / np.array(sizes), sizes)
        if task.element_references is not None:
            energies += task.element_references[np.concatenate([system.numbers for system in systems])]
        totals = np.add.reduceat(energies, starts[:-1])
        forces = flat[num_atoms : 4 * num_atoms].reshape(-1, 3)
        virials = flat[4 * num_atoms :].reshape(-1, 3, 3)
        if derivatives:
            volumes = np.array([system.volume for system in systems])
            stresses = (virials + virials.transpose(0, 2, 1)) / (2 * volumes[:, None, None])
        found = []
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            out = {"energy": totals[i], "energies": energies[first:last]}
            if derivatives:
                out |= {"forces": forces[first:last], "stress": stresses[i]}
            found.append({name: np.array(value) for name, value in out.items() if name in properties})
        return found


def _whole(inputs: EdgeInputs, num_nodes: int, packed: bool) -> EdgeList:
    """All edges as one list."""
    return EdgeList(
        inputs.source,
        inputs.target,
        0,
        inputs.target_start,
        inputs.by_source,
        torch.arange(num_nodes, device=inputs.source.device, dtype=inputs.source.dtype),
        inputs.source_start,
        num_nodes,
        packed,
    )


def _chunks(inputs: EdgeInputs, num_nodes: int, packed: bool) -> tuple[convolution.Chunk, ...]:
    """Parts of whole target atoms with about _CHUNK_EDGES edges each; a small system is one part, and a pack."""
    num_edges, starts = inputs.num_edges, inputs.target_start
    if packed or num_edges <= _CHUNK_EDGES:
        return (convolution.Chunk(0, num_edges, _whole(inputs, num_nodes, packed)),)
    parts = -(-num_edges // _CHUNK_EDGES)
    wanted = torch.linspace(0, num_edges, parts + 1, device=starts.device, dtype=torch.float64).long()
    atoms = sorted({0, *torch.searchsorted(starts, wanted).tolist()[1:-1], num_nodes})
    firsts = starts[torch.tensor(atoms, device=starts.device)].tolist()
    chunks = []
    for atom, next_atom, first, last in zip(atoms[:-1], atoms[1:], firsts[:-1], firsts[1:], strict=True):
        source = inputs.source[first:last]
        ordered, by_source = torch.sort(source, stable=True)
        nodes, counts = torch.unique_consecutive(ordered, return_counts=True)
        edges = EdgeList(
            source,
            inputs.target[first:last],
            atom,
            starts[atom : next_atom + 1] - first,
            by_source,
            nodes,
            torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
            num_nodes,
        )
        chunks.append(convolution.Chunk(first, last, edges))
    return tuple(chunks)
