"""The fused backend: UMA's network, layer by layer, in the operations of :mod:`ase_fastuma.kernels`."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from ase_fastuma.experts import (
    State,
    expert_coefficients,
    merged_matrix,
    mixture_key,
    system_embedding,
)
from ase_fastuma.graph import build_graph
from ase_fastuma.kernels import convolution, reference
from ase_fastuma.kernels._launch import runs_kernels
from ase_fastuma.kernels.atomwise import AtomwiseWeights, atomwise, atomwise_weights
from ase_fastuma.kernels.edge import EdgeList
from ase_fastuma.kernels.forces import forces_and_virial
from ase_fastuma.kernels.geometry import edge_geometry
from ase_fastuma.kernels.layout import LMAX, M_MAJOR, NUM_COEFFICIENTS, NUM_GATES, NUM_RADIAL
from ase_fastuma.kernels.linear import BlockWeights, block_linear, block_weights
from ase_fastuma.kernels.norm import add_rms_norm
from ase_fastuma.kernels.operand import ieee_products
from ase_fastuma.kernels.radial import NUM_KNOTS, Radial, tabulate
from ase_fastuma.replay import EdgeInputs, Replays, Step, capacity

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.settings import Settings
    from ase_fastuma.system import System

OPERAND_KINDS = {"accurate": "split", "fast": "half", "float32": "single", "float64": "double"}
"""How each precision mode stores matrix-product operands (kernels/operand.py)."""

# Sum over neighbours of the edge-degree embedding is divided by this, as these models were trained.
_DEGREE_RESCALE = 5.0
# Merged weights kept at a time: alternating compositions stay fast, a scan over many stays bounded.
_KEPT_MIXTURES = 16
# Radial tables are kept up to this size in bytes for all networks together; beyond it the networks themselves run.
_TABLE_BYTES = 1 << 30
# Edges worked on at a time: enough to fill the largest GPU many times over, while the intermediates of UMA-S stay below
# 3 GiB. Systems within one part are recorded as CUDA graphs; beyond, launching costs nothing beside the kernels.
_CHUNK_EDGES = 1 << 17
# Bytes for what spares the backward pass products but not whole layers: 1000 atoms then stay within 5 GiB in all.
_KEPT_BYTES = 7 << 29


@dataclass(frozen=True)
class _Norm:
    weight: Tensor  # [3, C]
    bias: Tensor  # [C]
    shift: Tensor | None = None  # added to the scalars of the result [C]


@dataclass(frozen=True)
class _Layer:
    convolution: convolution.ConvolutionWeights
    norm: _Norm
    atomwise: AtomwiseWeights


@dataclass(frozen=True)
class _Network:
    """All weights that one system needs, merged."""

    num_elements: int
    element_rows: Tensor  # row of each atomic number among the system's elements [max_num_elements]
    atoms: Tensor  # atom embedding [elements, C], system embedding included
    degree_radial: Radial
    degree_out: BlockWeights
    layers: tuple[_Layer, ...]
    norms: tuple[_Norm, ...]  # before each layer, and after the last
    head: tuple[BlockWeights, ...]


class FusedBackend:
    """UMA and eSEN models (lmax = mmax = 2, conservative) through the kernels; the interface is `backend.Backend`.

    `plain` runs the same network through the kernels' plain PyTorch references instead, on any device: the ground truth
    of the tests.
    """

    name = "fused"

    def __init__(self, checkpoint: Checkpoint, settings: Settings, plain: bool = False) -> None:
        self._checkpoint, self._architecture = checkpoint, checkpoint.architecture
        self._device = torch.device(settings.device or "cuda")
        self._precision = settings.precision
        self._kind = OPERAND_KINDS[settings.precision]
        self._dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self._plain = plain or not runs_kernels(torch.empty(0, device=self._device))
        self._state: State | None = None
        self._network = functools.lru_cache(maxsize=_KEPT_MIXTURES)(self._build_network)
        self._radials = functools.lru_cache(maxsize=4)(self._build_radials)
        self._replays = Replays(self._architecture.cutoff, self._architecture.max_neighbors)

    # ------------------------------------------------------------------------------------------------ the interface

    def prepare(self, system: System) -> None:
        """Merge the experts for the system and tabulate its radial networks; both are kept."""
        with self._on_device():
            self._weights(system)

    def _on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def evaluate(self, system: System, properties: frozenset[str]) -> dict[str, np.ndarray]:
        """Energies (eV), forces (eV/A), stress (eV/A^3), Hessian (eV/A^2) as float64 arrays; see the interface."""
        # A caller's own no_grad or inference_mode must not reach the derivatives that make the forces.
        with self._on_device(), ieee_products(), torch.inference_mode(False), torch.enable_grad():
            return self._run(system, properties)

    def evaluate_many(self, systems: Sequence[System], properties: frozenset[str]) -> list[dict[str, np.ndarray]]:
        """See `backend.Backend.evaluate_many`."""
        return [self.evaluate(system, properties) for system in systems]

    def footprint(self, system: System) -> float:
        """See `backend.Backend.footprint`: in edges."""
        return system.estimated_edges(self._architecture.cutoff)

    def capacity(self) -> float:
        """See `backend.Backend.capacity`."""
        return _CHUNK_EDGES

    def describe(self) -> dict[str, str]:
        """What runs, for the report."""
        ways = {
            "split": "three half-precision products a float32 product (float32-grade)",
            "half": "one half-precision product with exact scales (TF32-grade)",
            "single": "IEEE float32",
            "double": "float64",
        }
        return {"precision": f"{self._precision}: {ways[self._kind]}"}

    # ----------------------------------------------------------------------------------------------------- weights

    def _weights(self, system: System) -> _Network:
        return self._network(_Mixture(mixture_key(self._architecture, system), system))

    def _loaded(self) -> State:
        if self._state is None:
            self._state = {
                name: t.to(self._device) for name, t in self._checkpoint.state.items() if t.is_floating_point()
            }
        return self._state

    def _build_network(self, mixture: _Mixture) -> _Network:
        system, state, arch = mixture.system, self._loaded(), self._architecture
        embedding = system_embedding(state, arch, system)
        coefficients = None
        if arch.num_experts:
            coefficients = expert_coefficients(state, arch, system, embedding)

        def matrix(name: str) -> Tensor:
            return merged_matrix(state, name, coefficients, self._dtype)

        elements = tuple(z for z, _ in system.composition)
        rows = torch.zeros(arch.max_num_elements, dtype=torch.int64)
        rows[list(elements)] = torch.arange(len(elements))
        degree, *radials = self._radials(elements)
        embedding = embedding.to(self._dtype)
        layers, norms = [], []
        for i, radial in enumerate(radials):
            block = f"backbone.blocks.{i}."
            norms.append(self._norm(f"{block}norm_1", embedding))
            layers.append(
                _Layer(
                    convolution=self._convolution(f"{block}edge_wise.", matrix, radial),
                    norm=self._norm(f"{block}norm_2"),
                    atomwise=self._atomwise(f"{block}atom_wise."),
                )
            )
        return _Network(
            num_elements=len(elements),
            element_rows=rows.to(self._device),
            atoms=state["backbone.sphere_embedding.weight"].to(self._dtype) + embedding,
            degree_radial=degree[0],
            degree_out=degree[1],
            layers=tuple(layers),
            norms=(*norms, self._norm("backbone.norm")),
            head=self._head(system.task),
        )

    def _store(self, matrices: list[Tensor], bias: Tensor | None, kind: str | None = None) -> BlockWeights:
        return block_weights(matrices, bias, kind or self._kind)

    def _node_linear(self, weight: Tensor, bias: Tensor | None) -> BlockWeights:
        # The work on atoms is a hundredth of that on edges: it runs in IEEE arithmetic in every mode.
        return self._store([weight.T], bias, "double" if self._kind == "double" else "single")

    def _norm(self, name: str, shift: Tensor | None = None) -> _Norm:
        state = self._loaded()
        weight, bias = (state[f"{name}.affine_{part}"].to(self._dtype) for part in ("weight", "bias"))
        return _Norm(weight, bias, shift)

    def _convolution(
        self, name: str, matrix: Callable[[str], Tensor], radial: tuple[Radial, BlockWeights]
    ) -> convolution.ConvolutionWeights:
        state = self._loaded()

        def so2(conv: str) -> BlockWeights:
            blocks = [matrix(f"{name}{conv}.fc_m0").T]
            blocks += [_complex_matrix(matrix(f"{name}{conv}.so2_m_conv.{m - 1}.fc")) for m in (1, 2)]
            return self._store(blocks, state[f"{name}{conv}.fc_m0.bias"])

        return convolution.ConvolutionWeights(
            kind=self._kind,
            radial=radial[0],
            radial_out=radial[1],
            first=so2("so2_conv_1"),
            second=so2("so2_conv_2"),
            channels=self._architecture.sphere_channels,
            hidden=self._architecture.hidden_channels,
            s2=self._s2_grid,
        )

    @functools.cached_property
    def _s2_grid(self) -> convolution.S2Grid | None:
        """The grid of an S2 activation, which fairchem-core takes from e3nn; None for the gate."""
        if self._architecture.act_type != "s2":
            return None
        from fairchem.core.models.uma.common.so3 import SO3_Grid

        from ase_fastuma.general import construction

        with construction(self._dtype):
            grid = SO3_Grid(LMAX, LMAX, resolution=self._architecture.grid_resolution)
        both = (grid.to_grid_mat, grid.from_grid_mat)
        return convolution.S2Grid(
            *(m.flatten(0, 1)[:, list(M_MAJOR)].to(self._device, self._dtype).contiguous() for m in both)
        )

    def _atomwise(self, name: str) -> AtomwiseWeights:
        state = self._loaded()
        return atomwise_weights(
            gates=state[f"{name}scalar_mlp.0.weight"].T,
            gates_bias=state[f"{name}scalar_mlp.0.bias"],
            first=tuple(w.T for w in state[f"{name}so3_linear_1.weight"]),
            first_bias=state[f"{name}so3_linear_1.bias"],
            second=tuple(w.T for w in state[f"{name}so3_linear_2.weight"]),
            second_bias=state[f"{name}so3_linear_2.bias"],
            kind=self._kind,
        )

    def _head(self, task: str) -> tuple[BlockWeights, ...]:
        """The energy MLP; a head with one expert a task is merged by choosing the task's."""
        state = self._loaded()
        (first,) = [n for n in state if n.endswith("energy_block.0.bias")]
        prefix = first.removesuffix("0.bias")
        coefficients = None
        if f"{prefix}0.weights" in state:
            mapping = self._architecture.head_mapping
            chosen = sorted(set(mapping.values())).index(mapping[task])
            experts = state[f"{prefix}0.weights"].shape[0]
            coefficients = torch.eye(experts, dtype=torch.float64)[chosen]
        return tuple(
            self._node_linear(
                merged_matrix(state, f"{prefix}{i}", coefficients, self._dtype), state[f"{prefix}{i}.bias"]
            )
            for i in (0, 2, 4)
        )

    def _build_radials(self, elements: tuple[int, ...]) -> list[tuple[Radial, BlockWeights]]:
        """Radial networks of the edge-degree embedding and of each layer, for all pairs of the elements."""
        state, arch = self._loaded(), self._architecture
        names = ["backbone.edge_degree_embedding.rad_func.net."]
        names += [f"backbone.blocks.{i}.edge_wise.so2_conv_1.rad_func.net." for i in range(arch.num_layers)]
        pairs, width = len(elements) ** 2, arch.edge_channels
        tables = self._dtype == torch.float32 and not self._plain
        tables = tables and len(names) * pairs * (NUM_KNOTS - 1) * 4 * width * 4 <= _TABLE_BYTES
        out = []
        for name in names:
            out_weight, out_bias = state[f"{name}6.weight"].T.double(), state[f"{name}6.bias"].double()
            if name is names[0]:
                out_weight, out_bias = out_weight / _DEGREE_RESCALE, out_bias / _DEGREE_RESCALE
            table = None
            if tables:
                layers, pair_bias = self._radial_layers(name, elements, torch.float64)
                table = tabulate(pair_bias, layers, arch.cutoff)
            layers, pair_bias = self._radial_layers(name, elements, self._dtype)
            out.append((Radial(pair_bias, layers, table), self._store([out_weight], out_bias)))
        return out

    def _radial_layers(
        self, name: str, elements: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[reference.RadialLayers, Tensor]:
        state, arch = self._loaded(), self._architecture
        centres = torch.linspace(0.0, arch.cutoff, arch.num_distance_basis, dtype=dtype)
        exponent = -0.5 / (2.0 * (centres[1] - centres[0])).item() ** 2
        weights = {n: state[f"{name}{n}"].to(dtype) for n in ("0.weight", "0.bias", "1.weight", "1.bias")}
        weights |= {n: state[f"{name}{n}"].to(dtype) for n in ("3.weight", "3.bias", "4.weight", "4.bias")}
        basis, source, target = weights["0.weight"].T.split(
            [arch.num_distance_basis, arch.edge_channels, arch.edge_channels]
        )
        rows = torch.tensor(elements, device=self._device)
        source = state["backbone.source_embedding.weight"][rows].to(dtype) @ source
        target = state["backbone.target_embedding.weight"][rows].to(dtype) @ target
        pair_bias = (source[:, None] + target[None, :]).flatten(0, 1) + weights["0.bias"]
        layers = reference.RadialLayers(
            centres=centres.to(self._device),
            gaussian_exponent=exponent,
            weight_distance=basis,
            norm_first=(weights["1.weight"], weights["1.bias"]),
            weight_second=weights["3.weight"].T,
            bias_second=weights["3.bias"],
            norm_second=(weights["4.weight"], weights["4.bias"]),
        )
        return layers, pair_bias

    # -------------------------------------------------------------------------------------------------- evaluation

    def _run(self, system: System, properties: frozenset[str]) -> dict[str, np.ndarray]:
        network = self._weights(system)
        if "hessian" in properties:
            hessian = self._hessian(network, (system.charge, system.spin), self._inputs(system)).cpu().numpy()
            hessian *= self._checkpoint.tasks[system.task].rmsd
            rest = properties - {"hessian"}
            return {"hessian": hessian} | (self._derive(system, network, rest) if rest else {})
        return self._derive(system, network, properties)

    def _inputs(self, system: System) -> EdgeInputs:
        arch = self._architecture
        graph = build_graph(system, arch.cutoff, arch.max_neighbors, self._device)
        e = graph.edges
        return EdgeInputs(graph.numbers, e.row_start, e.source_row_start, e.vectors, e.source, e.target, e.by_source)

    def _derive(self, system: System, network: _Network, properties: frozenset[str]) -> dict[str, np.ndarray]:
        derivatives = bool(properties & {"forces", "stress"})
        step = functools.partial(self._step, network, (system.charge, system.spin), derivatives)
        if self._device.type != "cuda" or self._plain:
            flat = step(self._inputs(system)).cpu().numpy()
        else:
            key = (mixture_key(self._architecture, system), len(system.numbers), derivatives)
            replayed = self._replays.run(key, system, self._device, step)
            flat = self._run_once(key, system, step) if replayed is None else replayed
        return self._results(system, flat, derivatives, properties)

    def _run_once(self, key: Hashable, system: System, step: Step) -> np.ndarray:
        """Evaluate without a recording; the next evaluation of this kind is recorded, if that is one part then."""
        inputs = self._inputs(system)
        flat = step(inputs).cpu().numpy()
        if capacity(inputs.num_edges) <= _CHUNK_EDGES:
            self._replays.saw(key, inputs.num_edges)
        return flat

    def _step(self, network: _Network, totals: tuple[int, int], derivatives: bool, inputs: EdgeInputs) -> Tensor:
        """All work on the device, in one float64 tensor: energies [N], then forces [N, 3] and virial [3, 3] if wanted.

        Not yet scaled to physical units. Small systems wait for the device nowhere in here.
        """
        geometry = self._geometry(network, inputs)
        vectors = geometry.vectors.detach().requires_grad_(derivatives)
        with torch.set_grad_enabled(derivatives):
            energies = self._atomic_energies(network, totals, geometry, vectors, inputs.numbers)
        if not derivatives:
            return energies
        (gradient,) = torch.autograd.grad(energies.sum(), vectors)
        num_nodes = inputs.numbers.shape[0]
        forces, virial = forces_and_virial(gradient, inputs.vectors, _whole(inputs, num_nodes))
        return torch.cat([energies.detach(), forces.flatten(), virial.flatten()])

    def _hessian(self, network: _Network, totals: tuple[int, int], inputs: EdgeInputs) -> Tensor:
        """Second derivatives of the energy [3 N, 3 N], float64, symmetric; not yet scaled to physical units.

        One backward pass a column, through the differentiable references of the operations.
        """
        geometry = self._geometry(network, inputs)
        vectors = geometry.vectors.detach().requires_grad_()
        num_nodes = inputs.numbers.shape[0]
        columns = torch.zeros(3 * num_nodes, 3 * num_nodes, dtype=torch.float64, device=self._device)
        if inputs.num_edges == 0:
            return columns  # atoms without neighbours feel nothing
        energies = self._atomic_energies(network, totals, geometry, vectors, inputs.numbers)
        (gradient,) = torch.autograd.grad(energies.sum(), vectors, create_graph=True)
        edges = _whole(inputs, num_nodes)
        for atom in range(num_nodes):
            moved = (inputs.source == atom).to(self._dtype) - (inputs.target == atom).to(self._dtype)
            for axis in range(3):
                direction = torch.zeros_like(gradient)
                direction[:, axis] = moved
                (second,) = torch.autograd.grad(gradient, vectors, direction, retain_graph=True)
                columns[3 * atom + axis] = -forces_and_virial(second, inputs.vectors, edges)[0].flatten()
        return (columns + columns.T) / 2

    @torch.no_grad()
    def _geometry(self, network: _Network, inputs: EdgeInputs) -> convolution.Geometry:
        cutoff, num_nodes = self._architecture.cutoff, inputs.numbers.shape[0]
        element = network.element_rows[inputs.numbers]
        edges = edge_geometry(
            inputs.vectors, inputs.source, inputs.target, element, network.num_elements, cutoff, self._dtype
        )
        return convolution.Geometry(
            **edges._asdict(),
            source=inputs.source,
            target=inputs.target,
            chunks=_chunks(inputs, num_nodes),
            keep=self._keep(inputs.num_edges),
            cutoff=cutoff,
            num_nodes=num_nodes,
        )

    def _keep(self, num_edges: int) -> convolution.Keep:
        """What fits: the first linears' outputs into the memory that is free now, the rest into a fixed amount."""
        arch = self._architecture
        itemsize = 2 if self._kind == "half" else self._dtype.itemsize
        numbers = itemsize * num_edges * arch.num_layers
        first = numbers * (NUM_GATES + NUM_COEFFICIENTS) * arch.hidden_channels
        second = first + numbers * NUM_COEFFICIENTS * arch.sphere_channels
        radial = second + numbers * NUM_RADIAL * 2 * arch.sphere_channels
        free = math.inf
        if self._device.type == "cuda" and num_edges > _CHUNK_EDGES:
            free = torch.cuda.mem_get_info(self._device)[0]
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return convolution.Keep(first < 0.4 * free, second <= _KEPT_BYTES, radial <= _KEPT_BYTES)

    def _atomic_energies(
        self,
        network: _Network,
        totals: tuple[int, int],
        geometry: convolution.Geometry,
        vectors: Tensor,
        numbers: Tensor,
    ) -> Tensor:
        """The network's output for each atom [N], in float64, before normalisation."""
        if self._plain:
            x = convolution.edge_degree_reference(vectors, geometry, network.degree_radial, network.degree_out)
        else:
            x = convolution.edge_degree(vectors, geometry, network.degree_radial, network.degree_out, self._kind)
        scalars = torch.zeros_like(x)
        scalars[:, 0] = network.atoms[numbers]
        x, h = self._add_norm(x, scalars, network.norms[0])
        convolve = convolution.edge_convolution_reference if self._plain else convolution.edge_convolution
        for layer, norm in zip(network.layers, network.norms[1:], strict=True):
            x, h = self._add_norm(x, convolve(h, vectors, geometry, layer.convolution), layer.norm)
            update = layer.atomwise.plain(h) if self._plain else atomwise(h, layer.atomwise)
            if self._balanced:
                x, h = self._add_norm(self._balance(x + update, totals), None, norm)
            else:
                x, h = self._add_norm(x, update, norm)
        first, second, last = network.head
        return block_linear(silu(block_linear(silu(block_linear(h[:, 0], first)), second)), last)[:, 0].double()

    def _add_norm(self, x: Tensor, y: Tensor | None, norm: _Norm) -> tuple[Tensor, Tensor]:
        """The residual sum x + y and its norm."""
        if not self._plain:
            return add_rms_norm(x, y, norm.weight, norm.bias, norm.shift)
        total = x if y is None else x + y
        return total, reference.rms_norm(
            total, norm.weight, norm.bias if norm.shift is None else norm.bias + norm.shift
        )

    @property
    def _balanced(self) -> bool:
        return bool(self._architecture.charge_balanced_channels or self._architecture.spin_balanced_channels)

    def _balance(self, x: Tensor, totals: tuple[int, int]) -> Tensor:
        """Shift the scalars of the balanced channels so that they sum to the charge, or to the spin less one."""
        arch, (charge, spin) = self._architecture, totals
        for channels, total in ((arch.charge_balanced_channels, charge), (arch.spin_balanced_channels, spin - 1)):
            if channels:
                x = _Balance.apply(x, slice(min(channels), max(channels) + 1), total)
        return x

    def _results(
        self, system: System, flat: np.ndarray, derivatives: bool, properties: frozenset[str]
    ) -> dict[str, np.ndarray]:
        """Physical units and element references; arrays that the caller owns."""
        task, num_atoms = self._checkpoint.tasks[system.task], len(system.numbers)
        flat = flat * task.rmsd
        energies = flat[:num_atoms] + task.mean / num_atoms
        if task.element_references is not None:
            energies += task.element_references[system.numbers]
        out = {"energy": np.array(energies.sum()), "energies": energies}
        if derivatives:
            virial = flat[4 * num_atoms :].reshape(3, 3)
            out["forces"] = flat[num_atoms : 4 * num_atoms].reshape(num_atoms, 3).copy()
            out["stress"] = (virial + virial.T) / (2 * system.volume)
        return {name: value for name, value in out.items() if name in properties}


class _Balance(torch.autograd.Function):
    """Shift the scalars of some channels so that they sum to a total: a projection, its own gradient with total 0."""

    @staticmethod
    def forward(ctx, x, channels, total):
        ctx.channels = channels
        scalars = x[:, 0, channels]
        out = x.clone()
        out[:, 0, channels] = scalars - (scalars.mean(dim=0) - total / x.shape[0])
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Balance.apply(grad, ctx.channels, 0), None, None


class _Mixture:
    """A system, compared by what its merged weights depend on: the key of the cache of networks."""

    def __init__(self, key: tuple, system: System) -> None:
        self.key, self.system = key, system

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mixture) and self.key == other.key


def _complex_matrix(weight: Tensor) -> Tensor:
    """The real matrix [2 K, 2 N] of a complex product x -> x (W1 + i W2), from the stacked W1, W2 [2 N, K].

    It acts on rows [real, imaginary]: real = x_r W1 - x_i W2, imaginary = x_r W2 + x_i W1.
    """
    w1, w2 = (w.T for w in weight.chunk(2))
    return torch.cat([torch.cat([w1, w2], dim=1), torch.cat([-w2, w1], dim=1)])


def _whole(inputs: EdgeInputs, num_nodes: int) -> EdgeList:
    """All edges as one list."""
    return EdgeList(
        inputs.source,
        inputs.target,
        0,
        inputs.target_start,
        inputs.by_source,
        torch.arange(num_nodes, device=inputs.source.device),
        inputs.source_start,
        num_nodes,
    )


def _chunks(inputs: EdgeInputs, num_nodes: int) -> tuple[convolution.Chunk, ...]:
    """Parts of whole target atoms with about _CHUNK_EDGES edges each; a small system is one part."""
    num_edges, starts = inputs.num_edges, inputs.target_start
    if num_edges <= _CHUNK_EDGES:
        return (convolution.Chunk(0, num_edges, _whole(inputs, num_nodes)),)
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
