"""The weights of a network as the kernels read them: experts merged, matrices stored, radial networks tabulated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ase_fastuma.experts import (
    State,
    expert_coefficients,
    merged_matrices,
    mixture_key,
    system_embedding,
)
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.atomwise import AtomwiseWeights, atomwise_weights
from ase_fastuma.kernels.convolution import ConvolutionWeights, S2Grid
from ase_fastuma.kernels.layout import LMAX, M_MAJOR
from ase_fastuma.kernels.linear import BlockWeights, block_weights
from ase_fastuma.kernels.radial import NUM_KNOTS, Radial, tabulate

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.system import System

# Sum over neighbours of the edge-degree embedding is divided by this, as these models were trained.
_DEGREE_RESCALE = 5.0
# Networks of one system kept at a time: alternating compositions stay fast, a scan over many stays bounded.
_KEPT_MIXTURES = 16
# Networks of packs kept: the batch that is worked on now, and another. They hold weights for each of their mixtures.
_KEPT_PACKS = 2
# Radial tables are kept up to this size in bytes for all networks together; beyond it the networks themselves run.
_TABLE_BYTES = 1 << 30


@dataclass(frozen=True)
class Norm:
    """Weights of an RMS norm with C channels: weight [3, C], bias [C].

    `shift` is added to the scalars of the result: [C], or [G, C] in a pack.
    """

    weight: Tensor
    bias: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; the norm lies between convolution and atom-wise MLP."""

    convolution: ConvolutionWeights
    norm: Norm
    atomwise: AtomwiseWeights


@dataclass(frozen=True)
class Network:
    """All weights that a system needs, or a pack of systems with G mixtures of experts.

    Attributes:
        num_elements: how many elements there are.
        element: index among them of each atomic number [G * Z]; mixture g begins at g * Z.
        atoms: atom embedding of each atomic number [G * Z, C], charge, spin and task included.
        degree_radial, degree_out: radial network of the edge-degree embedding.
        layers: weights of the layers; where `packed`, their SO(2) weights are grouped by mixture.
        norms: before each layer, and after the last.
        head: the energy MLP.
        packed: whether weights are grouped.
    """

    num_elements: int
    element: Tensor
    atoms: Tensor
    degree_radial: Radial
    degree_out: BlockWeights
    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    head: tuple[BlockWeights, ...]
    packed: bool


class Mixture:
    """A system, compared by what its merged weights depend on."""

    def __init__(self, key: tuple, system: System) -> None:
        self.key, self.system = key, system

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixture) and self.key == other.key


