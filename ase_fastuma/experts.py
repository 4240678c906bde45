"""Merging the experts of a MoLE checkpoint for one system.

The weights of the SO(2) linears are a mixture of experts whose coefficients depend on composition, charge, spin and
task: constants of a system. Merging mixes them once, and what remains is an ordinary model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

if TYPE_CHECKING:
    from ase_fastuma.checkpoint import Architecture
    from ase_fastuma.system import System

State = dict[str, Tensor]

# Added to the softmax of the router, as these models were trained.
_SOFTMAX_FLOOR = 0.005


def mixture_key(architecture: Architecture, system: System) -> tuple:
    """What the merged weights depend on: equal keys, equal weights."""
    # With a row of zeros in the mean, the mixture depends on the size too, not on the reduced composition alone.
    size = len(system.numbers) if architecture.composition_mean_includes_zero else 0
    return system.composition, size, system.charge, system.spin, system.task


def system_embedding(state: State, architecture: Architecture, system: System) -> Tensor:
    """Embedding of charge, spin and task [C], which is added to every atom's scalars; float64."""
    prefix = "backbone."
    parts = [
        _number_embedding(state, f"{prefix}charge_embedding.", architecture.chg_spin_emb_type, system.charge, 100),
        _number_embedding(state, f"{prefix}spin_embedding.", architecture.chg_spin_emb_type, system.spin, 0),
    ]
    if architecture.use_dataset_embedding:
        name = architecture.dataset_mapping[system.task]
        parts.append(state[f"{prefix}dataset_embedding.dataset_emb_dict.{name}.weight"][0].double())
    mixed = linear(torch.cat(parts), state[f"{prefix}mix_csd.weight"].double(), state[f"{prefix}mix_csd.bias"].double())
    return silu(mixed)


def _number_embedding(state: State, prefix: str, kind: str, value: int, offset: int) -> Tensor:
    """Embedding [C] of a charge (table offset 100) or a spin (offset 0; spin 0 means unspecified)."""
    if kind == "rand_emb":
        return state[f"{prefix}rand_emb.weight"][value + offset].double()
    unspecified = offset == 0 and value == 0
    if kind == "pos_emb":
        angle = 2 * torch.pi * value * state[f"{prefix}W"].double()
        embedding = torch.cat([angle.sin(), angle.cos()])
        return torch.zeros_like(embedding) if unspecified else embedding
    weight, bias = state[f"{prefix}lin_emb.weight"].double(), state[f"{prefix}lin_emb.bias"].double()
    return weight[:, 0] * (-100.0 if unspecified else float(value)) + bias


def expert_coefficients(state: State, architecture: Architecture, system: System, embedding: Tensor) -> Tensor:
    """Mixing coefficients of the experts [num_experts], float64, from the composition and the embedding [C]."""
    inputs = [embedding]
    if architecture.use_composition_embedding:
        table = state["backbone.composition_embedding.weight"].double()
        counts = torch.bincount(torch.tensor(system.numbers), minlength=table.shape[0]).to(table)
        inputs.insert(0, counts @ table / (counts.sum() + architecture.composition_mean_includes_zero))
    hidden = torch.cat(inputs)
    for layer in (0, 2, 4):
        name = f"backbone.routing_mlp.{layer}."
        hidden = silu(linear(hidden, state[f"{name}weight"].double(), state[f"{name}bias"].double()))
    return torch.softmax(hidden, dim=0) + _SOFTMAX_FLOOR


def merged_matrices(state: State, name: str, coefficients: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights [G, out, in] of a linear layer whose experts are `name`.weights [experts, out, in], or its only weight.

    `coefficients` are [G, experts]; an only weight is [1, out, in]. Mixed in float64, expert by expert, in a fixed
    order, so that a mixture does not depend on those mixed beside it.
    """
    experts = state.get(f"{name}.weights")
    if experts is None:
        return state[f"{name}.weight"].to(dtype)[None]
    if coefficients is None:
        raise ValueError(f"{name}: expected a plain linear layer, got {experts.shape[0]} experts and no coefficients")
    coefficients = coefficients.to(experts.device)
    merged = torch.zeros(len(coefficients), *experts.shape[1:], dtype=torch.float64, device=experts.device)
    for i, expert in enumerate(experts):
        merged += coefficients[:, i, None, None] * expert.double()
    return merged.to(dtype)
