"""Models for TorchSim, whose integrators, optimizers and autobatchers move many structures at once.

    import torch_sim as ts
    from ase_fastuma.torchsim import FastUMAModel

    model = FastUMAModel("demo")
    state = ts.integrate(structures, model, integrator=ts.Integrator.nve, n_steps=100, temperature=300, timestep=0.001)

Needs the extra "torchsim". TorchSim 0.3 (Python 3.11) and 0.6 (Python 3.12) are served alike.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress
from torch import Tensor
from torch_sim.models.interface import ModelInterface

from ase_fastuma.backend import ALONE
from ase_fastuma.batch import requests
from ase_fastuma.calculator import FastUMACalculator
from ase_fastuma.memory import out_of_memory_is_one_error
from ase_fastuma.resident import Resident

if TYPE_CHECKING:
    from torch_sim.state import SimState

    from ase_fastuma.engine import FusedBackend
    from ase_fastuma.evaluation import Request
    from ase_fastuma.kernels.many_neighbours import Bins


_NUMBERS = ("charge", "spin")
"""What a state may have for each system beside its atoms."""


class FastUMAModel(ModelInterface):
    """Energies, forces and stress of all systems of a TorchSim state, equal to what a calculator gives for each.

    Task, charge and spin come from where a calculator takes them, `charge` and `spin` of the state ([S], which TorchSim
    0.6 keeps as extras) standing for `atoms.info`. All systems of a state share its periodic axes.
    """

    def __init__(
        self,
        model: FastUMACalculator | str | Path = "uma-s-1p2p1",
        *,
        compute_forces: bool = True,
        compute_stress: bool = False,
        dtype: torch.dtype = torch.float64,
        **settings: Any,
    ) -> None:
        """Take a calculator, or the model and the settings of one.

        | argument | meaning |
        |---|---|
        | model | a calculator, or a registered name, a checkpoint file, or "demo" |
        | compute_forces, compute_stress | what is computed beside the energy |
        | dtype | of states that TorchSim makes for the model, and of results; `precision` is that of the model |
        | settings | as for `FastUMACalculator` |

        Raises what `FastUMACalculator` raises, and TypeError for settings beside a calculator.
        """
        super().__init__()
        if isinstance(model, FastUMACalculator):
            if settings:
                raise TypeError(f"settings: expected none beside a calculator, got {', '.join(settings)}")
            calculator = copy.deepcopy(model)  # which shares the weights, and whose settings are fixed from now on
        else:
            calculator = FastUMACalculator(model, **settings)
        self._calculator = calculator
        self._device = calculator._start().device
        self._dtype = dtype
        self._compute_forces, self._compute_stress = compute_forces, compute_stress
        # On the device: the systems of the last state, and what a search needs of their cells.
        self._resident: Resident
        self._resident_key: list[tuple] = []
        self._bins: Bins
        self._kinds, self._cell = _Seen(), _Seen()

    @property
    def calculator(self) -> FastUMACalculator:
        """The calculator with these settings: what runs, and why, is in its `report()`."""
        return self._calculator

    @ModelInterface.compute_stress.setter
    def compute_stress(self, value: bool) -> None:
        """Whether stress is computed."""
        self._compute_stress = value

    @ModelInterface.compute_forces.setter
    def compute_forces(self, value: bool) -> None:
        """Whether forces are computed."""
        self._compute_forces = value

    def forward(self, state: SimState, **_: Any) -> dict[str, Tensor]:
        """Evaluate a state of N atoms in S systems.

        | result | shape | meaning |
        |---|---|---|
        | energy | [S] | eV |
        | forces | [N, 3] | eV/A, where `compute_forces` |
        | stress | [S, 3, 3] | eV/A^3, where `compute_stress`; zero without periodic axes or volume |

        Elements, cells, charges and spins are looked at again where torch has counted a change: one written past it,
        through `.data`, goes unseen on a GPU.

        Raises ValueError where a state cannot be meant, NotImplementedError where a task lacks what is computed, and
        FloatingPointError where the model's output is not finite.
        """
        if state.positions.device != self._device:
            raise ValueError(f"state: expected its tensors on {self._device}, got {state.positions.device}")
        chosen = {"energy": True, "forces": self._compute_forces, "stress": self._compute_stress}
        wanted = frozenset(name for name, computed in chosen.items() if computed)
        results, fault = None, None
        if self._calculator.backend.name == "fused":
            try:
                with ALONE:
                    results = self._evaluate_on_device(state, wanted)
            except ValueError as error:
                fault = error
        if results is None:  # The host names faults by system, and knows what to do where something is not finite.
            results = self._evaluate_on_host(state, wanted)
        if fault is not None:
            raise fault
        return {name: results[name].to(self._device, self._dtype) for name in wanted}

    def _evaluate_on_device(self, state: SimState, wanted: frozenset[str]) -> dict[str, Tensor] | None:
        """Without a way through the host; None where something is not finite. Raises what `Resident` raises."""
        resident = self._resident_of(state, wanted)
        if not self._cell.same(state.cell):
            self._bins = resident.bins(state.row_vector_cell)
            self._cell.keep(state.cell)
        results = resident.evaluate(state.positions, self._bins, bool(wanted & {"forces", "stress"}))
        if results is not None and "stress" in wanted:
            volumes = _volumes(state.cell.detach().double())[:, None, None]
            periodic = state.pbc.any() if isinstance(state.pbc, Tensor) else state.pbc
            there = (volumes > 0) & periodic
            results["stress"] = torch.where(there, results["virial"] / volumes, 0.0)
        return results

    def _resident_of(self, state: SimState, wanted: frozenset[str]) -> Resident:
        """The systems of a state on the device; those of the last one where only positions and cells differ."""
        kinds = (state.atomic_numbers, state.system_idx, state.pbc, *(getattr(state, name, None) for name in _NUMBERS))
        if not self._kinds.same(*kinds):
            systems = [request.system for request in self._requests(state, wanted)]
            key = [(s.numbers.tobytes(), s.pbc.tobytes(), s.task, s.charge, s.spin) for s in systems]
            if key != self._resident_key:
                running = self._calculator._start()
                self._resident = Resident(cast("FusedBackend", running.backend), running.checkpoint, systems)
                self._resident_key, self._cell = key, _Seen()
            self._kinds.keep(*kinds)
        return self._resident

    def _evaluate_on_host(self, state: SimState, wanted: frozenset[str]) -> dict[str, Tensor]:
        """Through the interface of all backends, whose arrays live on the host."""
        work = self._requests(state, wanted)
        for i, request in enumerate(work):
            with _numbered(i):
                request.system.check_distinct()
        backend = self._calculator._start().backend
        with ALONE, out_of_memory_is_one_error():
            raw = backend.evaluate_many([request.system for request in work], wanted)
        found = []
        for i, (request, values) in enumerate(zip(work, raw, strict=True)):
            with _numbered(i):
                found.append({"stress": np.zeros(6)} | request.results(values))
        results = {"energy": torch.tensor([one["energy"] for one in found], dtype=torch.float64)}
        if "forces" in wanted:
            results["forces"] = torch.tensor(np.concatenate([one["forces"] for one in found]))
        if "stress" in wanted:
            results["stress"] = torch.tensor(np.stack([voigt_6_to_full_3x3_stress(one["stress"]) for one in found]))
        return results

    def _requests(self, state: SimState, wanted: frozenset[str]) -> list[Request]:
        """A validated request for each system of a state."""
        found = []
        for i, request in enumerate(requests(self._calculator, _structures(state), None, wanted)):
            with _numbered(i):
                if isinstance(request, Exception):
                    raise request
            found.append(request)
        return found


class _Seen:
    """Values as they were; tells whether they are still the same, without waiting for the device."""

    def __init__(self) -> None:
        self._values: tuple[Any, ...] = ()

    def keep(self, *values: Any) -> None:
        """Remember values as they are now."""
        self._values = tuple(map(_version, values))

    def same(self, *values: Any) -> bool:
        """Whether these are the tensors, numbers or None that are kept, and no tensor has been written to since."""
        return len(values) == len(self._values) and all(
            now[0] is kept[0] and now[1] == kept[1]
            for now, kept in zip(map(_version, values), self._values, strict=True)
        )


def _version(value: Any) -> tuple[Any, Any]:
    """A tensor, and a number that grows when it is written to."""
    if not isinstance(value, Tensor):
        return None, value
    # In inference mode tensors do not count: each time they are as good as new.
    return value, object() if value.is_inference() else value._version


def _volumes(cells: Tensor) -> Tensor:
    """Volumes [S] of cells [S, 3, 3], each from its own numbers alone."""
    x, y, z = (torch.linalg.cross(cells[:, 0], cells[:, 1]) * cells[:, 2]).unbind(1)
    return (x + y + z).abs()


@contextmanager
def _numbered(system: int) -> Iterator[None]:
    """Errors about one system say which."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, FloatingPointError) as error:
        error.add_note(f"system {system} of the state")
        raise


