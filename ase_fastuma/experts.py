"""Merging the experts of a MoLE checkpoint for one system.

The weights of the SO(2) linears are a mixture of experts whose coefficients depend on composition, charge, spin and
task: constants of a system. Merging mixes them once, and what remains is an ordinary model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

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


class Router:
    """What charge, spin, task and composition of a system choose, on the host in float64, one system at a time.

    So nothing that a system is evaluated beside makes a difference to it, not in the last bit.
    """

    def __init__(self, state: State, architecture: Architecture) -> None:
        self._architecture = architecture
        chosen = ("charge_", "spin_", "dataset_", "mix_csd", "composition_", "routing_mlp")
        prefix = "backbone."
        self._weights = {
            name.removeprefix(prefix): weight.detach().double().cpu().numpy()
            for name, weight in state.items()
            if name.startswith(tuple(prefix + part for part in chosen))
        }

    def embedding(self, system: System) -> np.ndarray:
        """Embedding of charge, spin and task [C], which is added to every atom's scalars."""
        arch, weights = self._architecture, self._weights
        parts = [self._number("charge_embedding.", system.charge, 100), self._number("spin_embedding.", system.spin, 0)]
        if arch.use_dataset_embedding:
            name = arch.dataset_mapping[system.task]
            parts.append(weights[f"dataset_embedding.dataset_emb_dict.{name}.weight"][0])
        return _silu(weights["mix_csd.weight"] @ np.concatenate(parts) + weights["mix_csd.bias"])

    def _number(self, prefix: str, value: int, offset: int) -> np.ndarray:
        """Embedding [C] of a charge (table offset 100) or a spin (offset 0; spin 0 means unspecified)."""
        kind = self._architecture.chg_spin_emb_type
        if kind == "rand_emb":
            return self._weights[f"{prefix}rand_emb.weight"][value + offset]
        unspecified = offset == 0 and value == 0
        if kind == "pos_emb":
            angle = 2 * np.pi * value * self._weights[f"{prefix}W"]
            embedding = np.concatenate([np.sin(angle), np.cos(angle)])
            return np.zeros_like(embedding) if unspecified else embedding
        weight, bias = self._weights[f"{prefix}lin_emb.weight"], self._weights[f"{prefix}lin_emb.bias"]
        return weight[:, 0] * (-100.0 if unspecified else float(value)) + bias

    def coefficients(self, system: System, embedding: np.ndarray) -> np.ndarray:
        """Mixing coefficients of the experts [num_experts] from the composition and the embedding [C]."""
        hidden = embedding
        if self._architecture.use_composition_embedding:
            table = self._weights["composition_embedding.weight"]
            counts = np.bincount(system.numbers, minlength=len(table)).astype(np.float64)
            total = counts.sum() + self._architecture.composition_mean_includes_zero
            hidden = np.concatenate([counts @ table / total, embedding])
        for layer in (0, 2, 4):
            name = f"routing_mlp.{layer}."
            hidden = _silu(self._weights[f"{name}weight"] @ hidden + self._weights[f"{name}bias"])
        exponentials = np.exp(hidden - hidden.max())
        return exponentials / exponentials.sum() + _SOFTMAX_FLOOR


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # of exp, where the quotient is zero
        return x / (1 + np.exp(-x))


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
