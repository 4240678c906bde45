"""A dry run compiles kernels and runs none of them, its derivatives' included."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from ase_fastuma.kernels._compile import dry_run
from ase_fastuma.kernels.linear import block_linear, block_weights
from devices import DEVICES
from triton.runtime._async_compile import active_mode


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


def test_warning_filters_stay_though_threads_change_them():
    """As Triton's compiler does in each thread: the first to enter is the first to leave."""
    entered, overlapped = threading.Event(), threading.Event()

    def first():
        with warnings.catch_warnings(action="ignore", category=BytesWarning):
            entered.set()
            assert overlapped.wait(10)

    def second(other):
        assert entered.wait(10)
        with warnings.catch_warnings(action="ignore", category=UnicodeWarning):
            overlapped.set()
            other.result(10)

    before, content = warnings.filters, list(warnings.filters)
    with dry_run():
        compiler = active_mode.get().executor
        compiler.submit(second, compiler.submit(first)).result(10)
        assert warnings.filters != content  # which is what would stay
    assert warnings.filters is before
    assert warnings.filters == content
