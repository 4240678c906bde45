"""Registered models: their names, and their files from the Hugging Face hub or its local cache."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HELP = (
    'Three ways on: (1) accept the licence at https://huggingface.co/{repo} and log in with "hf auth login"; '
    '(2) give the path of a checkpoint file that you have; (3) use model="demo", the potential in this package.'
)


class DownloadError(OSError):
    """A registered model whose file could not be had, with what to do about it."""


@cache
def _registry() -> dict[str, dict[str, Any]]:
    """fairchem-core's table of models, read from its file: importing it would load its training stack."""
    spec = find_spec("fairchem")
    for folder in spec.submodule_search_locations or () if spec else ():
        table = Path(folder) / "core" / "calculate" / "pretrained_models.json"
        if table.is_file():
            return json.loads(table.read_text())
    raise ImportError("fairchem-core: expected it to be installed with its table of models, found none")


def registered_names() -> tuple[str, ...]:
    """Names of the UMA and eSEN models that fairchem-core knows."""
    return tuple(name for name in _registry() if name.startswith(("uma-", "esen-")))


def cached(name: str) -> Path | None:
    """The file of a registered model where it has been downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(cache_dir=_cache_dir(), **_address(name))
    return Path(found) if isinstance(found, str) else None


def download(name: str) -> Path:
    """The file of a registered model, downloaded on first use. Raises DownloadError saying what to do."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    address = _address(name)
    repo = address["repo_id"]
    found = cached(name)
    if found is not None:
        return found
    try:
        return Path(hf_hub_download(cache_dir=_cache_dir(), **address))
    except (GatedRepoError, RepositoryNotFoundError) as error:
        reason = f"{repo} is gated, and this machine is not logged in with an account that was granted access"
        raise DownloadError(f"model {name!r}: {reason}. {HELP.format(repo=repo)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = f"{repo} could not be reached, and the file is not in the cache"
        raise DownloadError(f"model {name!r}: {reason} ({error}). {HELP.format(repo=repo)}") from error


def _cache_dir() -> Path:
    """Where fairchem-core keeps its downloads, so that both share them."""
    import os

    return Path(os.environ.get("FAIRCHEM_CACHE_DIR", Path.home() / ".cache" / "fairchem"))


def _address(name: str) -> dict[str, Any]:
    entry = _registry()[name]
    filename = f"{entry['subfolder']}/{entry['filename']}" if entry.get("subfolder") else entry["filename"]
    return {"repo_id": entry["repo_id"], "filename": filename, "revision": entry.get("revision") or "main"}
