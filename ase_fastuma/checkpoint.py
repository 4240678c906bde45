"""A name or a file -> architecture, weights and tasks, without running code from the file."""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary
from zipfile import is_zipfile

import numpy as np
import torch

from ase_fastuma.hub import download, registered_names

_FAIRCHEM_CHECKPOINT = "fairchem.core.units.mlip_unit.api.inference.MLIPInferenceCheckpoint"

# Backbones by the last part of their class path and by their short name in fairchem-core's registry.
_BACKBONES = {
    "eSCNMDMoeBackbone": "eSCNMDMoeBackbone",
    "escnmd_moe_backbone": "eSCNMDMoeBackbone",
    "eSCNMDBackbone": "eSCNMDBackbone",
    "escnmd_backbone": "eSCNMDBackbone",
}
_WRAPPERS = ("DatasetSpecificMoEWrapper", "DatasetSpecificSingleHeadWrapper")
_ENERGY_HEADS = ("MLP_EFS_Head", "MLP_Energy_Head", "Linear_Energy_Head")
_HEADS = (*_ENERGY_HEADS, "Linear_Force_Head", "MLP_Stress_Head")
_MODEL_PACKAGE = "fairchem.core.models."
_TRUST = "If you trust the author of the file, pass trust_checkpoint=True"


class CheckpointError(ValueError):
    """A file that is no usable checkpoint, with what is wrong and what to do."""


@dataclass(frozen=True)
class Architecture:
    """Hyper-parameters of a checkpoint's model; where the file is silent, fairchem-core's defaults.

    Lengths in A. `dataset_mapping` leads from a task to the name of its embedding, `head_mapping` to its output head.
    """

    backbone: str
    sphere_channels: int = 128
    hidden_channels: int = 128
    edge_channels: int = 128
    num_layers: int = 2
    lmax: int = 2
    mmax: int = 2
    grid_resolution: int | None = None
    cutoff: float = 5.0
    max_neighbors: int = 300
    max_num_elements: int = 100
    distance_function: str = "gaussian"
    num_distance_basis: int = 512
    norm_type: str = "rms_norm_sh"
    act_type: str = "gate"
    ff_type: str = "grid"
    num_experts: int = 0
    moe_expert_coefficient_norm: str = "softmax"
    moe_type: str = "so2"
    moe_single: bool = False
    layers_moe: tuple[int, ...] | None = None
    use_composition_embedding: bool = False
    composition_mean_includes_zero: bool = False
    chg_spin_emb_type: str = "pos_emb"
    use_dataset_embedding: bool = True
    dataset_mapping: Mapping[str, str] = field(default_factory=dict)
    charge_balanced_channels: tuple[int, ...] = ()
    spin_balanced_channels: tuple[int, ...] = ()
    direct_forces: bool = True
    head_wrapper: str | None = None
    head_class: str = "MLP_EFS_Head"
    head_name: str = ""
    head_mapping: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskInfo:
    """One task of a checkpoint: what it was trained on and how its outputs become physical.

    energy (eV) = rmsd * sum of the atoms' outputs + mean + sum of `element_references` over the atoms. Derivatives of
    the energy share its rmsd; forces from a head of their own (direct forces, eV/A) have `forces_rmsd`. The model names
    its outputs `prefix` + property.
    """

    prefix: str
    properties: tuple[str, ...]
    mean: float
    rmsd: float
    forces_rmsd: float
    element_references: np.ndarray | None  # float64 [elements], eV


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded checkpoint; immutable by convention, shared between calculators.

    | field | meaning |
    |---|---|
    | path | the file |
    | model_id | the model's name and version, as written in the file ("" where it has none) |
    | architecture | hyper-parameters |
    | config | the model's configuration as plain containers |
    | state | averaged (EMA) weights on the CPU, named as in fairchem-core's model |
    | tasks | tasks by dataset name |
    """

    path: Path
    model_id: str
    architecture: Architecture
    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    tasks: dict[str, TaskInfo]

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the weights: files of one name may hold different ones."""
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.state.items()):
            found.update(name.encode())
            found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()


class _PlainCheckpoint:
    """Stands in for fairchem-core's checkpoint class while loading: the same attributes, none of the imports."""


# Files in use, so that calculators of one file share its weights; the key holds what changes when the file does.
_loaded: WeakValueDictionary[tuple, Checkpoint] = WeakValueDictionary()


@torch.inference_mode(False)  # the caller's own would leave weights that no derivative can pass
def load_checkpoint(name_or_path: str | Path, trust: bool = False) -> Checkpoint:
    """Load a registered model (downloaded on first use), a checkpoint file, or "demo", the bundled potential.

    With `trust` a file may hold any pickled object, and so run any code. Raises FileNotFoundError for a name that is
    neither registered nor a file, and CheckpointError for files that cannot be used, each saying why.
    """
    path = resolve(name_or_path)
    status = path.stat()
    key = (path.resolve(), status.st_mtime_ns, status.st_size, trust)
    checkpoint = _loaded.get(key)
    if checkpoint is None:
        checkpoint = _loaded[key] = _parse(_read(path, trust), path, trust)
    return checkpoint