class Networks:
    """Networks of one checkpoint on one device, built when first asked for and kept."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, kind: str, tables: bool) -> None:
        """`kind` is that of matrix-product operands; `tables` allows radial tables."""
        self._checkpoint, self._architecture = checkpoint, checkpoint.architecture
        self._device, self._kind = device, kind
        self._dtype = torch.float64 if kind == "double" else torch.float32
        self._tables = tables and kind != "double"
        self._state: State | None = None
        self._of_one = functools.lru_cache(maxsize=_KEPT_MIXTURES)(self._build_one)
        self._of_pack = functools.lru_cache(maxsize=_KEPT_PACKS)(self._build)
        self._radials = functools.lru_cache(maxsize=4)(self._build_radials)

    def mixture(self, system: System) -> Mixture:
        """The system by what its merged weights depend on."""
        return Mixture(mixture_key(self._architecture, system), system)

    def of(self, system: System) -> Network:
        """The network of one system."""
        return self._of_one(self.mixture(system))

    def of_pack(self, mixtures: tuple[Mixture, ...]) -> Network:
        """The network of systems of one task, with weights grouped by these mixtures, all different."""
        return self._of_pack(mixtures, True)

    def _build_one(self, mixture: Mixture) -> Network:
        return self._build((mixture,), False)

    def _loaded(self) -> State:
        if self._state is None:
            self._state = {
                name: t.to(self._device) for name, t in self._checkpoint.state.items() if t.is_floating_point()
            }
        return self._state

    def _build(self, mixtures: tuple[Mixture, ...], packed: bool) -> Network:
        systems, state, arch = [m.system for m in mixtures], self._loaded(), self._architecture
        embeddings = [system_embedding(state, arch, system) for system in systems]
        coefficients = None
        if arch.num_experts:
            mixed = [expert_coefficients(state, arch, s, e) for s, e in zip(systems, embeddings, strict=True)]
            coefficients = torch.stack(mixed)

        def matrix(name: str) -> Tensor:
            merged = merged_matrices(state, name, coefficients, self._dtype)
            merged = merged.expand(len(systems), -1, -1)
            return merged if packed else merged[0]

        elements = tuple(sorted({z for system in systems for z, _ in system.composition}))
        rows = torch.zeros(arch.max_num_elements, dtype=torch.int64)
        rows[list(elements)] = torch.arange(len(elements))
        degree, *radials = self._radials(elements)
        embedding = torch.stack(embeddings).to(self._dtype)
        layers, norms = [], []
        for i, radial in enumerate(radials):
            block = f"backbone.blocks.{i}."
            norms.append(self._norm(f"{block}norm_1", embedding if packed else embedding[0]))
            layers.append(
                Layer(
                    convolution=self._convolution(f"{block}edge_wise.", matrix, radial),
                    norm=self._norm(f"{block}norm_2"),
                    atomwise=self._atomwise(f"{block}atom_wise."),
                )
            )
        return Network(
            num_elements=len(elements),
            element=rows.to(self._device).repeat(len(systems)),
            atoms=(state["backbone.sphere_embedding.weight"].to(self._dtype) + embedding[:, None]).flatten(0, 1),
            degree_radial=degree[0],
            degree_out=degree[1],
            layers=tuple(layers),
            norms=(*norms, self._norm("backbone.norm")),
            head=self._head(systems[0].task),
            packed=packed,
        )

    def _store(self, matrices: list[Tensor], bias: Tensor | None, kind: str | None = None) -> BlockWeights:
        return block_weights(matrices, bias, kind or self._kind)

    def _node_linear(self, weight: Tensor, bias: Tensor | None) -> BlockWeights:
        # The work on atoms is a hundredth of that on edges: it is float32-grade in every mode.
        return self._store([weight.T], bias, "split" if self._kind == "half" else self._kind)

    def _norm(self, name: str, shift: Tensor | None = None) -> Norm:
        state = self._loaded()
        weight, bias = (state[f"{name}.affine_{part}"].to(self._dtype) for part in ("weight", "bias"))
        return Norm(weight, bias, shift)

    def _convolution(
        self, name: str, matrix: Callable[[str], Tensor], radial: tuple[Radial, BlockWeights]
    ) -> ConvolutionWeights:
        state = self._loaded()

        def so2(conv: str) -> BlockWeights:
            blocks = [matrix(f"{name}{conv}.fc_m0").mT]
            blocks += [_complex_matrix(matrix(f"{name}{conv}.so2_m_conv.{m - 1}.fc")) for m in (1, 2)]
            return self._store(blocks, state[f"{name}{conv}.fc_m0.bias"])

        return ConvolutionWeights(
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
    def _s2_grid(self) -> S2Grid | None:
        """The grid of an S2 activation, which fairchem-core takes from e3nn; None for the gate."""
        if self._architecture.act_type != "s2":
            return None
        from fairchem.core.models.uma.common.so3 import SO3_Grid

        from ase_fastuma.general import construction

        with construction(self._dtype):
            grid = SO3_Grid(LMAX, LMAX, resolution=self._architecture.grid_resolution)
        both = (grid.to_grid_mat, grid.from_grid_mat)
        return S2Grid(*(m.flatten(0, 1)[:, list(M_MAJOR)].to(self._device, self._dtype).contiguous() for m in both))

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
            coefficients = torch.eye(experts, dtype=torch.float64)[chosen : chosen + 1]
        return tuple(
            self._node_linear(
                merged_matrices(state, f"{prefix}{i}", coefficients, self._dtype)[0], state[f"{prefix}{i}.bias"]
            )
            for i in (0, 2, 4)
        )

    def _build_radials(self, elements: tuple[int, ...]) -> list[tuple[Radial, BlockWeights]]:
        """Radial networks of the edge-degree embedding and of each layer, for all pairs of the elements."""
        state, arch = self._loaded(), self._architecture
        names = ["backbone.edge_degree_embedding.rad_func.net."]
        names += [f"backbone.blocks.{i}.edge_wise.so2_conv_1.rad_func.net." for i in range(arch.num_layers)]
        pairs, width = len(elements) ** 2, arch.edge_channels
        tables = self._tables and len(names) * pairs * (NUM_KNOTS - 1) * 4 * width * 4 <= _TABLE_BYTES
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


def _complex_matrix(weight: Tensor) -> Tensor:
    """The real matrix [..., 2 K, 2 N] of a complex product x -> x (W1 + i W2), from the stacked W1, W2 [..., 2 N, K].

    It acts on rows [real, imaginary]: real = x_r W1 - x_i W2, imaginary = x_r W2 + x_i W1.
    """
    w1, w2 = (w.mT for w in weight.chunk(2, dim=-2))
    return torch.cat([torch.cat([w1, w2], dim=-1), torch.cat([-w2, w1], dim=-1)], dim=-2)
