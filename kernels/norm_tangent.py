"""Second derivatives of the residual sum and equivariant RMS norm, along many directions at once.

Of an atom's sum s (:mod:`.norm`; l = 0 centred), with r its factor, w the weights, g the norm's adjoint, h = g w,
k_l = 1 / (3 (2 l + 1) C), along a direction t (its l = 0 centred too)::

    m = sum of k_l t_l s_l,   b = sum of h s
    tangent of the norm:  w_l r (t_l - r^2 m s_l)
    S'' t:                -r^3 (m h_l + k_l (b t_l + (sum of h t - 3 r^2 b m) s_l))

S = sum of g times the norm, g fixed; S'' t is centred on l = 0, as the norm's gradient is.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ._compile import kernel
from ._device import load_l_major, row_sum, store_l_major, wait_for_previous
from ._launch import cdiv, edge_tile
from .layout import NUM_COEFFICIENTS
from .norm import _centre_and_scale


@kernel(do_not_specialize=["num_directions", "num_nodes"], do_not_specialize_on_alignment=["weight"])
def _add_rms_norm_tangent_kernel(
    dx,
    dy,
    total,
    weight,
    grad,
    dtotal,
    dnormed,
    curved,
    num_directions,
    num_nodes,
    C: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADD: tl.constexpr,
):
    """A tile of directions for one atom: t = dx + dy (ADD; else t = dx, which is not stored again), then as above."""
    wait_for_previous()
    i_node = tl.program_id(0).to(tl.int64)
    directions = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    mask = (directions < num_directions) & (channels < C)
    stride = num_nodes.to(tl.int64) * C
    at = directions * (9 * stride) + i_node * C + channels
    t0, t1, t2, t3, t4, t5, t6, t7, t8 = load_l_major(dx + at, stride, mask)
    if ADD:
        y0, y1, y2, y3, y4, y5, y6, y7, y8 = load_l_major(dy + at, stride, mask)
        t0, t1, t2, t3, t4 = t0 + y0, t1 + y1, t2 + y2, t3 + y3, t4 + y4
        t5, t6, t7, t8 = t5 + y5, t6 + y6, t7 + y7, t8 + y8
        store_l_major(dtotal + at, stride, mask, t0, t1, t2, t3, t4, t5, t6, t7, t8)
    t0 = tl.where(mask, t0 - row_sum(t0) / C, 0.0)
    # What directions share is loaded as whole tiles, in the layout of the tangents.
    shared = i_node * (9 * C) + channels + 0 * directions
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = load_l_major(total + shared, C, mask)
    s0, r = _centre_and_scale(s0, s1, s2, s3, s4, s5, s6, s7, s8, mask, C, EPS)
    w_at = weight + channels + 0 * directions
    w0 = tl.load(w_at, mask=mask, other=0.0)
    w1 = tl.load(w_at + C, mask=mask, other=0.0)
    w2 = tl.load(w_at + 2 * C, mask=mask, other=0.0)
    m = t0 * s0 + (t1 * s1 + t2 * s2 + t3 * s3) / 3 + (t4 * s4 + t5 * s5 + t6 * s6 + t7 * s7 + t8 * s8) / 5
    m = row_sum(m) / (3 * C)
    q = r * r * m
    w0, w1, w2 = w0 * r, w1 * r, w2 * r
    store_l_major(
        dnormed + at,
        stride,
        mask,
        w0 * (t0 - q * s0),
        w1 * (t1 - q * s1),
        w1 * (t2 - q * s2),
        w1 * (t3 - q * s3),
        w2 * (t4 - q * s4),
        w2 * (t5 - q * s5),
        w2 * (t6 - q * s6),
        w2 * (t7 - q * s7),
        w2 * (t8 - q * s8),
    )
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = load_l_major(grad + shared, C, mask)
    h0, h1, h2, h3, h4 = h0 * w0, h1 * w1, h2 * w1, h3 * w1, h4 * w2
    h5, h6, h7, h8 = h5 * w2, h6 * w2, h7 * w2, h8 * w2
    # With r in h: S'' t = -r^2 (m h + k (b t + (sum of h t - 3 r^2 b m) s)).
    b = row_sum(h0 * s0 + h1 * s1 + h2 * s2 + h3 * s3 + h4 * s4 + h5 * s5 + h6 * s6 + h7 * s7 + h8 * s8)
    e = row_sum(h0 * t0 + h1 * t1 + h2 * t2 + h3 * t3 + h4 * t4 + h5 * t5 + h6 * t6 + h7 * t7 + h8 * t8) - 3 * q * b
    square = -r * r
    b, e, m = square * b / (3 * C), square * e / (3 * C), square * m
    c0 = m * h0 + b * t0 + e * s0
    c0 = c0 - row_sum(tl.where(mask, c0, 0.0)) / C
    b1, e1, b2, e2 = b / 3, e / 3, b / 5, e / 5
    store_l_major(
        curved + at,
        stride,
        mask,
        c0,
        m * h1 + b1 * t1 + e1 * s1,
        m * h2 + b1 * t2 + e1 * s2,
        m * h3 + b1 * t3 + e1 * s3,
        m * h4 + b2 * t4 + e2 * s4,
        m * h5 + b2 * t5 + e2 * s5,
        m * h6 + b2 * t6 + e2 * s6,
        m * h7 + b2 * t7 + e2 * s7,
        m * h8 + b2 * t8 + e2 * s8,
    )


def add_rms_norm_tangent(
    dx: Tensor, dy: Tensor | None, total: Tensor, weight: Tensor, grad: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of :func:`.norm.add_rms_norm`.

    Args:
        dx, dy: tangents of the summands [K, 9, N, C]; dy may be None.
        total: the sum [N, 9, C]; weight: [3, C]; eps: as there.
        grad: adjoint of the norm [N, 9, C].

    Returns:
        Tangents of the sum (dx itself without dy) and of the norm, and S'' times the sum's, each [K, 9, N, C].
    """
    num_directions, _, num_nodes, width = dx.shape
    dtotal = dx if dy is None else torch.empty_like(dx)
    dnormed, curved = torch.empty_like(dx), torch.empty_like(dx)
    assert dx.shape[1] == NUM_COEFFICIENTS
    if num_directions * num_nodes:
        tile = edge_tile(width, dx.element_size())
        _add_rms_norm_tangent_kernel[(num_nodes, cdiv(num_directions, tile.edges))](
            dx,
            dy,
            total,
            weight,
            grad,
            dtotal,
            dnormed,
            curved,
            num_directions,
            num_nodes,
            C=width,
            EPS=eps,
            BLOCK_K=tile.edges,
            BLOCK_C=tile.channels,
            ADD=dy is not None,
            num_warps=tile.warps,
        )
    return dtotal, dnormed, curved
