"""The interface that the fused and the general backend share, and the one place that opens them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np

    from ase_fastuma.checkpoint import Checkpoint
    from ase_fastuma.settings import Settings
    from ase_fastuma.system import System


class Backend(Protocol):
    """Evaluates one checkpoint on one device. Holds weights, no results: calculators share it."""

    name: str

    def prepare(self, system: System) -> None:
        """Merge the experts for the system; kept for each (reduced composition, charge, spin, task)."""
        ...

    def evaluate(self, system: System, properties: frozenset[str]) -> dict[str, np.ndarray]:
        """The properties asked for, as float64 arrays that the caller owns.

        | name | shape | unit |
        |---|---|---|
        | energy | [] | eV, element references included, summed in float64 |
        | energies | [N] | eV |
        | forces | [N, 3] | eV/A |
        | stress | [3, 3] | eV/A^3, for the volume of `system.cell`; tension positive |
        """
        ...

    def evaluate_many(self, systems: Sequence[System], properties: frozenset[str]) -> list[dict[str, np.ndarray]]:
        """What `evaluate` gives for each of the systems, in order, from one pass over all of them.

        They may differ in everything, task included; a property that is not among those of a system's task is missing
        from its results. Raises what `evaluate` raises, where a single system is at fault for all;
        `evaluation.evaluate_packed` fills passes and sorts out what fails.
        """
        ...

    def hessian(self, system: System, indices: np.ndarray) -> np.ndarray:
        """The Hessian's block (eV/A^2) of the atoms `indices` [n]: float64 [3 n, 3 n]; for conservative models.

        Exact; nothing of it is kept.
        """
        ...

    def hessian_products(self, system: System, directions: np.ndarray) -> np.ndarray:
        """Products of the Hessian (eV/A^2) with directions, both float64 [k, N, 3]; for conservative models.

        Exact, and from one graph for all directions; nothing of it is kept.
        """
        ...

    def footprint(self, system: System) -> float:
        """What the system is estimated to take in a pass of `evaluate_many`, in the unit of `capacity`."""
        ...

    def shared_footprint(self, system: System) -> tuple[Hashable, float]:
        """What a pass takes once for all systems of equal key, beside their footprints: the key, and how much."""
        ...

    def capacity(self) -> float:
        """What a pass of `evaluate_many` should hold at most, as things stand: in bytes or edges or what decides."""
        ...

    def describe(self) -> dict[str, str]:
        """What runs, for the report."""
        ...


ALONE = threading.RLock()
"""Held while a model is opened or runs, so that threads take turns: calculators share backends, and those switch what
belongs to the whole process, such as torch's default dtype, and put it back."""

# Calculators of one checkpoint share one backend, and with it the weights on the device.
_open: WeakValueDictionary[tuple, Backend] = WeakValueDictionary()


def open_backend(name: str, checkpoint: Checkpoint, settings: Settings) -> Backend:
    """The backend `name` ("fused" or "general"): an open one where checkpoint and settings agree, else a new one.

    `settings.device` names the device in full; task, charge and spin belong to the system and make no difference here.
    """
    # A backend keeps its checkpoint alive, so an identity in this table is never reused.
    chosen = (settings.device, settings.precision, settings.merge_mole, settings.activation_checkpointing)
    key = (name, id(checkpoint), *chosen)
    backend = _open.get(key)
    if backend is None:
        if name == "fused":
            from ase_fastuma.engine import FusedBackend

            backend = FusedBackend(checkpoint, settings)
        else:
            from ase_fastuma.general import GeneralBackend

            backend = GeneralBackend(checkpoint, settings)
        _open[key] = backend
    return backend
