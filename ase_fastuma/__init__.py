"""ASE calculator for UMA and eSEN potentials.

Importing this package loads neither torch nor fairchem-core: public names are resolved on first use.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ase_fastuma.batch import EvaluationError, evaluate
    from ase_fastuma.calculator import FastUMACalculator
    from ase_fastuma.checkpoint import Checkpoint, load_checkpoint
    from ase_fastuma.settings import Settings

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "EvaluationError",
    "FastUMACalculator",
    "Settings",
    "__version__",
    "evaluate",
    "load_checkpoint",
]

_HOME = {
    "Checkpoint": "ase_fastuma.checkpoint",
    "EvaluationError": "ase_fastuma.batch",
    "FastUMACalculator": "ase_fastuma.calculator",
    "Settings": "ase_fastuma.settings",
    "evaluate": "ase_fastuma.batch",
    "load_checkpoint": "ase_fastuma.checkpoint",
}

# Messages reach whoever configures logging; nothing is printed by default.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
