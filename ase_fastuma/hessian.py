"""Second derivatives of the energy: products with directions that share one graph, and the matrix made of them.

The product of the Hessian with a direction v is the derivative of (gradient . v). The graph of the energy and of its
gradient is built once; each direction is then one backward pass through it, several at a time as there is memory, and
with the last one the graph is gone. Nothing stays behind, so energies and forces cost what they cost before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ase_fastuma.evaluation import evaluate_hessian
from ase_fastuma.memory import free_memory

if TYPE_CHECKING:
    from ase_fastuma.backend import Backend
    from ase_fastuma.system import System

# Numbers that a direction's backward pass holds at its peak for each edge, layer and channel: 130 to 195 in the plain
# form and 120 to 150 in fairchem-core, by the peak memory of 32 and 108 Cu atoms on a CPU.
_NUMBERS_OF_AN_EDGE = 160
# Bytes for the directions of one pass. On a CPU more is slower: those of benzene take 1.0 s in passes of 128 MB, 1.2 s
# all at once, 2.3 s one by one.
_PASS_BYTES = {"cpu": 1 << 27, "cuda": 8 << 30}


def at_a_time(numbers: float, dtype: torch.dtype, device: torch.device) -> int:
    """How many directions to follow at once, where the model has so many edges times layers times channels."""
    room = _PASS_BYTES[device.type]
    if device.type == "cuda":
        room = min(room, free_memory(device) // 2)
    return max(1, int(room / (_NUMBERS_OF_AN_EDGE * dtype.itemsize * max(numbers, 1.0))))


def products(
    energy: Callable[[Tensor], Tensor], directions: np.ndarray, device: torch.device, count: Callable[[], int]
) -> np.ndarray:
    """Products of the Hessian with directions [k, N, 3], float64.

    Args:
        energy: the energy of the structure with its atoms displaced by [N, 3] (float64); differentiable twice.
        directions: float64 [k, N, 3].
        device: where the energy is computed.
        count: how many directions to follow at once; asked when the graph is there.
    """
    displacements = torch.zeros(directions.shape[1:], dtype=torch.float64, device=device, requires_grad=True)
    found = np.zeros_like(directions)
    value = energy(displacements)
    if not value.requires_grad:
        return found  # atoms without neighbours feel nothing
    (gradient,) = torch.autograd.grad(value, displacements, create_graph=True)
    step = count()
    for first in range(0, len(directions), step):
        part = torch.tensor(directions[first : first + step], device=device)
        (second,) = torch.autograd.grad(gradient, displacements, part, retain_graph=True, is_grads_batched=True)
        found[first : first + step] = second.cpu().numpy()
    return found


def unit_directions(indices: np.ndarray, num_atoms: int) -> np.ndarray:
    """Each of the atoms `indices` [n] along each axis: [3 n, N, 3]."""
    size = 3 * len(indices)
    directions = np.zeros((size, num_atoms, 3))
    directions[np.arange(size), np.repeat(indices, 3), np.tile(np.arange(3), len(indices))] = 1.0
    return directions


def hessian_of_products(backend: Backend, system: System, indices: np.ndarray) -> np.ndarray:
    """See `Backend.hessian`: made of products with unit directions."""
    products_of_axes = backend.hessian_products(system, unit_directions(indices, len(system.numbers)))
    return products_of_axes[:, indices].reshape(3 * len(indices), -1)


def analytic_hessian(backend: Backend, system: System, indices: np.ndarray) -> np.ndarray:
    """The Hessian's block of the atoms `indices` [n]: float64 [3 n, 3 n] in eV/A^2, symmetric.

    Raises what `evaluation.evaluate_hessian` raises.
    """
    block = evaluate_hessian(backend, system, indices)
    return (block + block.T) / 2


def chosen_atoms(indices: Sequence[int] | np.ndarray | None, num_atoms: int) -> np.ndarray:
    """Atoms as integers from 0, in the order given; all for None. Raises TypeError and ValueError."""
    if indices is None:
        return np.arange(num_atoms)
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and len(chosen)):
        raise TypeError(f"indices: expected a sequence of integers, got {indices!r}")
    if len(chosen) == 0 or chosen.min() < -num_atoms or chosen.max() >= num_atoms:
        raise ValueError(f"indices: expected some of {num_atoms} atoms, got {indices!r}")
    chosen = chosen.astype(np.int64) % num_atoms
    if len(np.unique(chosen)) < len(chosen):
        raise ValueError(f"indices: expected each atom once, got {indices!r}")
    return chosen
