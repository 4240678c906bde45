"""Mixtures of experts against mixing in plain PyTorch, entry by entry and in the products that read them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels.groups import RowGroups
from ase_fastuma.kernels.linear import block_matmul
from ase_fastuma.kernels.mixture import ExpertBlocks, mixed_weights
from ase_fastuma.kernels.operand import to_operand
from devices import DEVICES
from edge_graphs import random

PAIRED = (False, True, True)
SHAPES = ((10, 6), (8, 4), (4, 4))  # rows and depth of each block's experts
EXPERTS, ERROR = 5, {"split": 1e-6, "half": 2e-3}


def experts(device, magnitudes=(1.0, 1.0, 1.0)):
    sizes = [(EXPERTS, *shape) for shape in SHAPES]
    return [
        m * random(size, device, torch.float32, i) for i, (size, m) in enumerate(zip(sizes, magnitudes, strict=True))
    ]


def coefficients(groups):
    return np.random.default_rng(3).dirichlet(np.ones(EXPERTS), groups) + 0.005


def exact(weights, mix):
    """Matrices [G, inputs, outputs] of each block in float64."""
    found = []
    for w, paired in zip(weights, PAIRED, strict=True):
        mixed = torch.einsum("gx,xrk->grk", torch.tensor(mix, device=w.device), w.double())
        if paired:
            one, two = mixed.chunk(2, dim=1)
            mixed = torch.cat([torch.cat([one, -two], 2), torch.cat([two, one], 2)], 1)
        found.append(mixed.mT)
    return found


@pytest.mark.parametrize("groups", [1, 3, 17])
@pytest.mark.parametrize("kind", ["split", "half"])
@pytest.mark.parametrize("device", DEVICES)
def test_products_with_mixtures(device, kind, groups):
    # Each block has a scale of its own. Results that are stored as halves have one scale a row.
    weights = experts(device, (1.0, 30.0, 1e-3) if kind == "split" else (1.0, 1.0, 1.0))
    mix, bias = coefficients(groups), random((10,), device, torch.float32, 9)
    mixed = mixed_weights(ExpertBlocks.of(weights, PAIRED), mix, bias, kind)
    matrices = exact(weights, mix)
    assert mixed.shapes == tuple(m.shape[1:] for m in matrices)
    starts = [0, *(2 * g + 3 for g in range(groups - 1)), 2 * groups + 5]
    rows = RowGroups(starts, weights[0].device)
    for transposed in (False, True):
        blocks = [m.mT for m in matrices] if transposed else matrices
        x = random((starts[-1], sum(m.shape[1] for m in blocks)), device, torch.float64, 5)
        out = block_matmul(to_operand(x, kind), mixed, transposed, half=kind == "half", groups=rows)
        got = out.dense().double().split([m.shape[2] for m in blocks], dim=1)
        for g, (first, end) in enumerate(itertools.pairwise(starts)):
            own = None if transposed else bias.double()
            want = reference.block_linear(x[first:end], [m[g] for m in blocks], own)
            for mine, other in zip(got, want.split([m.shape[2] for m in blocks], dim=1), strict=True):
                assert (mine[first:end] - other).norm() < ERROR[kind] * other.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_mixture_does_not_depend_on_others(device):
    blocks, mix = ExpertBlocks.of(experts(device), PAIRED), coefficients(19)
    together = mixed_weights(blocks, mix, None, "split").forward
    alone = mixed_weights(blocks, mix[17:18], None, "split").forward
    for name in ("high", "low", "unscale"):
        assert torch.equal(getattr(together, name)[17:18], getattr(alone, name))
    assert together.high.abs().max() <= 4096
    assert (torch.frexp(together.unscale).mantissa == 0.5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_bounds_hold(device):
    """No product is larger than the bound says, in either direction: halves cannot overflow."""
    weights, mix = experts(device), coefficients(4)
    mixed = mixed_weights(ExpertBlocks.of(weights, PAIRED), mix, torch.full((10,), 1e4, device=device), "half")
    for bound, axis in ((mixed.forward_bound, 1), (mixed.backward_bound, 2)):
        growth = torch.stack([m.abs().sum(axis).amax(1) for m in exact(weights, mix)]).amax(0)
        assert (bound[:, 0] >= growth).all()
        assert (bound[:, 0] <= 8 * growth).all()
    assert (mixed.forward_bound[:, 1] >= 1e4 / 2048).all()
    assert (torch.frexp(mixed.forward_bound).mantissa == 0.5).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_number_shows(device):
    weights = experts(device)
    weights[1][2, 3, 1] = float("nan")
    mixed = mixed_weights(ExpertBlocks.of(weights, PAIRED), coefficients(2), None, "split")
    assert mixed.forward.high.isnan().any(dim=1).all()
