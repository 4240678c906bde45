"""Which backend runs: every condition alone, and all together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ase_fastuma.checkpoint import Architecture
from ase_fastuma.selection import FUSED_PROPERTIES, Selection, select, unsupported_by_fused
from ase_fastuma.settings import Settings

UMA = Architecture(backbone="eSCNMDMoeBackbone", num_experts=32, ff_type="spectral", direct_forces=False)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

FAILURES = {
    "device": ({"device": CPU}, r"a CUDA device \(the device is cpu\)"),
    "lmax": ({"architecture": replace(UMA, lmax=3)}, r"lmax = mmax = 2 \(the checkpoint has lmax = 3, mmax = 2\)"),
    "mmax": ({"architecture": replace(UMA, mmax=1)}, r"lmax = mmax = 2 \(the checkpoint has lmax = 2, mmax = 1\)"),
    "forces": ({"architecture": replace(UMA, direct_forces=True)}, "conservative forces"),
    "head": ({"architecture": replace(UMA, head_class="Linear_Energy_Head")}, "the head MLP_EFS_Head"),
    "norm": ({"architecture": replace(UMA, norm_type="layer_norm")}, "norm_type rms_norm_sh"),
    "experts": ({"architecture": replace(UMA, layers_moe=(0, 1))}, r"experts in all layers .*\[0, 1\]"),
    "merging": ({"settings": Settings(merge_mole=False)}, "merged experts"),
    "recomputing": ({"settings": Settings(activation_checkpointing=True)}, "no activation checkpointing"),
    "request": ({"request": frozenset({"energy", "dipole"})}, r"properties that it computes \(asked for dipole\)"),
}


def chosen(
    architecture: Architecture = UMA,
    device: torch.device = CUDA,
    settings: Settings | None = None,
    request: frozenset[str] = FUSED_PROPERTIES,
    backend: str = "auto",
) -> Selection:
    return select(architecture, device, replace(settings or Settings(), backend=backend), request)


@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_fused_where_all_conditions_hold(backend: str) -> None:
    assert chosen(backend=backend).name == "fused"
    assert chosen(replace(UMA, backbone="eSCNMDBackbone", num_experts=0), backend=backend).name == "fused"


@pytest.mark.parametrize(("change", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_each_condition(change: dict, reason: str) -> None:
    name, reasons = chosen(**change)
    assert name == "general"
    (only,) = reasons
    with pytest.raises(ValueError, match=f"backend='fused': expected {reason}"):
        chosen(**change, backend="fused")
    assert only.startswith("the fused backend needs ")


def test_all_failed_conditions_are_named() -> None:
    changes = {"architecture": replace(UMA, lmax=4, direct_forces=True), "settings": Settings(merge_mole=False)}
    assert len(chosen(**changes, device=CPU).reasons) == 4
    with pytest.raises(
        ValueError, match=r"a CUDA device .*; lmax = mmax = 2 .*; conservative forces .*; merged experts"
    ):
        chosen(**changes, device=CPU, backend="fused")


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_general_is_always_honoured(device: torch.device) -> None:
    assert chosen(device=device, backend="general") == Selection("general", ("asked for",))


def test_conditions_of_a_checkpoint_alone() -> None:
    assert unsupported_by_fused(UMA) == []
    assert len(unsupported_by_fused(replace(UMA, lmax=3, ff_type="grid"))) == 2
