"""What the edges of one evaluation share: their lengths, the envelope and its slope, and their pairs of elements.

    d = |r|,   w = 1 + u^5 (-21 + u (35 - 15 u)),   dw/dd = -105 u^4 (1 - u)^2 / cutoff,   u = d / cutoff < 1

in float64 whatever the working precision. Nothing here is differentiated: the slope goes into the kernels that use the
envelope, and the plain forms (:func:`.reference.envelope`) are differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from . import reference
from ._compile import kernel
from ._device import wait_for_previous
from ._launch import cdiv, runs_kernels

_BLOCK = 256


class EdgeGeometry(NamedTuple):
    """Of each edge, E in all.

    | field | type | meaning |
    |---|---|---|
    | vectors | working [E, 3] | edge vector, A |
    | distances | float64 [E] | its length d, A |
    | pair | int64 [E] | element of the source times the number of elements, plus element of the target |
    | weight, weight_slope | working [E] | envelope w, and dw/dd (1/A); zero from the cutoff on |
    """

    vectors: Tensor
    distances: Tensor
    pair: Tensor
    weight: Tensor
    weight_slope: Tensor


@kernel(
    do_not_specialize=["num_edges", "num_elements"],
    do_not_specialize_on_alignment=["source", "target", "out_vectors", "distances", "pair", "weight", "weight_slope"],
)
def _edge_geometry_kernel(
    vectors,
    source,
    target,
    element,
    num_elements,
    out_vectors,
    distances,
    pair,
    weight,
    weight_slope,
    num_edges,
    CUTOFF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    edges = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = edges < num_edges
    x = tl.load(vectors + edges * 3, mask=mask, other=0.0)
    y = tl.load(vectors + edges * 3 + 1, mask=mask, other=0.0)
    z = tl.load(vectors + edges * 3 + 2, mask=mask, other=0.0)
    working = weight.dtype.element_ty
    tl.store(out_vectors + edges * 3, x.to(working), mask=mask)
    tl.store(out_vectors + edges * 3 + 1, y.to(working), mask=mask)
    tl.store(out_vectors + edges * 3 + 2, z.to(working), mask=mask)
    d = tl.sqrt(x * x + y * y + z * z)
    tl.store(distances + edges, d, mask=mask)
    from_element = tl.load(element + tl.load(source + edges, mask=mask, other=0), mask=mask, other=0)
    to_element = tl.load(element + tl.load(target + edges, mask=mask, other=0), mask=mask, other=0)
    tl.store(pair + edges, from_element * num_elements + to_element, mask=mask)
    # A bare Python number would be rounded to float32; the integers below are exact in it.
    cutoff = tl.full([1], CUTOFF, tl.float64)
    u = d / cutoff
    inside = u < 1.0
    u4 = u * u * u * u
    w = 1.0 + u4 * u * (u * (35.0 - 15.0 * u) - 21.0)
    slope = -105.0 / cutoff * u4 * (1.0 - u) * (1.0 - u)
    tl.store(weight + edges, tl.where(inside, w, 0.0).to(working), mask=mask)
    tl.store(weight_slope + edges, tl.where(inside, slope, 0.0).to(working), mask=mask)


def edge_geometry(
    vectors: Tensor,
    source: Tensor,
    target: Tensor,
    element: Tensor,
    num_elements: int,
    cutoff: float,
    dtype: torch.dtype,
) -> EdgeGeometry:
    """Lengths, envelopes and element pairs of edges, in one launch.

    Args:
        vectors: edge vectors [E, 3] in A, float64.
        source, target: atoms of each edge [E], integer.
        element: each atom's index among the elements present [N], int64.
        num_elements: how many elements there are.
        cutoff: in A.
        dtype: the working precision, float32 or float64.
    """
    if not runs_kernels(vectors):
        distances = vectors.norm(dim=1)
        return EdgeGeometry(
            vectors.to(dtype),
            distances,
            element[source] * num_elements + element[target],
            reference.envelope(distances, cutoff).to(dtype),
            reference.envelope_slope(distances, cutoff).to(dtype),
        )
    num_edges = vectors.shape[0]
    out = EdgeGeometry(
        torch.empty_like(vectors, dtype=dtype),
        vectors.new_empty(num_edges),
        torch.empty(num_edges, dtype=torch.int64, device=vectors.device),
        vectors.new_empty(num_edges, dtype=dtype),
        vectors.new_empty(num_edges, dtype=dtype),
    )
    if num_edges:
        _edge_geometry_kernel[(cdiv(num_edges, _BLOCK),)](
            vectors, source, target, element, num_elements, *out, num_edges, CUTOFF=cutoff, BLOCK=_BLOCK, num_warps=4
        )
    return out
