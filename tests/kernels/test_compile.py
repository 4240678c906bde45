"""A dry run compiles kernels and runs none of them, its derivatives' included."""

from __future__ import annotations

import pytest
import torch
from ase_fastuma.kernels._compile import dry_run
from ase_fastuma.kernels.linear import block_linear, block_weights
from devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_launches_write_nothing_in_a_dry_run(device, monkeypatch):
    weights = block_weights([torch.eye(16, device=device)], None, "split")
    x = torch.arange(32.0, device=device).reshape(2, 16).requires_grad_()
    expected = (x.detach().clone(), torch.ones(2, 16, device=device))

    def both():
        y = block_linear(x, weights)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), grad

    empty = torch.empty  # what is written by nothing then shows
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(-7))
        with dry_run():
            dry = both()
    assert all((d == -7).all() for d in dry)
    assert all(torch.equal(r, e) for r, e in zip(both(), expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_ends_a_dry_run(device):
    weights = block_weights([torch.eye(16, device=device)], None, "split")
    x = torch.ones(1, 16, device=device)
    with pytest.raises(ZeroDivisionError), dry_run():
        1 / 0  # noqa: B018
    assert torch.equal(block_linear(x, weights), x)
