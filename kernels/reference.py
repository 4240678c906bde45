"""Plain PyTorch of every operation in this folder: the formula, the CPU path and the tests' ground truth.

Every function is differentiable twice in all its floating-point arguments and works in the dtype it is given.
Shapes: N atoms, E edges (sorted by target), C channels; layouts are those of :mod:`.layout`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ._couplings import Contraction, coupling
from .layout import (
    COMPACT_SIZE,
    DEGREE_SLICES,
    GATE_OF_M_MAJOR,
    M_BLOCKS,
    M_MAJOR,
    NUM_COEFFICIENTS,
    NUM_GATES,
    RADIAL_OF_M_MAJOR,
)

_SQRT3 = 3.0**0.5


def edge_frame(vectors: Tensor) -> Tensor:
    """Rotation matrices that take each edge to the polar axis y.

    The energy does not depend on the roll about the edge, so the roll may follow the edge in any way. Its value here is
    that of the kernels: turn about y until the edge lies in the half plane x = 0, z >= 0, then about x. Its derivative
    is that of the shortest rotation from there, which has no roll and is smooth for every edge, those along y included.

    Args:
        vectors: edge vectors [E, 3] in A, none of length zero.

    Returns:
        R [E, 3, 3] with ``R @ (vector / length) = (0, 1, 0)``.
    """
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    with torch.no_grad():
        x, y, z = unit.unbind(1)
        rho = (x * x + z * z).sqrt()
        on_axis = rho == 0
        safe = torch.where(on_axis, torch.ones_like(rho), rho)
        c, s = torch.where(on_axis, torch.ones_like(rho), z / safe), x / safe
        rows = [c, torch.zeros_like(c), -s, s * rho, y, c * rho, s * y, -rho, c * y]
        frame = torch.stack(rows, dim=1).view(-1, 3, 3)
    x, y, z = torch.einsum("eij,ej->ei", frame, unit).unbind(1)  # the polar axis, with a derivative
    k = 1 / (1 + y)
    rows = [1 - x * x * k, -x, -x * z * k, x, y, z, -x * z * k, -z, 1 - z * z * k]  # Rodrigues' formula
    return torch.stack(rows, dim=1).view(-1, 3, 3) @ frame


def _degree_two_basis(like: Tensor) -> Tensor:
    """Symmetric traceless matrices S [5, 3, 3] with ``Y_k(v) = v^T S_k v`` for the l = 2 harmonics."""
    h = _SQRT3 / 2
    s = like.new_zeros(5, 3, 3)
    s[0, 0, 2] = s[0, 2, 0] = h  # sqrt(3) x z
    s[1, 0, 1] = s[1, 1, 0] = h  # sqrt(3) x y
    s[2, 1, 1], s[2, 0, 0], s[2, 2, 2] = 1.0, -0.5, -0.5  # y^2 - (x^2 + z^2) / 2
    s[3, 1, 2] = s[3, 2, 1] = h  # sqrt(3) y z
    s[4, 2, 2], s[4, 0, 0] = h, -h  # sqrt(3)/2 (z^2 - x^2)
    return s


def wigner(rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Wigner matrices of l = 1 and l = 2: D1 is the rotation itself, D2 is quadratic in it.

    Args:
        rotation: R [E, 3, 3].

    Returns:
        D1 [E, 3, 3] and D2 [E, 5, 5].
    """
    s = _degree_two_basis(rotation)
    turned = torch.einsum("eai,kij,ebj->ekab", rotation, s, rotation)  # R S_k R^T
    return rotation, torch.einsum("jab,ekab->ejk", s, turned) / 1.5


def compact_rotation(rotation: Tensor) -> Tensor:
    """The blocks of l = 0, 1, 2 of each rotation, [E, 35], from matrices [E, 3, 3]."""
    d1, d2 = wigner(rotation)
    return torch.cat([torch.ones_like(d1[:, :1, 0]), d1.flatten(1), d2.flatten(1)], dim=1)


