"""Loading checkpoints: what is understood, what is refused, and that nothing runs."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin as standin_module
import torch
from omegaconf import OmegaConf

from ase_fastuma import load_checkpoint
from ase_fastuma.checkpoint import CheckpointError, resolve


def save(path: Path, **changes: Any) -> Path:
    """Write the stand-in with attributes of the checkpoint replaced."""
    content = standin_module.checkpoint(standin_module.model_config())
    for name, value in changes.items():
        setattr(content, name, value)
    torch.save(content, path)
    return path


def test_content(standin: Path) -> None:
    checkpoint = load_checkpoint(standin)
    architecture = checkpoint.architecture
    assert checkpoint.model_id == "UMA-S-1.2.1"
    assert (architecture.backbone, architecture.head_class) == ("eSCNMDMoeBackbone", "MLP_EFS_Head")
    assert (architecture.sphere_channels, architecture.num_experts, architecture.cutoff) == (16, 4, 5.0)
    assert architecture.dataset_mapping == {"omat": "omat", "omol": "omol"}
    assert not architecture.direct_forces
    assert checkpoint.state["backbone.blocks.0.edge_wise.so2_conv_1.fc_m0.weights"].shape[0] == 4
    assert list(checkpoint.tasks) == ["omat", "omol"]
    omat = checkpoint.tasks["omat"]
    assert omat.properties == ("energy", "forces", "stress")
    assert omat.rmsd == np.float32(standin_module.RMSD)
    np.testing.assert_allclose(omat.element_references, -0.1 * np.arange(100))


def test_fairchem_is_not_needed(standin: Path) -> None:
    """The class of the file is known by its name alone."""
    assert "fairchem" not in type(load_checkpoint(standin)).__module__


def test_one_copy_in_memory(standin: Path, tmp_path: Path) -> None:
    first = load_checkpoint(standin)
    assert load_checkpoint(str(standin)) is first
    link = tmp_path / "link.pt"
    link.symlink_to(standin)
    assert load_checkpoint(link) is first


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = standin_module.write(tmp_path / "file.pt", seed=1)
    before = load_checkpoint(path)
    standin_module.write(path, seed=2)
    os.utime(path, ns=(1, 1))
    after = load_checkpoint(path)
    name = "backbone.sphere_embedding.weight"
    assert not torch.equal(before.state[name], after.state[name])


def test_forgotten_when_unused(tmp_path: Path) -> None:
    checkpoint = weakref.ref(load_checkpoint(standin_module.write(tmp_path / "file.pt")))
    gc.collect()
    assert checkpoint() is None


def test_omegaconf_containers(tmp_path: Path) -> None:
    content = standin_module.checkpoint(standin_module.model_config())
    path = save(
        tmp_path / "omegaconf.pt",
        model_config=content.model_config | {"backbone": OmegaConf.create(content.model_config["backbone"])},
        tasks_config=OmegaConf.create(content.tasks_config),
    )
    checkpoint = load_checkpoint(path)
    assert checkpoint.architecture.charge_balanced_channels == (0, 1)
    assert type(checkpoint.config["backbone"]) is dict
    assert type(checkpoint.config["backbone"]["dataset_mapping"]) is dict


def test_dataset_list_of_old_files(tmp_path: Path) -> None:
    config = standin_module.model_config()
    config["backbone"]["dataset_list"] = list(config["backbone"].pop("dataset_mapping"))
    assert load_checkpoint(save(tmp_path / "old.pt", model_config=config)).architecture.dataset_mapping == {
        "omat": "omat",
        "omol": "omol",
    }


def test_uma_1_1_has_no_model_id(tmp_path: Path) -> None:
    config = standin_module.model_config(model_version=1.1)
    config["model_id"] = None
    assert load_checkpoint(save(tmp_path / "uma-1.1.pt", model_config=config)).model_id == "UMA-1.1"
    del config["backbone"]["model_version"]
    with pytest.raises(CheckpointError, match=r"expected a model_id.*UMA 1\.0 is not supported"):
        load_checkpoint(save(tmp_path / "uma-1.0.pt", model_config=config))


@pytest.mark.parametrize(
    "references",
    [
        torch.arange(100, dtype=torch.float64),
        list(range(100)),
        {"_target_": "torch.tensor", "data": list(range(100))},
        {"_target_": "torch.FloatTensor", "_args_": [list(range(100))]},
    ],
    ids=["tensor", "list", "torch.tensor", "FloatTensor"],
)
def test_ways_to_write_references(tmp_path: Path, references: Any) -> None:
    task = standin_module.task_config("omat", "energy")
    task["element_references"]["element_references"] = references
    task["normalizer"] |= {"rmsd": torch.tensor(1.5), "mean": {"_target_": "torch.tensor", "data": 0.25}}
    info = load_checkpoint(save(tmp_path / "file.pt", tasks_config=[task])).tasks["omat"]
    np.testing.assert_array_equal(info.element_references, np.arange(100))
    assert (info.mean, info.rmsd) == (0.25, 1.5)


def test_no_references(tmp_path: Path) -> None:
    task = standin_module.task_config("omat", "energy")
    del task["element_references"]
    assert load_checkpoint(save(tmp_path / "file.pt", tasks_config=[task])).tasks["omat"].element_references is None


# ---------------------------------------------------------------------------------------------------- what is refused


class Evil:
    """Runs a command where it is unpickled without care."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch harm",)


class Harmless:
    """A class that no allow-list knows."""


def test_code_does_not_run(tmp_path: Path) -> None:
    path = save(tmp_path / "evil.pt", tasks_config=Evil())
    with pytest.raises(CheckpointError, match=r"evil.pt: refused to load posix.system.*trust_checkpoint=True"):
        load_checkpoint(path)
    assert not Path("harm").exists()


