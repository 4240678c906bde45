"""Kernels are compiled side by side: a computation runs dry first, its launches then only ask for compilation.

Nearly all of the time that kernels take to compile is spent outside Python, so threads share it out well.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import triton
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel

from ._launch import INTERPRETED

Choice = TypeVar("Choice")

# Kernels that launches have asked for, to be compiled in the end; None outside a dry run.
_asked: ContextVar[list[Any] | None] = ContextVar("ase_fastuma_asked", default=None)


@functools.cache
def _launch_options(device_index: int) -> dict[str, bool]:
    """Options of all launches: kernels may start before the one before has ended, for which they wait themselves."""
    return {"launch_pdl": True} if torch.cuda.get_device_capability(device_index) >= (9, 0) else {}


class Kernel:
    """A Triton kernel, launched as ``kernel[grid](...)``; within :func:`dry_run` a launch compiles and runs nothing.

    Its first statement is :func:`._device.wait_for_previous`.
    """

    def __init__(self, function: Callable, jit: Callable = triton.jit, **options: Any) -> None:
        self._function = jit(function, **options)
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        asked = _asked.get()
        options = {} if INTERPRETED else _launch_options(torch.cuda.current_device())
        if asked is None:
            return functools.partial(self._function[grid], **options)
        return lambda *args, **more: asked.append(self._function.warmup(*args, grid=grid, **options, **more))


def kernel(**options: Any) -> Callable[[Callable], Kernel]:
    """Make a :class:`Kernel` of a function; `jit` is ``triton.jit`` or Gluon's, options are those of it."""
    return functools.partial(Kernel, **options)


def choices(present: Choice, possible: Iterable[Choice]) -> tuple[Choice, ...]:
    """What to launch: the present choice; in a dry run also what other sizes choose, so that they find it compiled."""
    return (present,) if _asked.get() is None else tuple(dict.fromkeys((present, *possible)))


@contextmanager
def dry_run() -> Iterator[None]:
    """Within this block kernels are compiled in parallel, for the current device, and none runs.

    What they would write stays as it was, so nothing in the block may index by it, nor wait for it. Derivatives are
    taken in this thread, which alone runs dry. At the end all kernels are there. One that does not compile says so
    where it is launched.
    """
    asked: list[Any] = []
    # Triton's threads each put the warning filters back as they found them, which is while others had changed them.
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as threads:
        with torch.autograd.set_multithreading_enabled(False), AsyncCompileMode(threads, ignore_errors=True):
            token = _asked.set(asked)
            try:
                yield
            finally:
                _asked.reset(token)
        # Those of kernels that were there before are there too.
        for new in {id(kernel): kernel for kernel in asked if isinstance(kernel, FutureKernel)}.values():
            threads.submit(_build_launcher, new)


def _build_launcher(new: FutureKernel) -> None:
    """Have the C compiler make what launches a kernel; the first launch then finds it on disk."""
    compiled = new.result()
    driver.active.launcher_cls(compiled.src, compiled.metadata)