def resolve(name_or_path: str | Path) -> Path:
    """The local file for a name or a path; downloads registered models."""
    name = str(name_or_path)
    if name == "demo":
        path = Path(str(resources.files("ase_fastuma.demo") / "demo.pt"))
    elif name in registered_names():
        path = download(name)
    else:
        path = Path(name).expanduser()
    if path.is_dir():
        raise CheckpointError(f"model: expected a checkpoint file, got the folder {path}")
    if not path.is_file():
        known = ", ".join(["demo", *registered_names()])
        raise FileNotFoundError(
            f"model: {name!r} is neither a file nor a registered name; expected a path or one of {known}"
        )
    return path


def _read(path: Path, trust: bool) -> Any:
    """Unpickle the file: with an allow-list, or with whatever it asks for where it is trusted."""
    if not is_zipfile(path):
        raise CheckpointError(
            f"{path}: expected a torch checkpoint (a zip archive), got a damaged, truncated or foreign file"
        )
    try:
        if trust:
            import fairchem.core.units.mlip_unit.api.inference  # noqa: F401 - the classes that such files refer to

            return torch.load(path, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(_allowed()):
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if refused:
                raise CheckpointError(
                    f"{path}: refused to load {', '.join(sorted(refused))}, since loading it can run code; expected "
                    f"tensors and plain or omegaconf containers. {_TRUST}"
                )
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read as a torch checkpoint: {error}") from error


def _allowed() -> list[Any]:
    """What a checkpoint may hold beyond tensors: fairchem-core's class for it, by name, and omegaconf's containers."""
    from omegaconf import DictConfig, ListConfig, nodes
    from omegaconf.base import ContainerMetadata, Metadata

    leaves = [nodes.AnyNode, nodes.StringNode, nodes.IntegerNode, nodes.FloatNode, nodes.BooleanNode]
    containers = [DictConfig, ListConfig, ContainerMetadata, Metadata, defaultdict, dict, list, int]
    return [(_PlainCheckpoint, _FAIRCHEM_CHECKPOINT), (Any, "typing.Any"), *leaves, *containers]


def _plain(value: Any) -> Any:
    """omegaconf containers as dicts and lists. Interpolations stay text: resolving one may call a function."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _parse(content: Any, path: Path, trust: bool) -> Checkpoint:
    parts: dict[str, Any] = {
        name: getattr(content, name, None) for name in ("model_config", "ema_state_dict", "tasks_config")
    }
    missing = [name for name, value in parts.items() if value is None]
    if missing:
        raise CheckpointError(
            f"{path}: expected an inference checkpoint of fairchem-core, got {type(content).__name__} without "
            f"{', '.join(missing)}"
        )
    try:
        config = _plain(parts["model_config"])
        config["model_id"] = _model_id(config)
        architecture = _architecture(config)
        tasks = _tasks(_plain(parts["tasks_config"]), architecture, trust)
        state = _weights(parts["ema_state_dict"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: incomplete checkpoint: {type(error).__name__}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Checkpoint(path, config["model_id"] or "", architecture, config, state, tasks)


def _model_id(config: dict[str, Any]) -> str | None:
    """Name and version of the model. How experts are mixed depends on it, so a mixture of experts needs one."""
    model_id = config.get("model_id")
    if model_id or not config["backbone"].get("num_experts"):
        return model_id
    if str(config["backbone"].get("model_version")) == "1.1":
        return "UMA-1.1"
    raise CheckpointError("expected a model_id, as UMA 1.1 and later have; UMA 1.0 is not supported")


def _class_name(path: str) -> str:
    """Last part of a class path inside fairchem-core's models; short registry names pass as they are."""
    if "." in path and not path.startswith(_MODEL_PACKAGE):
        raise CheckpointError(f"refused the class {path}: expected one of fairchem-core's models")
    return path.rpartition(".")[2]


def _architecture(config: dict[str, Any]) -> Architecture:
    backbone = dict(config["backbone"])
    class_name = _class_name(backbone.pop("model"))
    if class_name not in _BACKBONES:
        raise CheckpointError(
            f"unsupported backbone {class_name}: expected UMA or eSEN, i.e. one of {sorted(set(_BACKBONES.values()))}"
        )
    if backbone.get("dataset_list"):
        backbone["dataset_mapping"] = {name: name for name in backbone["dataset_list"]}
    known = {f.name for f in fields(Architecture)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in backbone.items() if key in known
    }
    for name in ("charge_balanced_channels", "spin_balanced_channels"):
        values[name] = channels = tuple(values.get(name) or ())
        if channels and sorted(channels) != list(range(min(channels), max(channels) + 1)):
            raise CheckpointError(f"{name}: expected channels that follow one another, got {list(channels)}")
    values["dataset_mapping"] = dict(values.get("dataset_mapping") or {})
    if _BACKBONES[class_name] == "eSCNMDMoeBackbone":
        values.setdefault("num_experts", 8)
    return Architecture(
        backbone=_BACKBONES[class_name],
        composition_mean_includes_zero=config["model_id"] == "UMA-S-1.2",
        **values,
        **_energy_head(config["heads"]),
    )


def _energy_head(heads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Describe the head that gives the energy, and check the classes of all of them."""
    found: list[dict[str, Any]] = []
    for name, head in heads.items():
        module = _class_name(head["module"])
        wrapper = module if module in _WRAPPERS else None
        head_class = _class_name(head["head_cls"]) if wrapper else module
        if head_class not in _HEADS:
            raise CheckpointError(f"unsupported head {head_class}: expected one of {list(_HEADS)}")
        options = head.get("head_kwargs") or {} if wrapper else head
        if options.get("reduce", "sum") != "sum" and head_class in _ENERGY_HEADS:
            raise CheckpointError(f"unsupported head {head_class} with reduce={options['reduce']!r}: expected 'sum'")
        if head_class in _ENERGY_HEADS:
            mapping = head.get("dataset_mapping") or {dataset: dataset for dataset in head.get("dataset_names") or ()}
            found.append(
                {"head_wrapper": wrapper, "head_class": head_class, "head_name": name, "head_mapping": dict(mapping)}
            )
    if len(found) != 1:
        raise CheckpointError(
            f"expected one head that predicts the energy, got {[head['head_name'] for head in found]}"
        )
    return found[0]


def _weights(ema: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Averaged weights under the names of the bare model (averaging and data parallelism each prepend "module.")."""
    state = {}
    for name, value in ema.items():
        while name.startswith("module."):
            name = name.removeprefix("module.")
        if name != "n_averaged":
            state[name] = value.detach()
    return state


def _tasks(configs: list[dict[str, Any]], architecture: Architecture, trust: bool) -> dict[str, TaskInfo]:
    by_dataset: dict[str, dict[str, dict[str, Any]]] = {}
    for task in configs:
        for dataset in task["datasets"]:
            by_dataset.setdefault(dataset, {})[task["property"]] = task
    tasks = {}
    for dataset, by_property in by_dataset.items():
        if "energy" not in by_property:
            raise CheckpointError(f"task {dataset!r}: expected an energy, got {sorted(by_property)}")
        if architecture.use_dataset_embedding and dataset not in architecture.dataset_mapping:
            raise CheckpointError(
                f"task {dataset!r}: expected one of the model's {sorted(architecture.dataset_mapping)}"
            )
        scale = {name: _normaliser(task["normalizer"]) for name, task in by_property.items()}
        mean, rmsd = scale["energy"]
        forces_rmsd = scale.get("forces", (0.0, rmsd))[1]
        for name, (other_mean, other_rmsd) in scale.items():
            derived = name in ("forces", "stress") and not (architecture.direct_forces and name == "forces")
            if name != "energy" and (other_mean != 0 or (derived and not np.isclose(other_rmsd, rmsd, rtol=1e-6))):
                raise CheckpointError(
                    f"task {dataset!r}: expected {name} scaled like the energy (mean 0, rmsd {rmsd}), "
                    f"got mean {other_mean}, rmsd {other_rmsd}"
                )
        energy = by_property["energy"]
        references = _references(energy.get("element_references"), trust)
        prefix = energy["name"].removesuffix("energy")
        tasks[dataset] = TaskInfo(prefix, tuple(by_property), mean, rmsd, forces_rmsd, references)
    return tasks


def _normaliser(config: dict[str, Any]) -> tuple[float, float]:
    """Mean and rmsd, in the float32 that fairchem-core keeps them in."""
    mean, rmsd = (float(np.float32(_array(config.get(name, 0.0)).item())) for name in ("mean", "rmsd"))
    return mean, rmsd


_TENSOR_RECIPES = ("torch.tensor", "torch.Tensor", "torch.FloatTensor", "torch.DoubleTensor")


def _array(value: Any) -> np.ndarray:
    """Numbers written as such, as a tensor, or as hydra's recipe for a tensor; float64."""
    if isinstance(value, Mapping):
        target = value.get("_target_")
        if target not in _TENSOR_RECIPES:
            raise CheckpointError(
                f"refused to run {target}: expected a list, a tensor or one of {list(_TENSOR_RECIPES)}"
            )
        value = value["_args_"][0] if "_args_" in value else value["data"]
    return np.asarray(value, dtype=np.float64)


def _references(config: Any, trust: bool) -> np.ndarray | None:
    """Energies of the elements, float64 [elements] in eV, or None where the task has none."""
    if config is None:
        return None
    if isinstance(config, Mapping) and "element_references" in config:
        return _array(config["element_references"])
    if not trust:
        target = config.get("_target_") if isinstance(config, Mapping) else config
        raise CheckpointError(f"refused to run {target} for the element references. {_TRUST}")
    from hydra.utils import instantiate

    return _array(instantiate(config).element_references)
