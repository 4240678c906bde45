"""From gradients of the energy with respect to edge vectors to forces and virial, as ordered sums in float64.

    F[i] = sum over edges into i of g - sum over edges out of i of g
    W[i] = sum over edges into i of r g^T;  the sum of all W[i] is dE/d(strain), since r' = r + r strain

for edge vectors r = x[source] - x[target] (periodic images included) and g = dE/dr. One program an atom, no atomics.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ._compile import kernel
from ._device import wait_for_previous
from ._launch import runs_kernels
from .edge import EdgeList


@kernel(
    do_not_specialize_on_alignment=["gradient", "vectors", "target_start", "by_source", "source_start"],
)
def _forces_kernel(gradient, vectors, target_start, by_source, source_start, forces, virials, BLOCK_E: tl.constexpr):
    """Forces [3] and virial [9] of one atom, over its edges in order; rows of three numbers are padded to four."""
    wait_for_previous()
    i_node = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    axes = tl.arange(0, 4)
    force = tl.zeros([4], dtype=tl.float64)
    virial = tl.zeros([4, 4], dtype=tl.float64)
    first = tl.load(target_start + i_node).to(tl.int32)
    last = tl.load(target_start + i_node + 1).to(tl.int32)
    for k in range(first, last, BLOCK_E):
        at = (k + o_e).to(tl.int64)[:, None] * 3 + axes[None, :]
        mask = (k + o_e < last)[:, None] & (axes < 3)[None, :]
        g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float64)
        r = tl.load(vectors + at, mask=mask, other=0.0).to(tl.float64)
        force += tl.sum(g, axis=0)
        virial += tl.sum(r[:, :, None] * g[:, None, :], axis=0)
    first = tl.load(source_start + i_node).to(tl.int32)
    last = tl.load(source_start + i_node + 1).to(tl.int32)
    for k in range(first, last, BLOCK_E):
        m_e = k + o_e < last
        edges = tl.load(by_source + k + o_e, mask=m_e, other=0).to(tl.int64)
        mask = m_e[:, None] & (axes < 3)[None, :]
        g = tl.load(gradient + edges[:, None] * 3 + axes[None, :], mask=mask, other=0.0).to(tl.float64)
        force -= tl.sum(g, axis=0)
    tl.store(forces + i_node * 3 + axes, force, mask=axes < 3)
    square = (axes < 3)[:, None] & (axes < 3)[None, :]
    tl.store(virials + i_node * 9 + axes[:, None] * 3 + axes[None, :], virial, mask=square)


def forces_and_virial(
    gradient: Tensor, vectors: Tensor, edges: EdgeList, atoms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Forces [N, 3] and virial [3, 3], float64, in the units of the gradient (and times those of the vectors).

    Args:
        gradient: dE/dr of each edge [E, 3]; rows beyond those that ``edges`` counts are not read.
        vectors: edge vectors r [E, 3], float64.
        edges: indices of all edges.
        atoms: number of atoms of each of S systems that follow one another [S], int64; the virials are then [S, 3, 3].
    """
    num_nodes = edges.num_nodes
    forces = torch.empty(num_nodes, 3, dtype=torch.float64, device=gradient.device)
    virials = torch.empty(num_nodes, 3, 3, dtype=torch.float64, device=gradient.device)
    if runs_kernels(gradient):
        _forces_kernel[(num_nodes,)](
            gradient.contiguous(),
            vectors,
            edges.target_start,
            edges.by_source,
            edges.source_start,
            forces,
            virials,
            BLOCK_E=32,
            num_warps=1,
        )
    else:
        gradient, target = gradient.double(), edges.target.long()
        forces = torch.zeros_like(forces).index_add(0, target, gradient)
        forces = forces.index_add(0, edges.source.long(), -gradient)
        virials = torch.zeros_like(virials).index_add(0, target, vectors.double()[:, :, None] * gradient[:, None, :])
    if atoms is None:
        return forces, virials.sum(dim=0)
    # "unsafe" leaves out checks that would wait for the device.
    return forces, torch.segment_reduce(virials.flatten(1), "sum", lengths=atoms, unsafe=True).view(-1, 3, 3)