def dense_from_compact(compact: Tensor) -> Tensor:
    """Spread compact blocks [E, 35] into matrices [E, 9, 9] with exact zeros off the blocks."""
    dense = compact.new_zeros(compact.shape[0], NUM_COEFFICIENTS, NUM_COEFFICIENTS)
    blocks = compact.split([1, 9, 25], dim=1)
    for degree, (rows, block) in enumerate(zip(DEGREE_SLICES, blocks, strict=True)):
        size = 2 * degree + 1
        dense[:, rows, rows] = block.view(-1, size, size)
    return dense


def compact_from_dense(dense: Tensor) -> Tensor:
    """Collect the diagonal blocks of matrices [E, 9, 9] into [E, 35]; the gradient off the blocks is exactly zero."""
    return torch.cat([dense[:, rows, rows].flatten(1) for rows in DEGREE_SLICES], dim=1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate l-major features x [E, 9, C] by R [E, 3, 3], by compact [E, 35] or by dense blocks [E, 9, 9]."""
    if rotation.shape[1:] == (3, 3):
        scalars, (d1, d2) = x[:, :1], wigner(rotation)
    else:
        compact = rotation if rotation.shape[1:] == (COMPACT_SIZE,) else compact_from_dense(rotation)
        scalars = compact[:, :1, None] * x[:, :1]
        d1, d2 = compact[:, 1:10].reshape(-1, 3, 3), compact[:, 10:].reshape(-1, 5, 5)
    return torch.cat([scalars, d1 @ x[:, 1:4], d2 @ x[:, 4:]], dim=1)


def rotate_back(x: Tensor, rotation: Tensor) -> Tensor:
    """The inverse of :func:`rotate`, for the same layouts."""
    return rotate(x, rotation.mT if rotation.shape[1:] == (3, 3) else transpose_rotation(rotation))


def transpose_rotation(rotation: Tensor) -> Tensor:
    """Inverse rotations, for compact [E, 35] and dense [E, 9, 9] layouts."""
    if rotation.dim() == 3:
        return rotation.mT
    l0, l1, l2 = rotation.split([1, 9, 25], dim=1)
    return torch.cat([l0, l1.view(-1, 3, 3).mT.flatten(1), l2.view(-1, 5, 5).mT.flatten(1)], dim=1)


def gather_rotate_scale(x: Tensor, vectors: Tensor, radial: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Edge inputs of the first SO(2) linear: both ends' features in the edge frame, times the radial weights.

    Args:
        x: node features [N, 9, C], l-major.
        vectors: edge vectors [E, 3].
        radial: radial weights [E, 6, 2C]; channels are source, then target.
        source, target: atoms of each edge [E].

    Returns:
        [E, 9, 2C], m-major.
    """
    pair = torch.cat([x[source], x[target]], dim=2)
    turned = rotate(pair, edge_frame(vectors))[:, list(M_MAJOR)]
    return turned * radial[:, list(RADIAL_OF_M_MAJOR)]


def rotate_back_sum(z: Tensor, vectors: Tensor, weight: Tensor, target: Tensor, num_nodes: int) -> Tensor:
    """Rotate edge messages back, weight them and sum them into their target atoms.

    Args:
        z: messages [E, 9, C], m-major; or [E, 3, C], the m = 0 coefficients alone.
        vectors: edge vectors [E, 3].
        weight: weight of each message [E] (the envelope).
        target: target atom of each edge [E].
        num_nodes: number of atoms N.

    Returns:
        [N, 9, C], l-major.
    """
    if z.shape[1] == M_BLOCKS[0]:
        z = torch.cat([z, z.new_zeros(z.shape[0], NUM_COEFFICIENTS - M_BLOCKS[0], z.shape[2])], dim=1)
    l_major = z[:, [M_MAJOR.index(i) for i in range(NUM_COEFFICIENTS)]]
    messages = rotate_back(l_major, edge_frame(vectors)) * weight[:, None, None]
    return z.new_zeros(num_nodes, *messages.shape[1:]).index_add(0, target, messages)


def gate(x: Tensor) -> Tensor:
    """Gate activation: SiLU on l = 0, sigmoid of the degree's gate times l = 1 and l = 2.

    Args:
        x: [E, 2 + 9, H]: gates of l = 1 and l = 2, then the m-major coefficients.

    Returns:
        [E, 9, H], m-major.
    """
    gates, values = x[:, :NUM_GATES].sigmoid(), x[:, NUM_GATES:]
    rows = [values[:, 0] * values[:, 0].sigmoid()]
    rows += [values[:, i] * gates[:, g] for i, g in enumerate(GATE_OF_M_MAJOR) if g is not None]
    return torch.stack(rows, dim=1)


def s2_activation(x: Tensor, to_grid: Tensor, from_grid: Tensor) -> Tensor:
    """Separable S2 activation: SiLU on a separate l = 0, and SiLU on a grid over the sphere for l = 1 and l = 2.

    Args:
        x: [E, 1 + 9, H]: the scalars that become l = 0, then the m-major coefficients.
        to_grid: values of the m-major harmonics on the grid [G, 9]; from_grid: the way back [G, 9].

    Returns:
        [E, 9, H], m-major.
    """
    silu = torch.nn.functional.silu
    tensors = torch.einsum("gi,egc->eic", from_grid, silu(torch.einsum("gi,eic->egc", to_grid, x[:, 1:])))
    return torch.cat([silu(x[:, :1]), tensors[:, 1:]], dim=1)


def block_linear(x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
    """Multiply consecutive column blocks of x by their own matrices.

    Args:
        x: [M, sum of K_b].
        weights: matrices [K_b, N_b], one for each block.
        bias: [N_0], added to the first block's output, or None.

    Returns:
        [M, sum of N_b].
    """
    parts = x.split([w.shape[0] for w in weights], dim=1)
    out = [part @ w for part, w in zip(parts, weights, strict=True)]
    if bias is not None:
        out[0] = out[0] + bias
    return torch.cat(out, dim=1)


def grouped_linear(x: Tensor, weights: Tensor, starts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """Multiply each group of rows by its own matrix.

    Args:
        x: [M, K].
        weights: [G, K, N].
        starts: group g is rows starts[g] : starts[g + 1], [G + 1].
        bias: [G, N] or None.

    Returns:
        [M, N].
    """
    parts = [x[first:end] @ w for w, (first, end) in zip(weights, itertools.pairwise(starts), strict=True)]
    if bias is not None:
        parts = [part + b for part, b in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def grouped_outer(x: Tensor, g: Tensor, starts: Sequence[int]) -> Tensor:
    """x^T g of each group of rows: [M, K], [M, N] -> [G, K, N]."""
    return torch.stack([x[first:end].T @ g[first:end] for first, end in itertools.pairwise(starts)])


def radial_network(distances: Tensor, pair_bias: Tensor, pair: Tensor, layers: RadialLayers) -> Tensor:
    """Hidden activations of a radial network: Gaussians of d, then (linear, layer norm, SiLU) twice.

    Args:
        distances: d [E] in A.
        pair_bias: first layer's contribution of each pair of elements, bias included [P, B].
        pair: index of each edge's pair [E].
        layers: the network's weights.

    Returns:
        [E, B], the inputs of the network's last linear layer.
    """
    gaussians = torch.exp(layers.gaussian_exponent * (distances[:, None] - layers.centres) ** 2)
    hidden = gaussians @ layers.weight_distance + pair_bias[pair]
    hidden = torch.nn.functional.silu(torch.layer_norm(hidden, hidden.shape[1:], *layers.norm_first, 1e-5))
    hidden = hidden @ layers.weight_second + layers.bias_second
    return torch.nn.functional.silu(torch.layer_norm(hidden, hidden.shape[1:], *layers.norm_second, 1e-5))


class RadialLayers:
    """Weights of one radial network up to, not including, its last linear layer.

    Attributes:
        centres: centres of the Gaussians [K] in A; gaussian_exponent: their exponent (negative) in 1/A^2.
        weight_distance [K, B], weight_second [B, B], bias_second [B].
        norm_first, norm_second: weight and bias of the layer norms, each [B].
    """

    def __init__(
        self,
        centres: Tensor,
        gaussian_exponent: float,
        weight_distance: Tensor,
        norm_first: tuple[Tensor, Tensor],
        weight_second: Tensor,
        bias_second: Tensor,
        norm_second: tuple[Tensor, Tensor],
    ) -> None:
        self.centres, self.gaussian_exponent = centres, gaussian_exponent
        self.weight_distance, self.norm_first = weight_distance, norm_first
        self.weight_second, self.bias_second, self.norm_second = weight_second, bias_second, norm_second


def envelope(distances: Tensor, cutoff: float) -> Tensor:
    """Polynomial envelope of exponent 5 (Gasteiger et al., 2020): 1 at d = 0, smoothly 0 at the cutoff."""
    u = distances / cutoff
    return torch.where(u < 1, 1 + u**5 * (-21 + u * (35 - 15 * u)), torch.zeros_like(u))


def envelope_slope(distances: Tensor, cutoff: float) -> Tensor:
    """Derivative of :func:`envelope` with respect to the distance (1/A)."""
    u = distances / cutoff
    return torch.where(u < 1, -105 / cutoff * u**4 * (1 - u) ** 2, torch.zeros_like(u))


def atomwise(
    x: Tensor,
    gates: Tensor,
    gates_bias: Tensor,
    first: tuple[Tensor, ...],
    first_bias: Tensor,
    second: tuple[Tensor, ...],
    second_bias: Tensor,
) -> Tensor:
    """Spectral atom-wise MLP: a linear for each degree, a gate from the scalars, a linear for each degree.

    Args:
        x: [N, 9, C], l-major.
        gates: [C, 2H], columns of l = 1, then of l = 2; gates_bias: [2H].
        first: [C, H] of each degree; second: [H, C] of each degree.
        first_bias: [H], second_bias: [C], both on l = 0.

    Returns:
        [N, 9, C].
    """
    silu = torch.nn.functional.silu
    gate = silu(x[:, 0] @ gates + gates_bias).sigmoid().unflatten(1, (NUM_GATES, 1, -1))
    scalars, *tensors = (x[:, rows] @ w for rows, w in zip(DEGREE_SLICES, first, strict=True))
    hidden = [silu(scalars + first_bias), *(t * gate[:, i] for i, t in enumerate(tensors))]
    out = [h @ w for h, w in zip(hidden, second, strict=True)]
    return torch.cat([out[0] + second_bias, *out[1:]], dim=1)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Equivariant RMS norm over all coefficients, with l = 0 centred and the degrees weighted equally.

    Args:
        x: [N, 9, C], l-major; weight: [3, C], one row for each degree; bias: [C] or [N, C], added to l = 0.
    """
    scalars = x[:, :1] - x[:, :1].mean(dim=2, keepdim=True)
    centred = torch.cat([scalars, x[:, 1:]], dim=1)
    degrees = [centred[:, rows].square().mean(dim=(1, 2)) for rows in DEGREE_SLICES]
    square = torch.stack(degrees).mean(dim=0)
    # Squares beyond the range would make the scale zero, and the norm a wrong number like any other: 0 * inf is NaN.
    scale = ((square + eps).rsqrt() + 0.0 * square)[:, None, None]
    rows = torch.cat([w.expand(2 * degree + 1, -1) for degree, w in enumerate(weight.unsqueeze(1))])
    out = centred * (scale * rows)
    return torch.cat([out[:, :1] + bias.unsqueeze(-2), out[:, 1:]], dim=1)


def balanced_sum(
    x: Tensor, y: Tensor | None, channels: slice, total: int | Tensor, atoms: Tensor | None = None
) -> Tensor:
    """x + y with the scalars of some channels shifted so that they sum to a total over each system.

    Args:
        x, y: [N, 9, C], l-major; y may be None. channels: the balanced ones.
        total: a number or, for each system, [S].
        atoms: how many each system has, one after another [S]; None for one system.
    """
    out = x.clone() if y is None else x + y
    scalars = out[:, 0, channels]
    if atoms is None:
        shift = (scalars.sum(dim=0) - total) / x.shape[0]
    else:
        system = torch.arange(len(atoms), device=x.device).repeat_interleave(atoms, output_size=x.shape[0])
        sums = x.new_zeros(len(atoms), scalars.shape[1]).index_add(0, system, scalars)
        shift = ((sums - torch.as_tensor(total, device=x.device).expand(len(atoms))[:, None]) / atoms[:, None])[system]
    balanced = torch.cat([out[:, 0, : channels.start], scalars - shift, out[:, 0, channels.stop :]], dim=1)
    return torch.cat([balanced[:, None], out[:, 1:]], dim=1)


def symmetric_contraction(x: Tensor, species: Tensor, weights: Tensor, contraction: Contraction, layout: str) -> Tensor:
    """Weighted equivariant polynomials of a node's features: the sum over terms of weight times x_0^p times a tree.

    Args:
        x: [N, C, D] in layout mul_ir, [N, D, C] in ir_mul.
        species: [N].
        weights: [E, K, C], in the order of the contraction's terms.
        contraction: degrees and polynomials.
        layout: mul_ir or ir_mul.

    Returns:
        mul_ir: [N, C * sum of (2 L + 1)], for each degree (channel, m); ir_mul: [N, sum of (2 L + 1), C].
    """
    x = x.transpose(1, 2) if layout == "mul_ir" else x
    parts = [x[:, d * d : (d + 1) ** 2] for d in range(contraction.lmax + 1)]
    pairs: dict[tuple[int, ...], Tensor] = {}

    def coupled(a: Tensor, b: Tensor, coefficients: np.ndarray) -> Tensor:
        return torch.einsum("kij,nic,njc->nkc", torch.from_numpy(coefficients).to(x), a, b)

    def tree_value(degree: int, tree: tuple[int, ...]) -> Tensor:
        if len(tree) == 1:
            return parts[degree]
        l1, l2, middle = (*tree, degree)[:3]
        if (l1, l2, middle) not in pairs:
            pairs[l1, l2, middle] = coupled(parts[l1], parts[l2], coupling(l1, l2, middle, l1 == l2))
        pair = pairs[l1, l2, middle]
        return pair if len(tree) == 2 else coupled(pair, parts[tree[3]], coupling(middle, tree[3], degree))

    values = {degree: x.new_zeros(x.shape[0], 2 * degree + 1, x.shape[2]) for degree in contraction.degrees}
    for weight, term in zip(weights[species.long()].unbind(1), contraction.terms, strict=True):
        factor = weight[:, None] * parts[0] ** term.scalars
        values[term.degree] = values[term.degree] + factor * tree_value(term.degree, term.tree)
    if layout == "mul_ir":
        return torch.cat([v.transpose(1, 2).flatten(1) for v in values.values()], dim=1)
    return torch.cat(list(values.values()), dim=1)


def second_order(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What an operation gives to the tangents and to the Hessian of an energy, along K directions at once.

    Args:
        function: differentiable twice.
        inputs: its arguments.
        tangents: of each input, [K, ...].
        grad: the energy's gradient with respect to the output.

    Returns:
        The tangents of the output [K, ...], and those of the inputs' gradients [K, ...], with ``grad`` held fixed.
    """
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in inputs]
        out = function(*inputs)
        # The gradient is linear in the output's adjoint: its derivative with respect to that is the tangent.
        adjoint = torch.zeros_like(out, requires_grad=True)
        linear = torch.autograd.grad(out, inputs, adjoint, create_graph=True)
        curved = torch.autograd.grad(out, inputs, grad, create_graph=True)
    (tangent,) = torch.autograd.grad(linear, adjoint, tangents, retain_graph=True, is_grads_batched=True)
    found = torch.autograd.grad(curved, inputs, tangents, is_grads_batched=True, materialize_grads=True)
    return tangent, found
