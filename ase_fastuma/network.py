"""The weights of a network as the kernels read them: experts merged, matrices stored, radial networks tabulated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ase_fastuma.experts import Router, State, merged_matrices, mixture_key
from ase_fastuma.kernels.atomwise import AtomwiseWeights, atomwise_weights
from ase_fastuma.kernels.convolution import ConvolutionWeights, S2Grid
from ase_fastuma.kernels.layout import LMAX, M_MAJOR
from ase_fastuma.kernels.linear import BlockWeights, block_weights
from ase_fastuma.kernels.mixture import ExpertBlocks, mixed_weights
from ase_fastuma.kernels.operand import ieee_products
from ase_fastuma.kernels.radial import Radial
from ase_fastuma.radials import Radials

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.system import System

# Networks of one system kept at a time: alternating compositions stay fast, a scan over many stays bounded.
_KEPT_MIXTURES = 16
# Networks of packs kept: the batch that is worked on now, and another. They hold weights for each of their mixtures.
_KEPT_PACKS = 2


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
        pairs: where each ordered pair of elements is in the radial networks, source times elements plus target.
        atoms: atom embedding of each atomic number [G * Z, C], charge, spin and task included.
        degree_radial, degree_out: radial network of the edge-degree embedding.
        layers: weights of the layers; where `packed`, their SO(2) weights are grouped by mixture.
        norms: before each layer, and after the last.
        head: the energy MLP.
        packed: whether weights are grouped.
    """

    num_elements: int
    element: Tensor
    pairs: Tensor
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
        self._radials = Radials(self._loaded, self._architecture, self._dtype, self._store, self._tables)
        self._shared: dict[str, Any] = {}

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

    @functools.cached_property
    def _router(self) -> Router:
        return Router(self._checkpoint.state, self._architecture)

    @ieee_products()
    @torch.inference_mode(False)
    def _build(self, mixtures: tuple[Mixture, ...], packed: bool) -> Network:
        systems, state, arch = [m.system for m in mixtures], self._loaded(), self._architecture
        embeddings = [self._router.embedding(system) for system in systems]
        coefficients = None
        if arch.num_experts:
            mixed = [self._router.coefficients(s, e) for s, e in zip(systems, embeddings, strict=True)]
            coefficients = np.stack(mixed)
        present = [[z for z, _ in system.composition] for system in systems]
        elements = sorted(set().union(*present))
        together = {pair for some in present for pair in itertools.product(some, some)}
        places, (degree, *radials) = self._radials.of(sorted(together))
        rows = torch.zeros(arch.max_num_elements, dtype=torch.int64)
        rows[elements] = torch.arange(len(elements))
        pairs = torch.tensor([places.get(pair, 0) for pair in itertools.product(elements, elements)])
        embedding = torch.from_numpy(np.stack(embeddings)).to(self._device, self._dtype)
        layers, norms = [], []
        for i, radial in enumerate(radials):
            block = f"backbone.blocks.{i}."
            norms.append(self._norm(f"{block}norm_1", embedding if packed else embedding[0]))
            layers.append(
                Layer(
                    convolution=self._convolution(f"{block}edge_wise.", coefficients, packed, radial),
                    norm=self._norm(f"{block}norm_2"),
                    atomwise=self._once(f"{block}atom_wise.", self._atomwise),
                )
            )
        return Network(
            num_elements=len(elements),
            element=rows.to(self._device).repeat(len(systems)),
            pairs=pairs.to(self._device),
            atoms=(state["backbone.sphere_embedding.weight"].to(self._dtype) + embedding[:, None]).flatten(0, 1),
            degree_radial=degree[0],
            degree_out=degree[1],
            layers=tuple(layers),
            norms=(*norms, self._norm("backbone.norm")),
            head=self._once(systems[0].task, self._head),
            packed=packed,
        )

    def _once(self, name: str, build: Callable[[str], Any]) -> Any:
        """What all networks share is built once."""
        if name not in self._shared:
            self._shared[name] = build(name)
        return self._shared[name]

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
        self, name: str, coefficients: np.ndarray | None, packed: bool, radial: tuple[Radial, BlockWeights]
    ) -> ConvolutionWeights:
        def so2(conv: str) -> BlockWeights:
            return self._so2(f"{name}{conv}.", coefficients, packed)

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

    def _so2(self, name: str, coefficients: np.ndarray | None, packed: bool) -> BlockWeights:
        """The weights of an SO(2) linear: of one system, or grouped by mixture."""
        state = self._loaded()
        names, paired = [f"{name}fc_m0", *(f"{name}so2_m_conv.{m}.fc" for m in (0, 1))], (False, True, True)
        bias = state[f"{names[0]}.bias"].to(self._dtype)
        if coefficients is not None and packed and self._kind in ("split", "half"):
            blocks = self._once(name, lambda _: ExpertBlocks.of([state[f"{n}.weights"] for n in names], paired))
            return mixed_weights(blocks, coefficients, bias, self._kind)
        mixtures = None if coefficients is None else torch.from_numpy(coefficients)
        merged = [merged_matrices(state, n, mixtures, self._dtype) for n in names]
        if coefficients is None or not packed:
            merged = [m[0] for m in merged]
        blocks = [_complex_matrix(m) if p else m.mT for m, p in zip(merged, paired, strict=True)]
        return self._store(blocks, bias)

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


def _complex_matrix(weight: Tensor) -> Tensor:
    """The real matrix [..., 2 K, 2 N] of a complex product x -> x (W1 + i W2), from the stacked W1, W2 [..., 2 N, K].

    It acts on rows [real, imaginary]: real = x_r W1 - x_i W2, imaginary = x_r W2 + x_i W1.
    """
    w1, w2 = (w.mT for w in weight.chunk(2, dim=-2))
    return torch.cat([torch.cat([w1, w2], dim=-1), torch.cat([-w2, w1], dim=-1)], dim=-2)
