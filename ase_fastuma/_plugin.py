"""ASE's plugin list (`ase info --plugins`) finds the calculator here, without loading torch."""

from __future__ import annotations

import sys

try:
    from ase._4.plugins.plugin import CalculatorPlugin
except ImportError:  # the interface is experimental: where ASE moves it, the calculator still works, only unlisted
    __ase_plugins__ = set()
else:
    __ase_plugins__ = {
        CalculatorPlugin(
            name="fastuma",
            module=sys.modules[__name__],
            implementation="ase_fastuma.calculator.FastUMACalculator",
        )
    }
