"""What a GPU has left."""

from __future__ import annotations

import torch


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that are free for torch: those of nobody, and those that its allocator holds unused."""
    unheld = torch.cuda.mem_get_info(device)[0]
    # torch.cuda.memory_reserved makes a sorted table of all statistics for each number, which many small passes feel.
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    held, used = (statistics[f"{name}_bytes"]["all"]["current"] for name in ("reserved", "allocated"))
    return unheld + held - used
