"""Write a small checkpoint in fairchem-core's format, with random weights: what tests of the machinery run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ase_fastuma.general import import_fairchem

TASKS = {"omat": ("energy", "forces", "stress"), "omol": ("energy", "forces")}
RMSD = 1.7
MODELS = "fairchem.core.models."


def model_config(
    channels: int = 16,
    layers: int = 2,
    experts: int = 4,
    head: str = "MLP_EFS_Head",
    tasks: Any = TASKS,
    **backbone: Any,
) -> dict[str, Any]:
    """Configuration of a small UMA; `backbone` overrides single hyper-parameters."""
    mapping = {name: name for name in tasks}
    settings = {
        "model": MODELS + "uma.escn_moe.eSCNMDMoeBackbone",
        "num_experts": experts,
        "use_composition_embedding": True,
        "max_num_elements": 100,
        "sphere_channels": channels,
        "lmax": 2,
        "mmax": 2,
        "otf_graph": True,
        "max_neighbors": 300,
        "cutoff": 5.0,
        "edge_channels": channels,
        "num_distance_basis": 16,
        "regress_forces": True,
        "regress_stress": True,
        "direct_forces": False,
        "num_layers": layers,
        "hidden_channels": channels,
        "norm_type": "rms_norm_sh",
        "act_type": "gate",
        "ff_type": "spectral",
        "chg_spin_emb_type": "rand_emb",
        "cs_emb_grad": True,
        "dataset_mapping": mapping,
        "charge_balanced_channels": [0, 1],
    }
    return {
        "_target_": MODELS + "base.HydraModel",
        "backbone": settings | backbone,
        "heads": {
            "energyandforcehead": {
                "module": MODELS + "uma.escn_moe.DatasetSpecificMoEWrapper",
                "head_cls": MODELS + "uma.escn_md." + head,
                "head_kwargs": {"wrap_property": False},
                "dataset_mapping": mapping,
            }
        },
        "pass_through_head_outputs": True,
        "model_id": "UMA-S-1.2.1",
    }


def esen_config(direct: bool = False) -> dict[str, Any]:
    """Configuration of a small eSEN for molecules, conservative or with a head of its own for the forces."""
    config = model_config(tasks=["omol"])
    backbone = config["backbone"]
    for name in ("num_experts", "use_composition_embedding"):
        del backbone[name]
    backbone |= {"model": MODELS + "uma.escn_md.eSCNMDBackbone", "direct_forces": direct, "regress_stress": not direct}
    if direct:
        heads = {"energy": {"module": MODELS + "uma.escn_md.MLP_Energy_Head", "reduce": "sum"}}
        heads["forces"] = {"module": MODELS + "uma.escn_md.Linear_Force_Head"}
    else:
        heads = {"efs": {"module": MODELS + "uma.escn_md.MLP_EFS_Head"}}
    return config | {"heads": heads, "pass_through_head_outputs": not direct, "model_id": None}


def task_config(dataset: str, prop: str) -> dict[str, Any]:
    """One task as fairchem-core writes it; references of -0.1 Z eV for the energy."""
    config: dict[str, Any] = {
        "_target_": "fairchem.core.units.mlip_unit.mlip_unit.Task",
        "name": f"{dataset}_{prop}",
        "level": "atom" if prop == "forces" else "system",
        "property": prop,
        "loss_fn": {"_target_": "torch.nn.L1Loss"},
        "out_spec": {
            "_target_": "fairchem.core.units.mlip_unit.mlip_unit.OutputSpec",
            "dim": {"energy": [1], "forces": [3], "stress": [1, 9]}[prop],
            "dtype": "float32",
        },
        "normalizer": {
            "_target_": "fairchem.core.modules.normalization.normalizer.Normalizer",
            "mean": 0.0,
            "rmsd": RMSD,
        },
        "datasets": [dataset],
        "metrics": ["mae"],
    }
    if prop == "energy":
        config["element_references"] = {
            "_target_": "fairchem.core.modules.normalization.element_references.ElementReferences",
            "element_references": {"_target_": "torch.DoubleTensor", "_args_": [[-0.1 * z for z in range(100)]]},
        }
    return config


def checkpoint(config: dict[str, Any], tasks: Any = TASKS, seed: int = 7) -> Any:
    """Random weights for a configuration, scaled so that forces on a rattled crystal are some tenths of an eV/A."""
    import_fairchem()
    from fairchem.core.models.base import HydraModel
    from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = HydraModel(**{key: value for key, value in config.items() if key != "_target_"})
        for name, weight in model.named_parameters():
            if name.endswith(("source_embedding.weight", "target_embedding.weight")):
                weight.normal_(0, 0.5)  # as initialised, elements would hardly differ
            if "affine_weight" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            if "routing_mlp" in name:
                weight.mul_(8.0)  # experts that differ between compositions
            if "energy_block.4.weight" in name:
                weight.mul_(20.0)  # forces of ordinary size
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ema = {"n_averaged": torch.tensor(1)} | {f"module.{name}": value for name, value in state.items()}
    configs = [task_config(dataset, prop) for dataset, props in tasks.items() for prop in props]
    return MLIPInferenceCheckpoint(config, state, ema, configs)


def write_esen(path: Path, direct: bool = False) -> Path:
    """Write a stand-in for eSEN, whose tasks are named after properties alone."""
    content = checkpoint(esen_config(direct), {"omol": ("energy", "forces")})
    for task in content.tasks_config:
        task["name"] = task["property"]
    torch.save(content, path)
    return path


def write(path: Path, seed: int = 7, tasks: Any = TASKS, **options: Any) -> Path:
    """Write a stand-in checkpoint; `options` go to `model_config`."""
    torch.save(checkpoint(model_config(tasks=tasks, **options), tasks, seed), path)
    return path