def _structures(state: SimState) -> list[Atoms]:
    """The systems of a state, with charge and spin where it has them. Raises ValueError for systems out of order."""
    positions, numbers, systems = (
        tensor.detach().cpu().numpy() for tensor in (state.positions, state.atomic_numbers, state.system_idx)
    )
    cells = state.row_vector_cell.detach().cpu().numpy()
    pbc = torch.as_tensor(state.pbc).cpu().numpy()  # one boolean in TorchSim 0.3, three in 0.6
    info = {name: _per_system(state, name, len(cells)) for name in _NUMBERS}
    starts = np.searchsorted(systems, np.arange(len(cells) + 1))
    if (np.diff(systems) < 0).any() or (np.diff(starts) == 0).any():
        raise ValueError("system_idx: expected all systems of the state in order, each with an atom")
    return [
        Atoms(
            numbers[first:last],
            positions[first:last],
            cell=cells[i],
            pbc=pbc,
            info={name: values[i] for name, values in info.items() if values is not None},
        )
        for i, (first, last) in enumerate(itertools.pairwise(starts))
    ]


def _per_system(state: SimState, name: str, num_systems: int) -> np.ndarray | None:
    """Numbers that a state may have for each system."""
    values = getattr(state, name, None)
    if values is None:
        return None
    values = values.detach().cpu().numpy().reshape(-1)
    if len(values) != num_systems:
        raise ValueError(f"{name}: expected one number for each of {num_systems} systems, got {len(values)}")
    return values
