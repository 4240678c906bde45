"""Coupling trees: a basis of the symmetric equivariant polynomials that a symmetric contraction is made of.

Features carry one copy of each degree l = 0 ... lmax with natural parity (-1)^l. Two of them couple by the integral of
three real harmonics, which vanishes unless l1 + l2 + l3 is even and the three obey the triangle rule. A polynomial of
the basis (a :class:`Term`) is a power of the scalar x_0 times a tree without scalars::

    x_L        (x_l1 x_l2)_L        ((x_l1 x_l2)_M x_l3)_L

Trees of other intermediate degrees or parities add nothing once the factors are all the same x: they are combinations
of these (``test_symmetric_contraction.py`` compares dimensions and values with all trees of mace-torch).
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MAX_DEGREE = 3
MAX_CORRELATION = 3

CHANNELS = {
    0: ((2, 2), (1, 1), (3, 3)),
    1: ((0, 1), (2, 1), (2, 3), (1, 2)),
    2: ((0, 2), (2, 2), (1, 1), (1, 3), (3, 1)),
    3: ((0, 3), (2, 3), (2, 1), (1, 2), (3, 2)),
}
"""For each output degree the pairs (M, l3) whose couplings end a cubic tree, cheapest first.

Intermediates of degree 0 and 2 serve all output degrees, and every further pair costs a coupling of its own: with this
order the three sets of outputs 0e, 0e+1o and 0e+1o+2e take 150, 291 and 436 operations forward."""


def _harmonics(degree: int, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Real harmonics of one degree [2 l + 1, points], polar axis y, l = 1 is x, y, z: e3nn's basis up to a factor."""
    r2 = x * x + z * z
    if degree == 0:
        return np.stack([np.ones_like(x)])
    if degree == 1:
        return np.stack([x, y, z])
    two = [3**0.5 * x * z, 3**0.5 * x * y, y * y - r2 / 2, 3**0.5 * y * z, 3**0.5 / 2 * (z * z - x * x)]
    if degree == 2:
        return np.stack(two)
    return np.stack(
        [
            (5 / 6) ** 0.5 * (two[0] * z + two[4] * x),
            5**0.5 * two[0] * y,
            (3 / 8) ** 0.5 * (4 * y * y - r2) * x,
            y * (2 * y * y - 3 * r2) / 2,
            (3 / 8) ** 0.5 * (4 * y * y - r2) * z,
            5**0.5 * two[4] * y,
            (5 / 6) ** 0.5 * (two[4] * z - two[0] * x),
        ]
    )


@functools.cache
def coupling(l1: int, l2: int, degree: int, same: bool = False) -> np.ndarray:
    """Coefficients [2 L + 1, 2 l1 + 1, 2 l2 + 1] of (a b)_L, scaled so that the commonest size among them is 1.

    The integral over the sphere is a quadrature that is exact for polynomials of degree 9. ``same`` asks for the
    commonest size in (a a)_L, where the coefficients of a_i a_j and a_j a_i add up. A factor of one tree is free: it
    belongs to the tree's weight.
    """
    nodes, weights = np.polynomial.legendre.leggauss(5)
    angles = np.arange(10) * (2 * np.pi / 10)
    y = np.repeat(nodes, 10)
    rho = np.sqrt(1 - y * y)
    x, z = rho * np.tile(np.sin(angles), 5), rho * np.tile(np.cos(angles), 5)
    factors = [_harmonics(d, x, y, z) for d in (degree, l1, l2)]
    found = np.einsum("kp,ip,jp,p->kij", *factors, np.repeat(weights, 10))
    found[abs(found) < 1e-12] = 0.0
    sizes = abs(np.triu(found + np.triu(found.transpose(0, 2, 1), 1))) if same else abs(found)
    sizes = sizes[sizes > 0]
    rounded, counts = np.unique(np.round(sizes, 9), return_counts=True)
    found = found / sizes[abs(sizes - rounded[counts.argmax()]).argmin()]
    # Their squares are rational: with the roots of those, equal coefficients are equal in every digit.
    squares = [float(Fraction(c * c).limit_denominator(10000)) for c in found.ravel()]
    return np.copysign(np.sqrt(squares).reshape(found.shape), found)


def couples(l1: int, l2: int, degree: int) -> bool:
    """Whether two natural-parity degrees couple to a third."""
    return abs(l1 - l2) <= degree <= l1 + l2 and (l1 + l2 + degree) % 2 == 0


@dataclass(frozen=True)
class Term:
    """One polynomial: x_0 to the power ``scalars`` times a tree.

    Attributes:
        degree: degree L of its value.
        tree: (L,), (l1, l2) or (l1, l2, M, l3).
        scalars: further factors x_0.
    """

    degree: int
    tree: tuple[int, ...]
    scalars: int = 0

    @property
    def factors(self) -> tuple[int, ...]:
        """Degrees of its factors x_l, scalars first."""
        leaves = self.tree if len(self.tree) < 3 else (self.tree[0], self.tree[1], self.tree[3])
        return (0,) * self.scalars + leaves

    def tensor(self, lmax: int) -> np.ndarray:
        """Its coefficients [2 L + 1, D, ..., D], symmetric in all axes but the first, D = (lmax + 1)^2."""
        size = (lmax + 1) ** 2

        def placed(degree: int) -> np.ndarray:
            return np.eye(size)[degree * degree : (degree + 1) ** 2]

        value = placed(self.tree[0])
        if len(self.tree) > 1:
            l1, l2 = self.tree[:2]
            middle = self.degree if len(self.tree) == 2 else self.tree[2]
            value = np.einsum("kij,ia,jb->kab", coupling(l1, l2, middle, l1 == l2), placed(l1), placed(l2))
        if len(self.tree) == 4:
            last = self.tree[3]
            value = np.einsum("kij,iab,jc->kabc", coupling(middle, last, self.degree), value, placed(last))
        for _ in range(self.scalars):
            value = np.multiply.outer(value, placed(0)[0])
        return symmetrised(value)


