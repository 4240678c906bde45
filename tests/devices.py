"""Where tests of kernels run: interpreted on the CPU, and for real on a GPU; and whether they wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    _watch("error")
    try:
        yield
    finally:
        _watch(before)


@contextmanager
def waits_counted() -> Iterator[list[str]]:
    """A list that in the end has a message for each time that the host waited for the device."""
    before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True, action="always") as said:
        _watch("warn")
        try:
            yield waits
        finally:
            _watch(before)
    messages = [str(warning.message) for warning in said]
    waits += [message for message in messages if "called a synchronizing CUDA operation" in message]


def _watch(mode: int | str) -> None:
    """Torch warns that this is a prototype."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        torch.cuda.set_sync_debug_mode(mode)
