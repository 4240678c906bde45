"""ASE in, ASE out: properties, caching, errors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes

from ase_fastuma import __version__
from ase_fastuma.backend import ALONE, Backend, open_backend
from ase_fastuma.checkpoint import Checkpoint, load_checkpoint
from ase_fastuma.evaluation import Request, Results, evaluate_one, evaluate_packed, evaluate_products
from ase_fastuma.hessian import analytic_hessian, chosen_atoms
from ase_fastuma.report import report
from ase_fastuma.selection import Selection, select, unsupported_by_fused
from ase_fastuma.settings import BackendChoice, Precision, Settings, integral
from ase_fastuma.system import System, spanned_volume, systems_of

logger = logging.getLogger(__name__)

# Structures whose results are kept, so that images of a path that share a calculator are not evaluated anew each time
# that an optimiser comes back to them: at most so many, and at most so many atoms in all.
_KEPT_STRUCTURES, _KEPT_ATOMS = 64, 100_000


class _Running(NamedTuple):
    """What a calculator runs once its checkpoint is loaded; shared with copies of the calculator."""

    checkpoint: Checkpoint
    settings: Settings  # with the device named in full
    device: torch.device
    selection: Selection
    backend: Backend


# What a conservative model offers of a periodic structure.
_CONSERVATIVE = frozenset({"energy", "energies", "forces", "stress"})


class FastUMACalculator(Calculator):
    """Energies, forces and stress of UMA and eSEN models for ASE.

    Units are ASE's: eV, eV/A, eV/A^3, tension positive. Energy, forces and (where something is periodic) stress of a
    structure come from one evaluation and are kept until the structure, the charge or the spin changes. `energies` are
    the atoms' shares of the energy. Arrays are float64 and belong to the caller. "hessian" [3 N, 3 N] (eV/A^2) is
    computed where it is asked for by name; `get_hessian` has more to offer.
    """

    # As in ASE, hence the mutable class attributes:
    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "hessian"]  # noqa: RUF012
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012 - the model reads neither

    def __init__(
        self,
        model: str | Path = "uma-s-1p2p1",
        *,
        task: str | None = None,
        charge: int | None = None,
        spin: int | None = None,
        device: str | torch.device | None = None,
        backend: BackendChoice = "auto",
        precision: Precision = "accurate",
        merge_mole: bool = True,
        activation_checkpointing: bool = False,
        trust_checkpoint: bool = False,
    ) -> None:
        """See `Settings` for the arguments; `model` may be a path and `device` a torch.device.

        Raises ValueError and TypeError for arguments that cannot hold, FileNotFoundError for a model that is neither a
        registered name nor a file, CheckpointError for a file that cannot be used, DownloadError where weights cannot
        be downloaded.
        """
        super().__init__()
        self._companions: list[weakref.ref[Atoms]] = []
        self._configure(
            Settings(
                model=str(model),
                task=task,
                charge=charge,
                spin=spin,
                device=None if device is None else str(device),
                backend=backend,
                precision=precision,
                merge_mole=merge_mole,
                activation_checkpointing=activation_checkpointing,
                trust_checkpoint=trust_checkpoint,
            )
        )
        self._start()

    # ------------------------------------------------------------------------------------------------ what runs

    @property
    def settings(self) -> Settings:
        """The user's choices. `parameters` has what came of them."""
        return self._settings

    @property
    def backend(self) -> Selection:
        """The backend that runs (`name`) and why (`reasons`)."""
        return self._start().selection

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint in use."""
        return self._start().checkpoint

    def report(self) -> str:
        """What runs and why, with versions: for print, log files and bug reports."""
        running = self._start()
        return report(running.checkpoint, running.selection, running.backend, self.parameters)

    def set(self, **kwargs: Any) -> dict[str, Any]:
        """Change settings, e.g. `calc.set(charge=1)`; drops what was computed. Returns what changed.

        Raises what construction raises; the settings are then as before.
        """
        if not kwargs:
            return {}
        before, settings = self._settings, dataclasses.replace(self._settings, **kwargs)
        changed = {
            name: value for name, value in kwargs.items() if getattr(self._settings, name) != getattr(settings, name)
        }
        if changed:
            self._configure(settings)
            try:
                self._start()
            except BaseException:
                self._configure(before)
                raise
        return changed

    def _configure(self, settings: Settings) -> None:
        """Take over settings without loading anything."""
        self._settings = settings
        self.reset()
        self._running: _Running | None = None
        self._said: set[str] = set()
        chosen = dataclasses.asdict(settings)
        del chosen["trust_checkpoint"]
        self.parameters = chosen | {"version": __version__}

    def _start(self) -> _Running:
        """Load the checkpoint and choose the backend, once."""
        if self._running is None:
            device = _device(self._settings.device)
            settings = dataclasses.replace(self._settings, device=str(device))
            with ALONE:
                checkpoint = load_checkpoint(settings.model, settings.trust_checkpoint)
            _check_task(settings.task, checkpoint)
            selection = select(checkpoint.architecture, device, settings)
            if selection.name == "general" and settings.backend == "auto":
                # Expected on a CPU; elsewhere the user would wonder why it is slow.
                surprising = device.type == "cuda" or unsupported_by_fused(checkpoint.architecture)
                self._say(f"running in general mode: {'; '.join(selection.reasons)}", warn=bool(surprising))
            with ALONE:
                backend = open_backend(selection.name, checkpoint, settings)
            self._running = _Running(checkpoint, settings, device, selection, backend)
            precision = getattr(backend, "precision", settings.precision)
            self.parameters |= {"device": settings.device, "backend": selection.name, "precision": precision}
        return self._running

    def _say(self, message: str, warn: bool = False) -> None:
        """Tell once: as a warning where the user should act, else in the log."""
        if message not in self._said:
            self._said.add(message)
            if warn:
                warnings.warn(message, UserWarning, stacklevel=2)
            else:
                logger.info(message)

    # ------------------------------------------------------------------------------------------------ ASE's interface

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What changed since the last evaluation, to the bit whatever `tol`. Of `atoms.info`, charge and spin count."""
        if self.atoms is None:
            return list(all_changes)
        state = self._state(atoms)
        if next(reversed(self._recent), None) == _key(atoms, state):  # the last one evaluated
            return []
        _, *now = state
        states = zip(("charge", "spin"), now, strict=True)
        return _changes(self.atoms, atoms) + [name for name, value in states if self.parameters[name] != value]

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """See ASE. After an error nothing is kept, so that no old result is taken for a new one."""
        try:
            return super().get_property(name, atoms, allow_calculation)
        except PropertyNotImplementedError:
            raise
        except BaseException:
            self.reset()
            raise

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Evaluate a structure, for all properties that it has."""
        atoms = self._structure(atoms)
        running = self._start()
        state = self._state(atoms)
        request = self._request(atoms, *state)
        for name in properties:
            if name not in request.properties | {"free_energy", "hessian"}:
                raise PropertyNotImplementedError(why_not(name, request.system.task, running.checkpoint))

        self.atoms, self.results = None, {}
        key = _key(atoms, state)
        results = self._recent.pop(key, None)
        if results is None:
            results = self._evaluate(running.backend, key, request)
        self._keep(key, results)
        task, charge, spin = state
        info = {"charge": charge, "spin": spin}  # for who asks about the last structure: `atoms=None`
        self.atoms = Atoms(numbers=atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc, info=info)
        self.parameters |= {"task": task} | info
        self.results = {name: copy.copy(value) for name, value in results.items()}
        if "hessian" in properties:
            self.results["hessian"] = self.get_hessian(atoms)

    def share(self, structures: Iterable[Atoms]) -> None:
        """Attach to structures that move together, such as the images of a path, and evaluate them together.

        When one of them is asked for something, those that have changed are evaluated in the same pass: all images of a
        step of `NEB(images, allow_shared_calculator=True)` in one. Structures from an earlier call stay attached, but
        are no longer evaluated with others. Copies of the calculator share nothing.
        """
        structures = list(structures)
        for atoms in structures:
            atoms.calc = self
        self._companions = [weakref.ref(atoms) for atoms in structures]

    def _evaluate(self, backend: Backend, key: tuple, request: Request) -> Results:
        """The results of a structure; those of companions that have changed are kept for when they are asked for."""
        others: dict[tuple, Request] = {}
        for atoms in filter(None, (companion() for companion in self._companions)):
            # What is wrong with a companion is for those who ask for it.
            with contextlib.suppress(ValueError, TypeError):
                state = self._state(atoms)
                other = _key(atoms, state)
                if other != key and other not in self._recent:
                    others[other] = self._request(atoms, *state)
        if not others:
            return evaluate_one(backend, request)
        outcome, *rest = evaluate_packed(backend, [request, *others.values()])
        for other, results in zip(others, rest, strict=True):
            if not isinstance(results, Exception):
                self._keep(other, results)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def reset(self) -> None:
        """Forget all results."""
        super().reset()
        self._recent: OrderedDict[tuple, Results] = OrderedDict()

    def _keep(self, key: tuple, results: Results) -> None:
        """Keep the results of a structure; the oldest make room."""
        self._recent[key] = results
        allowed = min(_KEPT_STRUCTURES, max(1, _KEPT_ATOMS // len(results["energies"])))
        allowed = max(allowed, len(self._companions) + 1)
        while len(self._recent) > allowed:
            self._recent.popitem(last=False)

    def get_hessian(
        self,
        atoms: Atoms | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        method: Literal["analytic", "finite-difference"] = "analytic",
        *,
        step: float | None = None,
        file: str | Path | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Second derivatives of the energy with respect to positions: float64 [3 n, 3 n] in eV/A^2, symmetric.

        Exact derivatives ("analytic"), or differences of the forces of displaced structures ("finite-difference"):
        those need no more memory than forces do. Nothing is kept: energies and forces cost the same before and after.

        | argument | meaning |
        |---|---|
        | atoms | the structure; None: the last one evaluated |
        | indices | the atoms whose block is wanted, n of N, in this order; None: all |
        | step | displacement of finite differences in A (0.01) |
        | file | .npz file that keeps the rows of finite differences: a run that was stopped goes on from it |
        | progress | a bar on stderr for finite differences; None: on a terminal, where they take more than a moment |

        Raises ValueError and TypeError for arguments that cannot hold, PropertyNotImplementedError for "analytic" with
        a model that predicts forces instead of differentiating, and what an evaluation raises.
        """
        atoms = self._structure(atoms)
        chosen = chosen_atoms(indices, len(atoms))
        if method == "finite-difference":
            from ase_fastuma.finite_differences import STEP, finite_difference_hessian

            return finite_difference_hessian(self, atoms, chosen, STEP if step is None else step, file, progress)
        if method != "analytic":
            raise ValueError(f"method: expected 'analytic' or 'finite-difference', got {method!r}")
        for name, value in (("step", step), ("file", file), ("progress", progress)):
            if value is not None:
                raise ValueError(f"{name}: expected with method='finite-difference' alone, got {value!r}")
        return analytic_hessian(
            self._twice_differentiable(atoms), self._request(atoms, *self._state(atoms)).system, chosen
        )

    def hessian_vector_product(self, atoms: Atoms | None, vectors: np.ndarray) -> np.ndarray:
        """Products of the Hessian (eV/A^2) with k vectors: float64 [k, N, 3] for [k, N, 3], exact.

        All vectors share one evaluation, so the matrix itself is never needed: for Lanczos and dimer methods. Raises
        ValueError and TypeError for vectors of another shape or that are not finite numbers, and what `get_hessian`
        raises.
        """
        atoms = self._structure(atoms)
        try:
            vectors = np.array(vectors, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"vectors: expected numbers, got {vectors!r}") from error
        if vectors.ndim != 3 or vectors.shape[1:] != (len(atoms), 3):
            raise ValueError(f"vectors: expected shape [k, {len(atoms)}, 3], got {list(vectors.shape)}")
        if not np.isfinite(vectors).all():
            raise ValueError("vectors: expected finite numbers, got NaN or infinity")
        system = self._request(atoms, *self._state(atoms)).system
        return evaluate_products(self._twice_differentiable(atoms), system, vectors)

    def _structure(self, atoms: Atoms | None) -> Atoms:
        """The structure asked about: the last one evaluated for None."""
        atoms = self.atoms if atoms is None else atoms
        if atoms is None:
            raise ValueError("atoms: expected a structure, got None before any evaluation")
        return atoms

    def _twice_differentiable(self, atoms: Atoms) -> Backend:
        """The backend, if its model has an energy to differentiate."""
        running = self._start()
        if running.checkpoint.architecture.direct_forces:
            raise PropertyNotImplementedError(why_not("hessian", self._state(atoms)[0], running.checkpoint))
        return running.backend

    def todict(self, skip_default: bool = True) -> dict[str, Any]:
        """The settings in force, as trajectories and databases record them."""
        return dict(self.parameters)

    def _get_name(self) -> str:
        return "fastuma"

    # ------------------------------------------------------------------------------------------------ atoms to system

    def _state(self, atoms: Atoms, task: str | None = None) -> tuple[str, int, int]:
        """Task, charge and spin of a structure: from the arguments, else `atoms.info`, else the task's defaults."""
        checkpoint = self._start().checkpoint
        _check_task(task, checkpoint)
        task = task or self._settings.task or self._guess_task(atoms, checkpoint)
        molecular = checkpoint.architecture.dataset_mapping.get(task, task) == "omol"
        values = []
        for name, default in (("charge", 0), ("spin", 1 if molecular else 0)):
            value = getattr(self._settings, name)
            if value is None:
                value = atoms.info.get(name)
            values.append(default if value is None else integral(name, value))
        charge, spin = values
        if not molecular and (charge, spin) != (0, 0):
            self._say(
                f"charge = {charge} and spin = {spin} are used for task {task!r}, which knows neither; "
                "remove them from atoms.info, or pass charge=0, spin=0",
                warn=True,
            )
        return task, charge, spin

    def _guess_task(self, atoms: Atoms, checkpoint: Checkpoint) -> str:
        if len(checkpoint.tasks) == 1:
            return next(iter(checkpoint.tasks))
        task = "omat" if atoms.pbc.any() else "omol"
        if task not in checkpoint.tasks:
            raise ValueError(
                f"task: expected one of {sorted(checkpoint.tasks)}, got None for a structure that suggests {task!r}"
            )
        self._say(f"task {task!r}, since {'something' if atoms.pbc.any() else 'nothing'} is periodic")
        return task

    def _request(self, atoms: Atoms, task: str, charge: int, spin: int) -> Request:
        """A structure with all properties that it has; see `System.from_atoms` for what is refused."""
        (request,) = self._requests([atoms], [(task, charge, spin)])
        if isinstance(request, ValueError):
            raise request
        return request

    def _requests(
        self, structures: Sequence[Atoms], states: Sequence[tuple[str, int, int]]
    ) -> list[Request | ValueError]:
        """Requests for structures in states of their own, or the errors that say why there is none."""
        architecture = self._start().checkpoint.architecture
        systems = systems_of(structures, states, architecture.cutoff)
        return [
            system if isinstance(system, ValueError) else self._as_request(atoms, system)
            for atoms, system in zip(structures, systems, strict=True)
        ]

    def _as_request(self, atoms: Atoms, system: System) -> Request:
        axes = sum(system.pbc.tolist())
        if axes == 0 and len(system.numbers) == 1:
            self._say("the energy of an isolated atom is an extrapolation of the model, no reference energy", warn=True)
        # Stress means something for a periodic structure with a volume: that of the user's cell.
        volume = system.volume if axes == 3 else 0.0
        if axes in (1, 2):
            volume = spanned_volume(atoms.cell.array)
        properties = _CONSERVATIVE if volume else _CONSERVATIVE - {"stress"}
        checkpoint = self._start().checkpoint
        if checkpoint.architecture.direct_forces:
            properties &= {"energy", "energies", *checkpoint.tasks[system.task].properties}
        return Request(system, properties, volume)

    # ------------------------------------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Calculator.__init__(self)
        self._companions = []
        self._configure(state["settings"])

    def __deepcopy__(self, memo: dict[int, Any]) -> FastUMACalculator:
        """A calculator of its own that shares the weights."""
        clone = copy.copy(self)  # through __getstate__: settings only
        clone._running = self._running
        clone._said = set(self._said)
        clone.atoms = None if self.atoms is None else self.atoms.copy()
        clone.results = copy.deepcopy(self.results, memo)
        clone.parameters = dict(self.parameters)
        return clone


