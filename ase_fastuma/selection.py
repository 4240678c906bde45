"""Conditions -> backend and the reasons: pure functions, no device is touched."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ase_fastuma.checkpoint import Architecture
from ase_fastuma.settings import Settings

# What the fused backend computes.
FUSED_PROPERTIES = frozenset({"energy", "energies", "forces", "stress", "hessian"})

# Choices of an architecture that it knows; a checkpoint with any other runs in general mode.
FUSED_CHOICES = {
    "norm_type": ("rms_norm_sh",),
    "act_type": ("gate", "s2"),
    "ff_type": ("spectral",),
    "distance_function": ("gaussian",),
    "moe_type": ("so2",),
    "moe_expert_coefficient_norm": ("softmax",),
}


class Selection(NamedTuple):
    """The backend that runs, and why."""

    name: str
    reasons: tuple[str, ...]


def unsupported_by_fused(architecture: Architecture) -> list[str]:
    """Conditions of the fused backend that the checkpoint fails, each with what it has."""
    failed = []
    if (architecture.lmax, architecture.mmax) != (2, 2):
        failed.append(f"lmax = mmax = 2 (the checkpoint has lmax = {architecture.lmax}, mmax = {architecture.mmax})")
    if architecture.direct_forces:
        failed.append("conservative forces (the checkpoint predicts forces with a head of their own)")
    if architecture.head_class != "MLP_EFS_Head":
        failed.append(f"the head MLP_EFS_Head (the checkpoint has {architecture.head_class})")
    if architecture.layers_moe is not None:
        failed.append(f"experts in all layers (the checkpoint has them in {list(architecture.layers_moe)})")
    for name, known in FUSED_CHOICES.items():
        value = getattr(architecture, name)
        if value not in known:
            failed.append(f"{name} {' or '.join(known)} (the checkpoint has {value})")
    return failed


def select(
    architecture: Architecture, device: torch.device, settings: Settings, request: frozenset[str] = FUSED_PROPERTIES
) -> Selection:
    """The backend for a checkpoint on a device, serving the properties in `request`.

    Raises ValueError with every failed condition where the settings insist on the fused backend.
    """
    if settings.backend == "general":
        return Selection("general", ("asked for",))
    failed = []
    if device.type != "cuda":
        failed.append(f"a CUDA device (the device is {device})")
    failed += unsupported_by_fused(architecture)
    if not settings.merge_mole:
        failed.append("merged experts (merge_mole is False)")
    if settings.activation_checkpointing:
        failed.append("no activation checkpointing (activation_checkpointing is True)")
    unknown = sorted(request - FUSED_PROPERTIES)
    if unknown:
        failed.append(f"properties that it computes (asked for {', '.join(unknown)})")
    if not failed:
        return Selection("fused", ("all conditions of the fused backend hold",))
    if settings.backend == "fused":
        raise ValueError(f"backend='fused': expected {'; '.join(failed)}. backend='auto' or 'general' runs this")
    return Selection("general", tuple(f"the fused backend needs {condition}" for condition in failed))
