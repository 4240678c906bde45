"""What a GPU has left, and one error where memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that are free for torch: those of nobody, and those that its allocator holds unused."""
    unheld = torch.cuda.mem_get_info(device)[0]
    # torch.cuda.memory_reserved makes a sorted table of all statistics for each number, which many small passes feel.
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    held, used = (statistics[f"{name}_bytes"]["all"]["current"] for name in ("reserved", "allocated"))
    return unheld + held - used


@contextmanager
def out_of_memory_is_one_error() -> Iterator[None]:
    """Raise torch.OutOfMemoryError on the CPU too, where torch raises a bare RuntimeError and NumPy a MemoryError."""
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError(str(error)) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error
