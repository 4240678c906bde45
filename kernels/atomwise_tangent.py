"""Second derivatives of the atom-wise MLP, along many directions at once: linears for each degree around a gate."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .atomwise import AtomwiseWeights
from .convolution_tangent import add_gram
from .gate_tangent import NUM_HEAD, atomwise_gate_tangent
from .layout import DEGREE_SLICES, NUM_COEFFICIENTS, NUM_GATES

_SCALARS = slice(0, 1)
_AFTER_GATES = tuple(slice(NUM_GATES + rows.start, NUM_GATES + rows.stop) for rows in DEGREE_SLICES)

Products = Sequence[tuple[slice, Tensor, slice]]
"""Coefficients of the input, the matrix [C, H] that they are multiplied by, coefficients of the output."""


def _multiply(x: Tensor, products: Products, num_out: int) -> Tensor:
    """Coefficients [K, I, N, C] times matrices: [K, num_out, N, H]."""
    num_directions, _, num_nodes, _ = x.shape
    out = x.new_empty(num_directions, num_out, num_nodes, products[0][1].shape[1])
    for rows, matrix, out_rows in products:
        # Consecutive coefficients of all atoms are one matrix for each direction.
        several = x[:, rows].flatten(1, 2) @ matrix
        out[:, out_rows] = several.unflatten(1, (-1, num_nodes))
    return out


def atomwise_tangent(dx: Tensor, x: Tensor, grad: Tensor, w: AtomwiseWeights, half_hessian: Tensor) -> Tensor:
    """Tangents of :func:`.atomwise.atomwise`, and its part of the Hessian.

    Args:
        dx: tangents [K, 9, N, C]; x: the input [N, 9, C], l-major; grad: adjoint of the output [N, 9, C].
        w: weights of any kind; products are those of torch.
        half_hessian: OUTPUT [K, K], float64; half of the MLP's part is added.

    Returns:
        Tangents of the output [K, 9, N, C].
    """
    gates = w.gates.chunk(NUM_GATES, dim=1)
    into = [(_SCALARS, matrix, slice(i, i + 1)) for i, matrix in enumerate(gates)]
    into += list(zip(DEGREE_SLICES, w.first, _AFTER_GATES, strict=True))
    out_of = list(zip(DEGREE_SLICES, w.second, DEGREE_SLICES, strict=True))
    back = [(rows, matrix.T, out_rows) for rows, matrix, out_rows in out_of]

    value, upstream = (t.transpose(0, 1)[None] for t in (x, grad))
    hidden = _multiply(value, into, NUM_GATES + NUM_COEFFICIENTS)[0]
    hidden[:NUM_GATES] += w.gates_bias.unflatten(0, (NUM_GATES, 1, -1))
    hidden[NUM_GATES] += w.first_bias
    grad_hidden = _multiply(upstream, back, NUM_COEFFICIENTS)[0]

    t = _multiply(dx, into, NUM_GATES + NUM_COEFFICIENTS)
    gated, half = atomwise_gate_tangent(t, hidden, grad_hidden)
    add_gram(half_hessian, t[:, :NUM_HEAD].flatten(1, 2), half.flatten(1, 2))
    return _multiply(gated, out_of, NUM_COEFFICIENTS)
