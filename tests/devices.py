"""Where tests of kernels run: interpreted on the CPU, and for real on a GPU."""

from __future__ import annotations

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