def symmetrised(tensor: np.ndarray) -> np.ndarray:
    """Mean over all orders of all axes but the first."""
    orders = list(itertools.permutations(range(1, tensor.ndim)))
    return np.mean([tensor.transpose(0, *order) for order in orders], axis=0)


@functools.cache
def _trees(degree: int, lmax: int, correlation: int) -> tuple[tuple[int, ...], ...]:
    """Trees without scalars, linearly independent, of up to `correlation` factors."""
    found: list[tuple[int, ...]] = [(degree,)] if degree <= lmax else []
    if correlation >= 2:
        pairs = itertools.combinations_with_replacement(range(1, lmax + 1), 2)
        found += [pair for pair in pairs if couples(*pair, degree)]
    if correlation >= 3:
        independent: dict[tuple[int, ...], list[np.ndarray]] = {}
        for middle, last in CHANNELS[degree]:
            for l1, l2 in itertools.combinations_with_replacement(range(1, lmax + 1), 2):
                if last > lmax or not couples(l1, l2, middle):
                    continue
                # Polynomials of different factors are independent of each other.
                rows = independent.setdefault(tuple(sorted((l1, l2, last))), [])
                row = Term(degree, (l1, l2, middle, last)).tensor(lmax).ravel()
                row = row / np.linalg.norm(row)
                if np.linalg.matrix_rank(np.stack([*rows, row]), tol=1e-6) > len(rows):
                    rows.append(row)
                    found.append((l1, l2, middle, last))
    return tuple(found)


@dataclass(frozen=True)
class Contraction:
    """What a symmetric contraction computes: degrees in and out, and the polynomials between them.

    Attributes:
        lmax: input degrees are 0 ... lmax, one copy of each.
        degrees: output degrees, increasing.
        correlation: the largest number of factors x.
    """

    lmax: int
    degrees: tuple[int, ...]
    correlation: int

    @property
    def size_in(self) -> int:
        """D, coefficients of an input channel."""
        return (self.lmax + 1) ** 2

    @property
    def size_out(self) -> int:
        """Coefficients of an output channel."""
        return sum(2 * degree + 1 for degree in self.degrees)

    def terms_of(self, degree: int) -> tuple[Term, ...]:
        """The polynomials of one output degree, in the order of their weights."""
        found = []
        for tree in _trees(degree, self.lmax, self.correlation):
            factors = (len(tree) + 2) // 2 if len(tree) > 1 else 1
            found += [Term(degree, tree, n) for n in range(self.correlation - factors + 1)]
        # Powers of x_0 alone are the trees of x_0; no tree of two or three factors contains it.
        return tuple(found)

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """All polynomials, in the order of their weights: K of them."""
        return tuple(term for degree in self.degrees for term in self.terms_of(degree))


@functools.cache
def contraction(irreps_in: str, irreps_out: str, correlation: int) -> Contraction:
    """The contraction between two sets of irreps, written as e3nn does, e.g. "0e+1o+2e+3o" (multiplicities may stand).

    Raises:
        ValueError: irreps other than 0e, 1o, 2e, 3o, in another order or repeated; a gap in the input's degrees; a
            correlation outside 1 ... 3; an output that no polynomial reaches.
    """
    degrees_in, degrees_out = _degrees("irreps_in", irreps_in), _degrees("irreps_out", irreps_out)
    if degrees_in != tuple(range(len(degrees_in))):
        raise ValueError(f"irreps_in: expected all degrees from 0e on, got {irreps_in!r}")
    if type(correlation) is not int or correlation not in range(1, MAX_CORRELATION + 1):
        raise ValueError(f"correlation: expected 1, 2 or 3, got {correlation!r}")
    found = Contraction(len(degrees_in) - 1, degrees_out, correlation)
    for degree in degrees_out:
        if not found.terms_of(degree):
            raise ValueError(
                f"irreps_out: expected irreps that {correlation} factors of {irreps_in!r} reach, got {irreps_out!r}"
            )
    return found


def _degrees(name: str, irreps: str) -> tuple[int, ...]:
    """Degrees of natural-parity irreps, each once and increasing."""
    if not isinstance(irreps, str):
        raise TypeError(f"{name}: expected a string such as '0e+1o', got {irreps!r}")
    matches = [re.fullmatch(r"(?:\d+x)?([0-3])([eo])", part.strip()) for part in irreps.split("+")]
    degrees = tuple(int(m[1]) for m in matches if m and m[2] == "eo"[int(m[1]) % 2])
    if len(degrees) != len(matches) or list(degrees) != sorted(set(degrees)):
        raise ValueError(f"{name}: expected some of 0e, 1o, 2e, 3o, each once and in this order, got {irreps!r}")
    return degrees
