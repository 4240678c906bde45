"""Named coefficient layouts of lmax = mmax = 2 features, so that no file carries a bare 9, 35 or 81.

Node features are *l-major*: coefficient ``l * l + l + m`` of degree l and order m (polar axis y; l = 1 is x, y, z).
Edge features are *m-major*, grouped into the blocks that an SO(2) linear layer multiplies::

    m0: l0, l1, l2            | m1: (+1) l1, l2, (-1) l1, l2     | m2: (+2) l2, (-2) l2
"""

from __future__ import annotations

LMAX = 2
NUM_COEFFICIENTS = (LMAX + 1) ** 2
"""Coefficients per channel of a node or edge feature."""

DEGREE_SLICES = (slice(0, 1), slice(1, 4), slice(4, 9))
"""The coefficients of l = 0, 1, 2 in an l-major feature."""

M_MAJOR = (0, 2, 6, 3, 7, 1, 5, 8, 4)
"""l-major index of each m-major coefficient."""

M_BLOCKS = (3, 4, 2)
"""Coefficients in the blocks |m| = 0, 1, 2 of an m-major feature."""

RADIAL_OF_M_MAJOR = (0, 1, 2, 3, 4, 3, 4, 5, 5)
"""Which radial weight multiplies each m-major coefficient: +m and -m of one degree share it."""

NUM_RADIAL = 6
"""Radial weights per channel: degrees 0, 1, 2 at m = 0, degrees 1, 2 at |m| = 1, degree 2 at |m| = 2."""

GATE_OF_M_MAJOR = (None, 0, 1, 0, 1, 0, 1, 1, 1)
"""Which gate (degree 1 or degree 2) multiplies each m-major coefficient; l = 0 goes through SiLU instead."""

NUM_GATES = LMAX

COMPACT_SIZE = 1 + 9 + 25
"""Numbers in the compact rotation of one edge: the blocks of l = 0, 1, 2, row-major, one after another."""
