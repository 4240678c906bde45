"""Residual sum and equivariant RMS norm of node features, as one kernel forward and one backward.

Formula (:func:`.reference.rms_norm`), for the sum s = x + y of an atom, with l = 0 centred over its channels::

    r = (mean over degrees of the mean of s_l^2 + eps)^(-1/2);   out_l = s_l r w_l (+ bias + shift on l = 0)

Both the sum and its norm are wanted: the next residual starts from the sum. The weights are frozen.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from ._check import check_shape
from ._compile import kernel
from ._device import load_l_major, load_l_major_sum, store_l_major, wait_for_previous
from ._launch import cdiv, edge_tile, runs_kernels
from .edge import reference_gradient
from .layout import LMAX, NUM_COEFFICIENTS


@triton.jit
def _centre_and_scale(s0, s1, s2, s3, s4, s5, s6, s7, s8, mask, C: tl.constexpr, EPS: tl.constexpr):
    """l = 0 less its mean over the channels, and r of each atom as a column."""
    s0 = tl.where(mask, s0 - tl.sum(s0, axis=1)[:, None] / C, 0.0)
    vectors = s1 * s1 + s2 * s2 + s3 * s3
    tensors = s4 * s4 + s5 * s5 + s6 * s6 + s7 * s7 + s8 * s8
    squares = tl.sum(s0 * s0 + vectors / 3 + tensors / 5, axis=1)[:, None]
    eps = tl.full([1, 1], EPS, s0.dtype)
    # Squares beyond the range would make r zero, and the norm a wrong number that looks like any other: 0 * inf is NaN.
    return s0, 1.0 / tl.sqrt(squares / (3 * C) + eps) + 0.0 * squares


@kernel(do_not_specialize=["num_nodes"], do_not_specialize_on_alignment=["weight", "bias", "shift"])
def _add_rms_norm_kernel(
    x,
    y,
    weight,
    bias,
    shift,
    total,
    normed,
    num_nodes,
    C: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADD: tl.constexpr,
    SHIFT: tl.constexpr,
    SHIFT_STRIDE: tl.constexpr,
):
    """s = x + y (ADD; else s = x, which is not stored again); out_l = s_l r w_l (+ bias + shift on l = 0)."""
    wait_for_previous()
    nodes = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    mask = (nodes < num_nodes) & (channels < C)
    at = nodes * (9 * C) + channels
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = load_l_major_sum(x + at, y + at if ADD else None, C, mask)
    if ADD:
        store_l_major(total + at, C, mask, s0, s1, s2, s3, s4, s5, s6, s7, s8)
    s0, r = _centre_and_scale(s0, s1, s2, s3, s4, s5, s6, s7, s8, mask, C, EPS)
    # Loaded as whole tiles, in the layout of the features: a single row's layout would be forced on all of them.
    w0 = r * tl.load(weight + channels, mask=mask, other=0.0)
    w1 = r * tl.load(weight + C + channels, mask=mask, other=0.0)
    w2 = r * tl.load(weight + 2 * C + channels, mask=mask, other=0.0)
    b = tl.load(bias + channels, mask=mask, other=0.0)
    if SHIFT:
        b += tl.load(shift + nodes * SHIFT_STRIDE + channels, mask=mask, other=0.0)
    store_l_major(
        normed + at, C, mask, s0 * w0 + b, s1 * w1, s2 * w1, s3 * w1, s4 * w2, s5 * w2, s6 * w2, s7 * w2, s8 * w2
    )


@kernel(do_not_specialize=["num_nodes"], do_not_specialize_on_alignment=["weight"])
def _add_rms_norm_backward_kernel(
    grad_total,
    grad_normed,
    total,
    weight,
    grad,
    num_nodes,
    C: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADD: tl.constexpr,
):
    """With h_l = grad_normed_l w_l, of an atom::

    d s_l = r h_l - s_l r^3 / (3 (2 l + 1) C) sum over all of h s, less its mean on l = 0 (+ grad_total, with ADD)
    """
    wait_for_previous()
    nodes = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    mask = (nodes < num_nodes) & (channels < C)
    at = nodes * (9 * C) + channels
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = load_l_major(total + at, C, mask)
    s0, r = _centre_and_scale(s0, s1, s2, s3, s4, s5, s6, s7, s8, mask, C, EPS)
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = load_l_major(grad_normed + at, C, mask)
    w0 = tl.load(weight + channels, mask=mask, other=0.0)
    w1 = tl.load(weight + C + channels, mask=mask, other=0.0)
    w2 = tl.load(weight + 2 * C + channels, mask=mask, other=0.0)
    h0, h1, h2, h3 = h0 * w0, h1 * w1, h2 * w1, h3 * w1
    h4, h5, h6, h7, h8 = h4 * w2, h5 * w2, h6 * w2, h7 * w2, h8 * w2
    product = h0 * s0 + h1 * s1 + h2 * s2 + h3 * s3 + h4 * s4 + h5 * s5 + h6 * s6 + h7 * s7 + h8 * s8
    k0 = r * r * (tl.sum(product, axis=1)[:, None] / (3 * C))
    k1 = k0 / 3
    k2 = k0 / 5
    g0 = r * (h0 - k0 * s0)
    g0 -= tl.sum(g0, axis=1)[:, None] / C
    g1, g2, g3 = r * (h1 - k1 * s1), r * (h2 - k1 * s2), r * (h3 - k1 * s3)
    g4, g5, g6 = r * (h4 - k2 * s4), r * (h5 - k2 * s5), r * (h6 - k2 * s6)
    g7, g8 = r * (h7 - k2 * s7), r * (h8 - k2 * s8)
    if ADD:
        t0, t1, t2, t3, t4, t5, t6, t7, t8 = load_l_major(grad_total + at, C, mask)
        g0, g1, g2, g3, g4 = g0 + t0, g1 + t1, g2 + t2, g3 + t3, g4 + t4
        g5, g6, g7, g8 = g5 + t5, g6 + t6, g7 + t7, g8 + t8
    store_l_major(grad + at, C, mask, g0, g1, g2, g3, g4, g5, g6, g7, g8)


def _forward(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel: the sum (x itself without y) and its norm."""
    num_nodes, _, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    if num_nodes:
        tile = edge_tile(width, x.element_size())
        _add_rms_norm_kernel[(cdiv(num_nodes, tile.edges),)](
            x,
            y,
            weight,
            bias,
            shift,
            total,
            normed,
            num_nodes,
            C=width,
            EPS=eps,
            BLOCK_N=tile.edges,
            BLOCK_C=tile.channels,
            ADD=y is not None,
            SHIFT=shift is not None,
            SHIFT_STRIDE=0 if shift is None or shift.dim() == 1 else width,
            num_warps=tile.warps,
        )
    return total, normed


