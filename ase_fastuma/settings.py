"""What the user chooses, in one frozen dataclass."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

RANGES = {"charge": (-100, 100), "spin": (0, 100)}
"""Charges and spins that the models' embeddings have."""

BackendChoice = Literal["auto", "fused", "general"]
Precision = Literal["accurate", "fast", "float32", "float64"]


@dataclass(frozen=True)
class Settings:
    """User choices. Everything here is validated on construction and hashable."""

    # A registered name of fairchem-core, the path of a checkpoint, or "demo" for the bundled potential.
    model: str = "uma-s-1p2p1"
    # Task ("omat", "omol", ...). None: its only task, or "omol" where nothing is periodic, else "omat".
    task: str | None = None
    # Total charge in units of e. None: atoms.info["charge"], else 0.
    charge: int | None = None
    # Spin multiplicity 2S + 1. None: atoms.info["spin"], else 1 for "omol" and 0 (unspecified) for other tasks.
    spin: int | None = None
    # Device as torch spells it. None: the current CUDA device where there is one, else the CPU.
    device: str | None = None
    # "auto": the fused backend where it serves the request; "fused": it or an error; "general": fairchem-core's model.
    backend: BackendChoice = "auto"
    # "accurate": FP32-grade results; "fast": TF32-grade results; "float32" and "float64": IEEE arithmetic throughout.
    # General mode runs float64 as such and everything else in float32.
    precision: Precision = "accurate"
    # Merge the experts once for each composition, charge, spin and task. False: mix them in each call (general mode).
    merge_mole: bool = True
    # Recompute activations in the backward pass: less memory, slower (general mode).
    activation_checkpointing: bool = False
    # Load a checkpoint that needs more than containers and tensors. Such a file can run any code: know its author.
    trust_checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "task", "device"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "model")):
                raise TypeError(f"{name}: expected a string, got {value!r}")
        for name, choice in (("backend", BackendChoice), ("precision", Precision)):
            if getattr(self, name) not in get_args(choice):
                raise ValueError(f"{name}: expected one of {list(get_args(choice))}, got {getattr(self, name)!r}")
        for name in ("merge_mole", "activation_checkpointing", "trust_checkpoint"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in ("charge", "spin"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integral(name, getattr(self, name)))
                check_range(name, getattr(self, name))


def check_range(name: str, value: int) -> None:
    """Raise ValueError for a charge or spin that the models do not know."""
    low, high = RANGES[name]
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")


def integral(name: str, value: object) -> int:
    """`value` as an int: Python, NumPy and torch numbers of integral value pass, also as arrays of one element.

    Raises TypeError for anything that is no number and ValueError for 0.5, NaN and infinity.
    """
    if type(value) is int:  # nearly always, and all below takes time where structures are many
        return value
    if hasattr(value, "item"):  # a NumPy scalar or an array of one element, as extended XYZ may hold
        with suppress(ValueError, RuntimeError):  # NumPy's and torch's, for several elements
            value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not float(value).is_integer():
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return int(float(value))
