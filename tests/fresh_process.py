"""Run by the fixture `fresh_process`: evaluate a structure, and report which global state changed on the way."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.build import bulk


def snapshot() -> dict[str, Any]:
    """Global state that libraries like to change."""
    return {
        "root logger": repr((logging.getLogger().handlers, logging.getLogger().level)),
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "warning filters": repr(warnings.filters),
        "default dtype": repr(torch.get_default_dtype()),
        "default device": repr(torch.get_default_device()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "gradients": torch.is_grad_enabled(),
        "torch generator": torch.get_rng_state().tolist(),
        "NumPy generator": repr(np.random.get_state()),  # noqa: NPY002 - the global one is what is looked at
        "Python generator": repr(random.getstate()),
    }


def main(checkpoint: str, output: str) -> None:
    atoms = bulk("Cu", cubic=True)
    before = snapshot()

    from ase_fastuma import FastUMACalculator

    atoms.calc = FastUMACalculator(checkpoint)
    atoms.get_stress()
    atoms.get_forces()
    after = snapshot()
    changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    Path(output).write_text(json.dumps(changed))


if __name__ == "__main__":
    main(*sys.argv[1:])
