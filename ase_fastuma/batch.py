"""Many structures in one call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Literal

from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from tqdm import tqdm

from ase_fastuma.calculator import FastUMACalculator, why_not
from ase_fastuma.evaluation import Request, Results, evaluate_packed

PROPERTIES = ("energy", "free_energy", "energies", "forces", "stress")

# Structures that are drawn and prepared at a time: most of the work on one is NumPy's for each call.
_BLOCK = 128
# Stands for what one of two iterables has too few of.
_MISSING = object()
# A progress bar appears where a list takes longer than this (seconds).
_PATIENCE = 2.0


class EvaluationError(ExceptionGroup[Exception]):
    """Some structures could not be evaluated; the others were.

    | attribute | meaning |
    |---|---|
    | results | one entry for each structure, in order; None where it failed |
    | errors | the exception of each structure that failed, by its index |
    """

    results: list[Results | None]
    errors: dict[int, Exception]

    def __new__(cls, outcomes: list[Results | Exception]) -> EvaluationError:
        errors = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
        shown = "; ".join(f"{i}: {error}" for i, error in list(errors.items())[:3])
        more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
        message = f"{len(errors)} of {len(outcomes)} structures could not be evaluated, by index {shown}{more}"
        self = super().__new__(cls, message, list(errors.values()))
        self.results = [None if isinstance(outcome, Exception) else outcome for outcome in outcomes]
        self.errors = errors
        return self

    def derive(self, exceptions: list[Exception]) -> ExceptionGroup[Exception]:  # type: ignore[override]
        """A part of the group, as `split` makes it: without results."""
        return ExceptionGroup(self.message, exceptions)


def evaluate(
    structures: Iterable[Atoms],
    calculator: FastUMACalculator | str | Path,
    *,
    properties: Iterable[str] = ("energy", "forces"),
    tasks: Iterable[str | None] | None = None,
    errors: Literal["raise", "return"] = "raise",
    progress: bool | None = None,
) -> list[Results]:
    """Evaluate structures that may differ in everything: size, elements, cell, periodicity, charge, spin and task.

    They are packed into passes that fit the memory of the device; the order stays. `structures` may be any iterable, is
    drawn from as needed (128 at a time), and nothing in it changes; a generator may yield the same object again after
    moving its atoms. Task, charge and spin of each come from where a calculator takes them.

    | argument | meaning |
    |---|---|
    | calculator | a calculator, or the model of one: a registered name, a checkpoint file, or "demo" |
    | properties | of "energy", "free_energy", "energies", "forces" and "stress" |
    | tasks | the task of each structure; None, also as an entry: as the calculator chooses |
    | errors | "raise": an EvaluationError at the end, with all results; "return": exceptions in their results' places |
    | progress | a bar on stderr; None: on a terminal, where the list takes more than a moment |

    Returns a dictionary for each structure, as `calc.results` has it: energies as floats in eV, and float64 arrays
    "energies" [N] (eV), "forces" [N, 3] (eV/A), "stress" [6] (eV/A^3, Voigt order). `SinglePointCalculator(atoms,
    **result)` takes it. What is wanted and no more is computed; "energy" brings "free_energy". "stress" is missing
    where a structure has none: nothing is periodic, or the cell has no volume.

    Raises TypeError and ValueError for arguments that cannot hold, and what constructing a calculator raises. A
    structure fails with ValueError or TypeError where it cannot be meant, PropertyNotImplementedError where its task
    lacks a property, FloatingPointError where the model's output is not finite, MemoryError where it is too large.
    """
    wanted = _wanted(properties)
    if errors not in ("raise", "return"):
        raise ValueError(f"errors: expected 'raise' or 'return', got {errors!r}")
    if isinstance(structures, Atoms) or not (hasattr(structures, "__iter__") or hasattr(structures, "__getitem__")):
        got = "a single one" if isinstance(structures, Atoms) else type(structures).__name__
        raise TypeError(f"structures: expected an iterable of structures, got {got}")
    calc = calculator if isinstance(calculator, FastUMACalculator) else FastUMACalculator(calculator)
    if tasks is not None:
        tasks = list(tasks)
        if isinstance(structures, Sized) and len(tasks) != len(structures):
            raise ValueError(f"tasks: expected one for each of {len(structures)} structures, got {len(tasks)}")
    total = len(structures) if isinstance(structures, Sized) else None
    drawn = structures if isinstance(structures, Sequence) else map(_as_it_is, structures)
    outcomes = evaluate_packed(calc._start().backend, requests(calc, drawn, tasks, wanted))
    results = list(progress_bar(outcomes, total, progress))
    if errors == "raise" and any(isinstance(result, Exception) for result in results):
        raise EvaluationError(results)
    return results


def progress_bar(outcomes: Iterable[Results | Exception], total: int | None, progress: bool | None) -> Iterable[Any]:
    """The outcomes of structures, with a bar; see `evaluate` for `progress`."""
    hidden = None if progress is None else not progress  # None: tqdm looks whether stderr is a terminal
    patience = _PATIENCE if progress is None else 0.0
    return tqdm(outcomes, total=total, unit="structure", disable=hidden, delay=patience)


def _as_it_is(atoms: Atoms) -> Atoms:
    """A copy, which stays when a generator changes the structure for its next one."""
    return atoms.copy() if isinstance(atoms, Atoms) else atoms


def _wanted(properties: Iterable[str]) -> frozenset[str]:
    """Names as backends know them."""
    if isinstance(properties, str):
        raise TypeError(f"properties: expected a sequence of names, got the string {properties!r}")
    properties = list(properties)
    unknown = [name for name in properties if name not in PROPERTIES]
    if unknown or not properties:
        raise ValueError(f"properties: expected some of {list(PROPERTIES)}, got {properties}")
    return frozenset("energy" if name == "free_energy" else name for name in properties)


def requests(
    calc: FastUMACalculator, structures: Iterable[Atoms], tasks: Iterable[str | None] | None, wanted: frozenset[str]
) -> Iterator[Request | Exception]:
    """A request for each structure, or the exception that says why there is none."""
    paired: Iterator[tuple[Any, Any]]
    if tasks is None:
        paired = zip(structures, itertools.repeat(None))
    else:
        paired = itertools.zip_longest(structures, tasks, fillvalue=_MISSING)
    while block := list(itertools.islice(paired, _BLOCK)):
        if any(atoms is _MISSING for atoms, _ in block):
            raise ValueError("tasks: expected one for each structure, got more")
        yield from _of_block(calc, block, wanted)


def _of_block(
    calc: FastUMACalculator, block: list[tuple[Atoms, str | None]], wanted: frozenset[str]
) -> Iterator[Request | Exception]:
    """What `requests` yields, for structures that are prepared together."""
    states = [_state(calc, atoms, task) for atoms, task in block]
    sound = [i for i, state in enumerate(states) if not isinstance(state, Exception)]
    found = iter(calc._requests([block[i][0] for i in sound], [states[i] for i in sound]))
    for state in states:
        outcome = state if isinstance(state, Exception) else next(found)
        yield outcome if isinstance(outcome, Exception) else _limited(calc, outcome, wanted)


def _state(calc: FastUMACalculator, atoms: Atoms, task: str | None) -> Any:
    """Task, charge and spin, or an exception."""
    try:
        if not isinstance(atoms, Atoms):
            raise TypeError(f"structures: expected ase.Atoms, got {atoms!r}")
        if task is _MISSING:
            raise ValueError("tasks: expected one for each structure, got none for this one")
        return calc._state(atoms, task)
    except (ValueError, TypeError) as error:
        return error.with_traceback(None)


def _limited(calc: FastUMACalculator, request: Request, wanted: frozenset[str]) -> Request | Exception:
    """The request for what is wanted and no more."""
    lacking = wanted - request.properties
    if not request.volume:
        lacking -= {"stress"}
    if lacking:
        return PropertyNotImplementedError(why_not(min(lacking), request.system.task, calc.checkpoint))
    return dataclasses.replace(request, properties=wanted & request.properties)
