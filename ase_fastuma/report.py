"""What runs and why, as text."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ase_fastuma.backend import Backend
from ase_fastuma.checkpoint import Checkpoint
from ase_fastuma.selection import Selection


def report(checkpoint: Checkpoint, selection: Selection, backend: Backend, parameters: Mapping[str, Any]) -> str:
    """One line for each fact: backend and why, model, task, device, precision, versions."""
    tasks = ", ".join(checkpoint.tasks)
    rows = {
        "backend": f"{selection.name} ({'; '.join(selection.reasons)})",
        "model": f"{parameters['model']} ({checkpoint.model_id or checkpoint.architecture.backbone}, tasks {tasks})",
        "task": parameters["task"] or "chosen with the first structure",
        "device": device_name(torch.device(parameters["device"])),
        "precision": parameters["precision"],
        **backend.describe(),
        "versions": versions(),
    }
    return table(rows)


def table(rows: Mapping[str, str]) -> str:
    """Names and values in two columns."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def device_name(device: torch.device) -> str:
    """A device with what it is."""
    if device.type != "cuda":
        return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"


def versions() -> str:
    """Versions of this package and of what its results depend on."""
    found = []
    for name in ("ase_fastuma", "torch", "triton", "fairchem-core", "ase", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join([*found, f"Python {platform.python_version()}"])
