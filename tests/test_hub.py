"""Registered names: where their files come from, and what is said where they cannot be had."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from ase_fastuma import hub, load_checkpoint


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRCHEM_CACHE_DIR", str(tmp_path / "cache"))


def gated() -> GatedRepoError:
    request = httpx.Request("GET", "https://huggingface.co/facebook/UMA")
    return GatedRepoError("403 Client Error", response=httpx.Response(403, request=request))


def test_names() -> None:
    names = hub.registered_names()
    assert {"uma-s-1p2p1", "uma-m-1p1", "esen-sm-conserving-all-omol"} <= set(names)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (gated(), "facebook/UMA is gated"),
        (LocalEntryNotFoundError("no network"), "facebook/UMA could not be reached"),
        (OSError("no route to host"), r"could not be reached.*\(no route to host\)"),
    ],
)
def test_what_to_do_is_said(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def fail(**_kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(hub.DownloadError, match=reason) as caught:
        load_checkpoint("uma-s-1p2p1")
    message = str(caught.value)
    for advice in (
        "accept the licence",
        "https://huggingface.co/facebook/UMA",
        "log in",
        "path of a checkpoint",
        '"demo"',
    ):
        assert advice in message


def test_downloaded_file_is_used(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(**kwargs: object) -> str:
        asked.update(kwargs)
        return str(standin)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_checkpoint("uma-s-1p2p1").path == standin
    assert asked["repo_id"] == "facebook/UMA"
    assert asked["filename"] == "checkpoints/uma-s-1p2p1.pt"


def test_cached_file_needs_no_network(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0" * 40
    repo = tmp_path / "cache" / "models--facebook--UMA"
    folder = repo / "snapshots" / commit / "checkpoints"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (folder / "uma-s-1p2p1.pt").write_bytes(standin.read_bytes())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    assert load_checkpoint("uma-s-1p2p1").path == folder / "uma-s-1p2p1.pt"
    assert hub.cached("uma-m-1p1") is None