def test_unknown_class_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "file.pt", extra=Harmless())
    with pytest.raises(CheckpointError, match=r"refused to load .*test_checkpoint.Harmless"):
        load_checkpoint(path)
    assert load_checkpoint(path, trust=True).model_id == "UMA-S-1.2.1"


def test_classes_named_in_the_configuration(tmp_path: Path) -> None:
    config = standin_module.model_config()
    config["backbone"]["model"] = "os.system"
    with pytest.raises(CheckpointError, match=r"refused the class os\.system"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))
    config["backbone"]["model"] = "fairchem.core.models.allscaip.AllScAIP.AllScAIPBackbone"
    with pytest.raises(CheckpointError, match="unsupported backbone AllScAIPBackbone: expected UMA or eSEN"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))
    config = standin_module.model_config(head="Unknown_Head")
    with pytest.raises(CheckpointError, match="unsupported head Unknown_Head"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))
    config = standin_module.model_config()
    config["backbone"]["spin_balanced_channels"] = [2, 4]
    with pytest.raises(CheckpointError, match=r"spin_balanced_channels: expected channels that follow .* got \[2, 4\]"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))


def test_recipes_named_in_the_tasks(tmp_path: Path) -> None:
    task = standin_module.task_config("omat", "energy")
    task["normalizer"]["rmsd"] = {"_target_": "os.system", "_args_": ["touch harm"]}
    with pytest.raises(CheckpointError, match=r"refused to run os\.system"):
        load_checkpoint(save(tmp_path / "file.pt", tasks_config=[task]))
    task = standin_module.task_config("omat", "energy")
    task["element_references"] = {
        "_target_": "fairchem.core.modules.normalization.element_references.create_element_references",
        "state_dict": {"element_references": [1.0, 2.0]},
    }
    path = save(tmp_path / "recipe.pt", tasks_config=[task])
    with pytest.raises(CheckpointError, match=r"refused to run .*create_element_references.*trust_checkpoint=True"):
        load_checkpoint(path)


def test_trusted_recipe(tmp_path: Path) -> None:
    task = standin_module.task_config("omat", "energy")
    task["element_references"] = {"_target_": f"{__name__}.Recipe"}
    path = save(tmp_path / "recipe.pt", tasks_config=[task])
    np.testing.assert_array_equal(load_checkpoint(path, trust=True).tasks["omat"].element_references, [1.0, 2.0])


class Recipe:
    """Element references as a recipe builds them."""

    element_references = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a torch checkpoint .* damaged, truncated or foreign"),
        (b"<html>Not found</html>", "expected a torch checkpoint .* damaged, truncated or foreign"),
    ],
)
def test_foreign_bytes(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_truncated(standin: Path, tmp_path: Path, kept: float) -> None:
    data = standin.read_bytes()
    path = tmp_path / "file.pt"
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(CheckpointError, match=r"damaged, truncated or foreign|cannot be read"):
        load_checkpoint(path)


def test_damaged(standin: Path, tmp_path: Path) -> None:
    data = bytearray(standin.read_bytes())
    start = data.index(b"model_config") - 200
    data[start : start + 400] = bytes(400)
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as a torch checkpoint"):
        load_checkpoint(path)


def test_other_archives(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    with pytest.raises(CheckpointError, match="cannot be read as a torch checkpoint"):
        load_checkpoint(tmp_path / "arrays.npz")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="expected an inference checkpoint of fairchem-core, got dict without"):
        load_checkpoint(tmp_path / "weights.pt")


def test_incomplete(tmp_path: Path) -> None:
    config = standin_module.model_config()
    del config["heads"]
    with pytest.raises(CheckpointError, match="incomplete checkpoint: KeyError: 'heads'"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))


def test_heads_that_are_not_supported(tmp_path: Path) -> None:
    config = standin_module.model_config()
    (head,) = config["heads"].values()
    config["heads"]["second"] = head
    with pytest.raises(CheckpointError, match="expected one head that predicts the energy"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))
    config = standin_module.model_config()
    config["heads"]["energyandforcehead"]["head_kwargs"]["reduce"] = "mean"
    with pytest.raises(CheckpointError, match="reduce='mean': expected 'sum'"):
        load_checkpoint(save(tmp_path / "file.pt", model_config=config))


def test_tasks_that_are_not_supported(tmp_path: Path) -> None:
    energy, forces = (standin_module.task_config("omat", name) for name in ("energy", "forces"))
    with pytest.raises(CheckpointError, match=r"task 'omat': expected an energy, got \['forces'\]"):
        load_checkpoint(save(tmp_path / "file.pt", tasks_config=[forces]))
    forces["normalizer"]["rmsd"] = 3.0
    with pytest.raises(CheckpointError, match=r"expected forces scaled like the energy .* got mean 0.0, rmsd 3.0"):
        load_checkpoint(save(tmp_path / "file.pt", tasks_config=[energy, forces]))
    with pytest.raises(CheckpointError, match=r"task 'oc20': expected one of the model's \['omat', 'omol'\]"):
        load_checkpoint(save(tmp_path / "file.pt", tasks_config=[energy | {"datasets": ["oc20"]}]))


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"'uma-xl' is neither a file nor a registered name.* demo, uma-s-1p2p1"
    ):
        load_checkpoint("uma-xl")
    with pytest.raises(CheckpointError, match="expected a checkpoint file, got the folder"):
        load_checkpoint(tmp_path)
    assert resolve("demo").name == "demo.pt"
