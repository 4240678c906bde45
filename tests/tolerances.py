"""How closely results must agree, with the reason for each number. Loosening one is a commit of its own."""

from __future__ import annotations

import torch

# One operation against its float64 reference: sums of some tens of terms of order 1, each rounded.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}

# The engine against its plain form in float64, relative to the largest force (or to 1). Positions in float32 alone cost
# some 1e-6, radial tables' slopes 1e-6; one half-precision product a matrix product carries 11 bits through two layers.
FORCE_ERROR = {"float64": 1e-10, "float32": 2e-5, "accurate": 2e-5, "fast": 1e-2}

# The same structure written in two ways (moved, repeated, other cell): per atom (eV), forces (eV/A), stress (eV/A^3).
# float64: rounding in sums over some hundred edges. float32-grade modes: positions of a few A carry 2e-7 A of rounding,
# energies and forces of the order of 10 eV and 1 eV/A some 1e-7 of themselves; several layers multiply both.
SAME_STRUCTURE = {
    "float64": {"energy": 1e-9, "forces": 1e-9, "stress": 1e-9},
    "accurate": {"energy": 1e-5, "forces": 2e-5, "stress": 2e-6},
    # Experts mixed while a pass runs, against weights merged before, in float32: 1.5e-5 eV was seen for a lone atom.
    "mixed": {"energy": 5e-5, "forces": 5e-5, "stress": 5e-6},
}

# Analytic against central differences eV/A: truncation, and in float32 the rounding of energies
# of some 30 eV (1e-5 eV) divided by twice the step of 1e-3 A.
FINITE_DIFFERENCE = {"float64": 1e-6, "accurate": 1e-2}

# Second derivatives eV/A^2 of structures whose largest is some tens. float64: against central differences of forces
# with steps of 1e-4 A, truncation. float32: rounding of 1e-7 in each of some thousand terms of both derivatives.
HESSIAN = {"float64": 1e-5, "accurate": 1e-3}
