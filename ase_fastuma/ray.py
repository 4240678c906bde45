"""Datasets of structures on many workers, through Ray Data: extended XYZ files and ASE databases in and out.

Needs the extra "ray". Each worker is an actor with a calculator of its own: a checkpoint is loaded once for each, and
the process that hands out the work loads neither it nor torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
import ray.data
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.db import connect
from ase.filters import FrechetCellFilter
from ase.io import Trajectory, iread, write
from ase.io.extxyz import XYZError
from ase.optimize import LBFGS
from tqdm import tqdm

import ase_fastuma
from ase_fastuma.settings import Settings

if TYPE_CHECKING:
    from ase_fastuma import FastUMACalculator

ERROR = "fastuma_error"
"""Key of `atoms.info` that says why a structure has no results."""
CONVERGED = "fastuma_converged"
"""Key of `atoms.info` that says whether a relaxation reached its goal."""

# Tasks that Ray keeps track of at most; what a lost task had written is not done again.
_MOST_TASKS = 1000


@dataclass(frozen=True)
class Relaxation:
    """Relax each structure before its results are taken, with LBFGS, until no force exceeds `fmax` (eV/A).

    `cell` relaxes the cell as well where all axes are periodic. Structures are relaxed one at a time.
    """

    fmax: float = 0.05
    steps: int = 500
    cell: bool = False


def evaluate_dataset(
    source: str | Path,
    destination: str | Path,
    model: str | Path,
    *,
    properties: Iterable[str] = ("energy", "forces"),
    relaxation: Relaxation | None = None,
    workers: int | None = None,
    block_size: int = 256,
    progress: bool | None = None,
    **settings: Any,
) -> dict[int, str]:
    """Evaluate, or relax, all structures of a file on the workers of a Ray cluster, and write them with their results.

    | argument | meaning |
    |---|---|
    | source | extended XYZ (.xyz, .extxyz) or an ASE database (.db); its structures may differ as in `evaluate` |
    | destination | a new file, of either kind; structures stay in order |
    | properties | what is written of each structure, as in `evaluate` |
    | relaxation | relax first; written are the relaxed structures |
    | workers | at most and by default one for each GPU of the cluster, or for each CPU where it has none |
    | block_size | structures between two writes of a worker, and what at most is done again where one is lost |
    | progress | a bar on stderr; None: on a terminal |
    | settings | of the calculator, e.g. precision or task; all files must be in reach of all workers |

    Finished blocks are written to the folder "<destination>.parts" as they come. A worker that dies is replaced, and
    its block done again; a run that was stopped goes on from there when it is called again. When all are done, the
    parts become the destination, and the folder goes. Structures of a database have their key-value pairs and data in
    `atoms.info`, which a database as the destination keeps as data.

    Returns why structures failed, by index; they are written without results, with the reason in `atoms.info[ERROR]`.

    Raises FileExistsError where the destination exists, ValueError where the parts are of a run with other arguments or
    an argument cannot hold, and what constructing a calculator raises.
    """
    source, destination = Path(source).resolve(), Path(destination).resolve()
    structures = _open(source)
    if destination.exists():
        raise FileExistsError(f"destination: expected a new file, got {destination}")
    _check_kind("destination", destination)
    if block_size < 1 or (workers is not None and workers < 1):
        raise ValueError(f"block_size and workers: expected at least 1, got {block_size} and {workers}")
    if settings.get("device") not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu', 'cuda' or None, got {settings['device']!r}; Ray hands out the GPUs")
    model = str(Path(model).resolve()) if Path(model).is_file() else str(model)
    job = _Job(str(source), Settings(model=model, **settings), tuple(properties), relaxation)
    parts = destination.with_name(destination.name + ".parts")
    blocks = list(structures.blocks(block_size))
    if not blocks:
        raise ValueError(f"source: expected structures, got none in {source}")
    _claim(parts, job, block_size)
    missing = [block for block in blocks if not _part(parts, block).exists()]
    hidden = None if progress is None else not progress
    finished = blocks[-1].stop - sum(block.stop - block.start for block in missing)
    with tqdm(total=blocks[-1].stop, initial=finished, unit="structure", disable=hidden) as bar:
        for done in _map(missing, parts, job, workers):
            bar.update(done)
    failed = _join((_part(parts, block) for block in blocks), destination)
    shutil.rmtree(parts)
    return failed


# ---------------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True)
class _Job:
    """What is done to each structure."""

    source: str
    settings: Settings
    properties: tuple[str, ...]
    relaxation: Relaxation | None


@dataclass(frozen=True)
class _Block:
    """Structures `start` to `stop` of a source; `first` and `last` say where they are, in bytes or row numbers."""

    start: int
    stop: int
    first: int
    last: int


def _map(blocks: list[_Block], parts: Path, job: _Job, workers: int | None) -> Iterator[int]:
    """Have all blocks done by a pool of actors; the number of structures of each as it is finished."""
    if not blocks:
        return
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    on_gpus = job.settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1
    most = int(ray.cluster_resources()["GPU" if on_gpus else "CPU"])
    rows = [asdict(block) for block in blocks]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(blocks), _MOST_TASKS))
    dataset.context.enable_progress_bars = False  # there is one of ours, in structures
    done = dataset.map_batches(
        _Worker,
        fn_constructor_args=(job, parts),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers or most, most, len(blocks))),
        num_gpus=1 if on_gpus else None,
        num_cpus=None if on_gpus else 1,
    )
    for row in done.iter_rows():
        yield int(row["structures"])


class _Worker:
    """An actor: a calculator, and the blocks that Ray hands it."""

    def __init__(self, job: _Job, parts: Path) -> None:
        self._job, self._parts = job, parts
        self._source = _open(Path(job.source))
        self._calc = ase_fastuma.FastUMACalculator(**asdict(job.settings))

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        block = _Block(**{name: int(values[0]) for name, values in rows.items()})
        part = _part(self._parts, block)
        if not part.exists():  # else a worker died between writing it and saying so
            # A part appears under its name whole or not at all.
            unfinished = part.with_name(f".{part.name}.{os.getpid()}")
            with Trajectory(unfinished, "w") as trajectory:
                for atoms in self._done(self._source.read(block)):
                    trajectory.write(atoms)
            os.replace(unfinished, part)
        return {"structures": np.array([block.stop - block.start])}

    def _done(self, structures: list[Atoms]) -> Iterator[Atoms]:
        """The structures with their results, or with the reason why they have none."""
        relaxation = self._job.relaxation
        errors = [relax(atoms, self._calc, relaxation) if relaxation else None for atoms in structures]
        results = ase_fastuma.evaluate(
            structures, self._calc, properties=self._job.properties, errors="return", progress=False
        )
        for atoms, error, result in zip(structures, errors, results, strict=True):
            failure = error or (result if isinstance(result, Exception) else None)
            if failure is None:
                atoms.calc = SinglePointCalculator(atoms, **result)
            else:
                atoms.calc = None
                atoms.info[ERROR] = f"{type(failure).__name__}: {failure}"
            yield atoms


def relax(atoms: Atoms, calc: FastUMACalculator, relaxation: Relaxation) -> Exception | None:
    """Relax a structure in place; an error in it is returned, not raised."""
    atoms.calc = calc
    target: Any = FrechetCellFilter(atoms) if relaxation.cell and atoms.pbc.all() else atoms
    try:
        converged = LBFGS(target, logfile=os.devnull).run(fmax=relaxation.fmax, steps=relaxation.steps)
    except (ValueError, TypeError, NotImplementedError, FloatingPointError, MemoryError) as error:
        return error.with_traceback(None)
    atoms.info[CONVERGED] = bool(converged)
    return None


# ------------------------------------------------------------------------------------------------------------ files


class _Source(Protocol):
    """A file of structures."""

    def blocks(self, size: int) -> Iterator[_Block]:
        """All structures, in blocks of at most `size`, found without reading them."""
        ...

    def read(self, block: _Block) -> list[Atoms]:
        """The structures of a block."""
        ...


class _ExtendedXYZ:
    """A file of frames; blocks are ranges of bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def blocks(self, size: int) -> Iterator[_Block]:
        index = start = first = 0
        with self._path.open("rb") as file:
            while line := file.readline():
                if not line.strip() and not file.read().strip():
                    break  # blank lines end many files
                try:
                    atoms = int(line)
                except ValueError as error:
                    raise ValueError(f"{self._path}: expected a number of atoms, got {line!r}") from error
                for _ in range(atoms + 1):
                    line = file.readline()
                if not line:
                    raise ValueError(f"{self._path}: expected {atoms} atoms of structure {index}, got fewer")
                index += 1
                if index - start == size:
                    yield _Block(start, index, first, file.tell())
                    start, first = index, file.tell()
            if index > start:
                yield _Block(start, index, first, file.tell())

    def read(self, block: _Block) -> list[Atoms]:
        with self._path.open("rb") as file:
            file.seek(block.first)
            text = file.read(block.last - block.first)
        try:
            return list(iread(StringIO(text.decode()), ":", format="extxyz"))
        except (ValueError, LookupError, XYZError) as error:
            raise ValueError(f"{self._path}: structures {block.start} to {block.stop - 1}: {error}") from error