def _backward(grad_total: Tensor | None, grad_normed: Tensor, total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the backward kernel: the gradient with respect to the sum, and so to each of its terms."""
    num_nodes, _, width = total.shape
    grad = torch.empty_like(total)
    if num_nodes:
        tile = edge_tile(width, total.element_size())
        _add_rms_norm_backward_kernel[(cdiv(num_nodes, tile.edges),)](
            grad_total,
            grad_normed,
            total,
            weight,
            grad,
            num_nodes,
            C=width,
            EPS=eps,
            BLOCK_N=tile.edges,
            BLOCK_C=tile.channels,
            ADD=grad_total is not None,
            num_warps=tile.warps,
        )
    return grad


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, weight, bias, shift, eps):
        total, normed = _forward(x, y, weight, bias, shift, eps)
        ctx.save_for_backward(total)
        ctx.weight, ctx.bias, ctx.eps, ctx.has_y = weight, bias, eps, y is not None
        ctx.set_materialize_grads(False)  # either output may go unused
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        (total,) = ctx.saved_tensors
        if grad_normed is None:
            grad = grad_total
        elif torch.is_grad_enabled():
            function = functools.partial(reference.rms_norm, weight=ctx.weight, bias=ctx.bias, eps=ctx.eps)
            (grad,) = reference_gradient(function, (total,), grad_normed)
            grad = grad if grad_total is None else grad + grad_total
        else:
            grad_total = None if grad_total is None else grad_total.contiguous()
            grad = _backward(grad_total, grad_normed.contiguous(), total, ctx.weight, ctx.eps)
        return grad, grad if ctx.has_y else None, None, None, None, None


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add two node features, and normalise the sum over all its coefficients (equivariant RMS norm).

    Args:
        x: [N, 9, C], l-major, float32 or float64 (half types are computed in float32).
        y: like x; or None, to normalise x alone.
        weight: [3, C], one row for each degree; bias: [C], added to l = 0; shift: [C] or, for each atom its own,
            [N, C], added to l = 0 as well. Frozen.
        eps: added to the mean square.

    Returns:
        The sum (x itself where y is None) and its norm, each [N, 9, C]. An atom's numbers do not depend on the other
        atoms, nor on how many there are. Second derivatives go through the reference.

    Raises:
        ValueError, TypeError: a shape, type or device does not fit, or a weight requires a gradient.
    """
    check_shape("x", x, (None, NUM_COEFFICIENTS, None))
    width = x.shape[2]
    each = (x.shape[0], width) if isinstance(shift, Tensor) and shift.dim() == 2 else (width,)
    frozen = {"weight": (weight, (LMAX + 1, width)), "bias": (bias, (width,)), "shift": (shift, each)}
    for name, (tensor, shape) in frozen.items():
        if name == "shift" and tensor is None:
            continue
        check_shape(name, tensor, shape, x)
        if tensor.requires_grad:
            raise ValueError(f"{name}: expected a frozen tensor, got one that requires a gradient")
    if y is not None:
        check_shape("y", y, tuple(x.shape), x)
    x, y = (t.float() if t is not None and t.element_size() < 4 else t for t in (x, y))
    weight, bias, shift = (None if t is None else t.to(x.dtype).contiguous() for t in (weight, bias, shift))
    if not runs_kernels(x):
        total = x if y is None else x + y
        return total, reference.rms_norm(total, weight, bias if shift is None else bias + shift, eps)
    return _AddRMSNorm.apply(x.contiguous(), None if y is None else y.contiguous(), weight, bias, shift, eps)
