"""Where the examples put their files."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path


def new_folder(chosen: Path | None, example: str) -> Path:
    """Make `chosen`, else `fastuma-<example>` in the working directory, with a number where that exists already."""
    if chosen is not None:
        if chosen.exists():
            sys.exit(f"--out: expected a folder that does not exist yet, got {chosen}")
        folder = chosen
    else:
        numbered = (Path(f"fastuma-{example}-{number}") for number in itertools.count(2))
        folder = next(path for path in itertools.chain([Path(f"fastuma-{example}")], numbered) if not path.exists())
    folder.mkdir(parents=True)
    return folder