class _Database:
    """Rows of an ASE database; blocks are ranges of row numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def blocks(self, size: int) -> Iterator[_Block]:
        with connect(self._path) as database:
            ids = [row.id for row in database.select(include_data=False, sort="id")]
        for start in range(0, len(ids), size):
            chosen = ids[start : start + size]
            yield _Block(start, start + len(chosen), chosen[0], chosen[-1])

    def read(self, block: _Block) -> list[Atoms]:
        structures = []
        with connect(self._path) as database:
            for row in database.select(f"id>={block.first},id<={block.last}", sort="id"):
                atoms = row.toatoms()
                atoms.info |= row.key_value_pairs | row.data
                structures.append(atoms)
        return structures


_KINDS: dict[str, Callable[[Path], _Source]] = {".xyz": _ExtendedXYZ, ".extxyz": _ExtendedXYZ, ".db": _Database}


def _check_kind(name: str, path: Path) -> None:
    if path.suffix not in _KINDS:
        raise ValueError(f"{name}: expected a file of one of the kinds {list(_KINDS)}, got {path}")


def _open(path: Path) -> _Source:
    _check_kind("source", path)
    if not path.is_file():
        raise FileNotFoundError(f"source: expected a file, got {path}")
    return _KINDS[path.suffix](path)


def _claim(parts: Path, job: _Job, block_size: int) -> None:
    """Make the folder for the parts, or see that those in it are of the same job."""
    files = {"source": Path(job.source)}
    if Path(job.settings.model).is_file():
        files["model"] = Path(job.settings.model)
    states = {f"{name} file": [file.stat().st_size, file.stat().st_mtime_ns] for name, file in files.items()}
    plan = asdict(job) | {"block_size": block_size} | states
    plan = json.loads(json.dumps(plan | {"version": ase_fastuma.__version__}))
    parts.mkdir(parents=True, exist_ok=True)
    record = parts / "plan.json"
    if not record.exists():
        record.write_text(json.dumps(plan, indent=1))
    elif (kept := json.loads(record.read_text())) != plan:
        changed = [name for name in plan if plan[name] != kept.get(name)]
        raise ValueError(
            f"destination: {parts} has parts of a run with another {', '.join(changed)}; "
            "go on with the same arguments, or remove that folder"
        )


def _part(parts: Path, block: _Block) -> Path:
    return parts / f"{block.start:010d}.traj"


def _join(parts: Iterable[Path], destination: Path) -> dict[int, str]:
    """Write the parts as one file, which appears whole or not at all; the errors among them, by index."""
    unfinished = destination.with_name(f".unfinished-{destination.name}")
    unfinished.unlink(missing_ok=True)
    failed: dict[int, str] = {}
    index = 0
    for part in parts:
        with Trajectory(part) as trajectory:
            structures = list(trajectory)
        for atoms in structures:
            if ERROR in atoms.info:
                failed[index] = atoms.info[ERROR]
            index += 1
        if destination.suffix == ".db":
            with connect(unfinished, type="db") as database:
                for atoms in structures:
                    database.write(atoms, data=atoms.info)
        else:
            write(unfinished, structures, format="extxyz", append=True)
    os.replace(unfinished, destination)
    return failed
