"""Cases from the field about a process that evaluates a structure and does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fresh_process(standin: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh process prints and changes in its own global state while it evaluates a structure."""
    folder = tmp_path_factory.mktemp("fresh")
    script = Path(__file__).with_name("fresh_process.py")
    command = [sys.executable, str(script), str(standin), str(folder / "changed.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    changed = json.loads((folder / "changed.json").read_text())
    return {"stdout": done.stdout, "stderr": done.stderr, "changed": changed}


def test_C11_fresh_process_is_left_as_it_was(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["changed"] == {}


def test_G17_silent_by_default(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["stdout"] == ""
    assert fresh_process["stderr"] == ""
    assert fresh_process["changed"].get("root logger") is None
