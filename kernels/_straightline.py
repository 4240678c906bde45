"""Straight-line programs: polynomials as sums and products of earlier values, differentiated and written as code.

Values are numbers in the order of their making. A value is an input or a sum of summands ``c a`` or ``c a b``
with a constant c and earlier values a, b. Derivatives of such programs are such programs: the backward pass of a
polynomial, and the backward pass of that, come from its forward pass alone, and no formula is derived by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ._schedule import few_live

Summand = tuple  # (c, a) or (c, a, b): constant, values


class Program:
    """A growing list of values; equal sums are made once, and a sum of nothing is None."""

    def __init__(self) -> None:
        self._values: list[str | tuple[Summand, ...]] = []
        self._made: dict[tuple[Summand, ...], int] = {}

    def input(self, name: str) -> int:
        """A value that the caller provides under a name."""
        self._values.append(name)
        return len(self._values) - 1

    def inputs(self, prefix: str, count: int) -> list[int]:
        """Values prefix0, prefix1, ..."""
        return [self.input(f"{prefix}{i}") for i in range(count)]

    def sum(self, summands: Iterable[Summand]) -> int | None:
        """The sum of summands (c, a) and (c, a, b), those with a value None left out."""
        collected: dict[tuple[int, ...], float] = {}
        for c, *values in summands:
            if None not in values:
                key = tuple(sorted(values))
                collected[key] = collected.get(key, 0.0) + c
        kept = tuple((c, *values) for values, c in collected.items() if abs(c) > 1e-13)
        if not kept:
            return None
        if len(kept) == 1 and len(kept[0]) == 2 and kept[0][0] == 1.0:
            return kept[0][1]
        if kept not in self._made:
            self._values.append(kept)
            self._made[kept] = len(self._values) - 1
        return self._made[kept]

    def couple(self, coefficients: np.ndarray, a: Sequence[int | None], b: Sequence[int | None]) -> list[list[Summand]]:
        """For every k the summands of C[k, i, j] a_i b_j; one size of C multiplies the sum of all its products."""
        found = []
        for matrix in coefficients:
            merged: dict[tuple, float] = {}
            for i, j in zip(*np.nonzero(matrix), strict=True):
                if a[i] is not None and b[j] is not None:
                    key = tuple(sorted((a[i], b[j])))
                    merged[key] = merged.get(key, 0.0) + float(matrix[i, j])
            by_size: dict[float, list[Summand]] = {}
            for pair, c in merged.items():
                by_size.setdefault(abs(c), []).append((math.copysign(1.0, c), *pair))
            summands: list[Summand] = []
            for size, products in by_size.items():
                summands += products if size == 1.0 else [(size, self.sum(products))]
            found.append(summands)
        return found

    def gradient(self, seeds: Mapping[int, Sequence[Summand]], wanted: Sequence[int]) -> list[int | None]:
        """Gradients with respect to `wanted` inputs of a scalar whose gradients at other values are the seeds' sums."""
        inputs = set(wanted)
        depends = [False] * len(self._values)
        for v, value in enumerate(self._values):
            made_of = [] if isinstance(value, str) else [a for summand in value for a in summand[1:]]
            depends[v] = v in inputs or any(depends[a] for a in made_of)
        gathered: dict[int, list[Summand]] = {v: list(summands) for v, summands in seeds.items()}
        gradients: dict[int, int | None] = {}
        for v in range(len(depends) - 1, -1, -1):
            if not depends[v] or v not in gathered:
                continue
            value = self._values[v]
            if isinstance(value, str):
                gradients[v] = self.sum(gathered[v])
                continue
            # A sum of squares passes 2 a: the factor 2 goes into the constants of its own gradient, where it is free.
            squares = all(len(s) == 3 and s[1] == s[2] for s in value)
            scale = 2.0 if squares else 1.0
            upstream = self.sum((scale * c, *values) for c, *values in gathered[v])
            for c, *operands in value:
                if squares:
                    gathered.setdefault(operands[0], []).append((c, upstream, operands[0]))
                    continue
                for i, a in enumerate(operands):
                    if depends[a]:
                        others = operands[:i] + operands[i + 1 :]
                        gathered.setdefault(a, []).append((c, upstream, *others))
        return [gradients.get(v) for v in wanted]

    def _needed(self, outputs: Iterable[int | None]) -> list[int]:
        """The values that outputs are made of, each after what it is made of and close to its first use."""
        order: dict[int, None] = {}

        def visit(v: int) -> None:
            if v in order:
                return
            value = self._values[v]
            if not isinstance(value, str):
                for summand in value:
                    for a in summand[1:]:
                        visit(a)
            order[v] = None

        for v in outputs:
            if v is not None:
                visit(v)
        return list(order)

    def sums(self, outputs: Iterable[int | None]) -> dict[int, tuple[Summand, ...]]:
        """The values that outputs are made of but inputs, each after those it is made of."""
        needed = ((v, self._values[v]) for v in self._needed(outputs))
        return {v: value for v, value in needed if not isinstance(value, str)}

    def operations(self, outputs: Iterable[int | None]) -> int:
        """Multiply-add-type instructions to compute the outputs."""
        count = 0
        for value in self.sums(outputs).values():
            count += sum(2 if len(t) == 3 and abs(t[0]) != 1.0 else 1 for t in value)
            count -= any(len(t) == 2 and t[0] == 1.0 for t in value)  # a sum starts from it at no cost
        return count

    def names(self, outputs: Iterable[int | None]) -> list[str]:
        """What the code calls these values; "zero" is a name that the caller defines."""
        return ["zero" if v is None else self._name(v) for v in outputs]

    def _name(self, v: int) -> str:
        value = self._values[v]
        return value if isinstance(value, str) else f"v{v}"

    def used(self, outputs: Iterable[int | None]) -> set[str]:
        """Names of the inputs that outputs depend on."""
        values = (self._values[v] for v in self._needed(outputs))
        return {value for value in values if isinstance(value, str)}

    def code(
        self,
        outputs: Sequence[int | None],
        on_demand: Iterable[int] = (),
        sums: Mapping[str, int | None] | None = None,
    ) -> tuple[dict[str, float], list[str]]:
        """Constants by name, and statements that compute the outputs from the inputs and those constants.

        Summands stand in an order with few live values (:mod:`._schedule`): a compiler stays close enough to it that
        registers follow. Inputs `on_demand` take none before they are read. Outputs are added to the variables that
        `sums` names as soon as they are known.
        """
        constants: dict[float, str] = {}
        lines: list[str] = []
        added: dict[int, list[str]] = {}
        for name, v in (sums or {}).items():
            if v is not None:
                added.setdefault(v, []).append(name)

        def written(summand: Summand) -> str:
            c, *values = summand
            product = " * ".join(self._name(a) for a in values)
            if abs(c) != 1.0:
                name = constants.setdefault(abs(c), f"c{len(constants)}")
                product = f"{name} * {product}"
            return f"- {product}" if c < 0 else f"+ {product}"

        values = self.sums(outputs)
        lasting = {v for v in outputs if v is not None} - added.keys()
        left = {v: len(value) for v, value in values.items()}
        for v, group in itertools.groupby(few_live(values, lasting, set(on_demand)), key=lambda place: place[0]):
            # A bare value first, so that every later summand is one fused multiply-add.
            summands = sorted((values[v][i] for _, i in group), key=lambda t: (len(t) != 2 or t[0] != 1.0, t[0] < 0))
            so_far = [self._name(v)] if left[v] < len(values[v]) else []
            lines.append(f"{self._name(v)} = " + " ".join([*so_far, *map(written, summands)]).removeprefix("+ "))
            left[v] -= len(summands)
            if not left[v]:
                lines += [f"{name} += {self._name(v)}" for name in added.pop(v, [])]
        lines += [f"{name} += {self._name(v)}" for v, names in added.items() for name in names]  # inputs
        return {name: c for c, name in constants.items()}, lines