def _arrays(atoms: Atoms) -> dict[str, np.ndarray]:
    """What results depend on besides task, charge and spin, by ASE's names."""
    return {"numbers": atoms.numbers, "positions": atoms.positions, "cell": atoms.cell.array, "pbc": atoms.pbc}


def _changes(kept: Atoms, atoms: Atoms) -> list[str]:
    """What differs, without a tolerance."""
    before = _arrays(kept)
    return [name for name, array in _arrays(atoms).items() if not np.array_equal(array, before[name])]


def _device(name: str | None) -> torch.device:
    """A device that exists, with its index. Raises ValueError otherwise."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise ValueError(f"device: expected 'cpu' or one of {count} CUDA devices, got {name!r}")
    return torch.device("cuda", index)


def _key(atoms: Atoms, state: tuple[str, int, int]) -> tuple:
    """What results depend on."""
    return state, *(array.tobytes() for array in _arrays(atoms).values())


def _check_task(task: str | None, checkpoint: Checkpoint) -> None:
    if task is not None and task not in checkpoint.tasks:
        raise ValueError(f"task: expected one of {sorted(checkpoint.tasks)}, got {task!r}")


def why_not(name: str, task: str, checkpoint: Checkpoint) -> str:
    """Why a structure of the task has no such property."""
    if name == "stress" and not checkpoint.architecture.direct_forces:
        return "stress: expected a periodic structure whose cell has a volume"
    offered = ", ".join(checkpoint.tasks[task].properties)
    return f"{name}: not among the properties of task {task!r} of {checkpoint.path.name} ({offered})"
