"""A dry run compiles kernels and runs none of them, its derivatives' included."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
import threading
import warnings

import pytest
import torch
from ase_fastuma.kernels._compile import Kernel, dry_run
from ase_fastuma.kernels._couplings import contraction
from ase_fastuma.kernels.linear import block_linear, block_weights
from ase_fastuma.kernels.symmetric_contraction import _kernels
from devices import DEVICES
from triton.runtime._async_compile import active_mode

from ase_fastuma import kernels


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


def all_kernels() -> dict[str, Kernel]:
    """Every kernel of the package by its name, generated ones of one contraction included."""
    modules = [importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    found = {f"{m.__name__}.{n}": k for m in modules for n, k in vars(m).items() if isinstance(k, Kernel)}
    generated = _kernels(contraction("0e+1o", "0e", 2), "mul_ir")
    names = ("forward", "grad_x", "double", "grad_w", "grad_xw", "double_w")
    return found | {f"contraction.{name}": getattr(generated, name) for name in names}


def test_kernels_wait_before_they_read_or_write():
    """They may start before the kernel before them has ended: a race, and wrong numbers now and then, otherwise."""
    found = all_kernels()
    assert len(found) > 30
    for name, kernel in found.items():
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel._function.fn))).body
        body = function.body[1:] if ast.get_docstring(function) else function.body
        first = body[: 1 + [ast.unparse(s) in ("wait_for_previous()", "gdc_wait()") for s in body].index(True)]
        if "hopper" not in name:
            assert len(first) == 1, name
            continue
        # What comes before makes room in shared memory alone.
        called = {ast.unparse(n.func).split(".")[-1] for s in first for n in ast.walk(s) if isinstance(n, ast.Call)}
        assert called == {
            "allocate_shared_memory",
            "MBarrierLayout",
            "static_range",
            "init",
            "index",
            "fence_async_shared",
            "gdc_wait",
        }
