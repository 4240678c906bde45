"""`fastuma doctor`: devices, versions, checkpoints found, and the backend that each would get."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ase_fastuma import __version__
from ase_fastuma.checkpoint import CheckpointError, load_checkpoint
from ase_fastuma.hub import cached, registered_names
from ase_fastuma.report import device_name, table, versions
from ase_fastuma.selection import select
from ase_fastuma.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fastuma", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what this machine has and what would run on it")
    doctor.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="further checkpoint files to look at")
    options = parser.parse_args(arguments)
    print(table(dict(_facts(options.checkpoints))))
    return 0


def _facts(extra: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "versions", versions()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    for device in devices:
        yield "device", device_name(device)
    for name, checkpoint in _found(extra):
        yield name, _verdict(checkpoint, devices[0])


def _found(extra: Sequence[str]) -> Iterator[tuple[str, str | Path]]:
    """The bundled potential, registered models that have been downloaded, and files named by the user."""
    yield "demo", "demo"
    for name in registered_names():
        path = cached(name)
        if path is not None:
            yield name, path
    for name in extra:
        yield name, name


def _verdict(name_or_path: str | Path, device: torch.device) -> str:
    try:
        checkpoint = load_checkpoint(name_or_path)
    except (CheckpointError, FileNotFoundError) as error:
        return f"unusable: {error}"
    selection = select(checkpoint.architecture, device, Settings())
    return f"{selection.name} ({'; '.join(selection.reasons)}); tasks {', '.join(checkpoint.tasks)}; {checkpoint.path}"


if __name__ == "__main__":
    sys.exit(main())
