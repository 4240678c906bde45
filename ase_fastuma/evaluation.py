"""From systems to results: one at a time, or many in passes that fit the memory; what goes wrong says so."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase.stress import full_3x3_to_voigt_6_stress

from ase_fastuma.backend import ALONE, Backend
from ase_fastuma.memory import out_of_memory_is_one_error
from ase_fastuma.system import System

Results = dict[str, Any]
"""Results by ASE's names: energies as floats, else float64 arrays, stress in Voigt order."""


@dataclass(frozen=True)
class Request:
    """A structure to evaluate.

    | field | meaning |
    |---|---|
    | system | the structure as backends see it |
    | properties | what is wanted of it, by the names of `Backend.evaluate`; no more than it has |
    | volume | of the user's cell in A^3, to which stress refers; 0 where there is none |
    """

    system: System
    properties: frozenset[str]
    volume: float

    def results(self, raw: dict[str, np.ndarray]) -> Results:
        """ASE's results from a backend's. Raises FloatingPointError where one is not finite."""
        for name, value in raw.items():
            if not np.isfinite(value).all():
                raise FloatingPointError(f"{name}: expected finite numbers from the model, got NaN or infinity")
        results: Results = {name: raw[name] for name in raw if name in self.properties}
        if "energy" in results:
            results["energy"] = results["free_energy"] = float(results["energy"])
        if "stress" in results:
            # The backend's cell has open axes of its own; the user's stress refers to the user's volume.
            scale = self.system.volume / self.volume
            results["stress"] = full_3x3_to_voigt_6_stress(results["stress"] * scale)
        return results


def evaluate_one(backend: Backend, request: Request) -> Results:
    """The results of one structure. Raises what the backend raises, and MemoryError where memory runs out."""
    try:
        with ALONE, out_of_memory_is_one_error():
            raw = backend.evaluate(request.system, request.properties)
    except torch.OutOfMemoryError as error:
        raise _memory_error(request.system) from error
    return request.results(raw)


def evaluate_products(backend: Backend, system: System, directions: np.ndarray) -> np.ndarray:
    """Products of the Hessian (eV/A^2) with directions, both float64 [k, N, 3].

    Raises what the backend raises, MemoryError where memory runs out, and FloatingPointError.
    """
    return _second_derivatives(backend.hessian_products, system, directions)


def evaluate_hessian(backend: Backend, system: System, indices: np.ndarray) -> np.ndarray:
    """The Hessian's block of the atoms `indices` [n]: float64 [3 n, 3 n] in eV/A^2; raises as `evaluate_products`."""
    return _second_derivatives(backend.hessian, system, indices)


def _second_derivatives(
    function: Callable[[System, np.ndarray], np.ndarray], system: System, argument: np.ndarray
) -> np.ndarray:
    try:
        with ALONE, out_of_memory_is_one_error():
            found = function(system, argument)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"out of memory for second derivatives of {len(system.numbers)} atoms; "
            "get_hessian with method='finite-difference' needs no more than forces do"
        ) from error
    if not np.isfinite(found).all():
        raise FloatingPointError("hessian: expected finite numbers from the model, got NaN or infinity")
    return found


def evaluate_packed(backend: Backend, requests: Iterable[Request | Exception]) -> Iterator[Results | Exception]:
    """The outcome of each request, in order, from passes of as many as fit the memory; requests are drawn as needed.

    Where a pass fails, its halves are tried, down to single structures, so that an exception stands for nothing but its
    own structure. After running out of memory, later passes are smaller. An exception among the requests is its own
    outcome.
    """
    passes = _Passes(backend)
    pack: _Pack | None = None
    for request in requests:
        if pack is not None and pack.take(request):
            continue
        if pack is not None:
            yield from passes.run(pack.requests)
        pack = _Pack(backend, backend.capacity() * passes.share)
        pack.take(request)
    if pack is not None:
        yield from passes.run(pack.requests)


class _Pack:
    """Requests for one pass with so much room; one fits in any case."""

    def __init__(self, backend: Backend, room: float) -> None:
        self.requests: list[Request | Exception] = []
        self._backend, self._room = backend, room
        self._filled, self._keys = 0.0, set[Hashable]()

    def take(self, request: Request | Exception) -> bool:
        """Put one in, unless it does not fit."""
        if not isinstance(request, Exception):
            key, shared = self._backend.shared_footprint(request.system)
            size = self._backend.footprint(request.system) + (0.0 if key in self._keys else shared)
            if self._filled and self._filled + size > self._room:
                return False
            self._filled += size
            self._keys.add(key)
        self.requests.append(request)
        return True


class _Passes:
    """Passes of a backend over many systems, and the `share` of its capacity that they may take."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.share = backend, 1.0

    def run(self, pack: list[Request | Exception]) -> list[Results | Exception]:
        """The outcomes of a pack."""
        outcomes = iter(self._attempt([request for request in pack if isinstance(request, Request)]))
        return [next(outcomes) if isinstance(request, Request) else request for request in pack]

    def _attempt(self, requests: list[Request]) -> list[Results | Exception]:
        """The outcomes of requests: of one pass where it succeeds, else of its halves."""
        if not requests:
            return []
        wanted = frozenset().union(*(request.properties for request in requests))
        try:
            with ALONE, out_of_memory_is_one_error():
                raw = self._backend.evaluate_many([request.system for request in requests], wanted)
        except (torch.OutOfMemoryError, ValueError, FloatingPointError) as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if len(requests) == 1:
                return [_memory_error(requests[0].system) if out_of_memory else error.with_traceback(None)]
            if out_of_memory:
                self.share /= 2
        else:
            return [_outcome(request, values) for request, values in zip(requests, raw, strict=True)]
        # Not in the except clause, which would keep the failed pass, and with it its memory, alive.
        half = len(requests) // 2
        return self._attempt(requests[:half]) + self._attempt(requests[half:])


def _outcome(request: Request, raw: dict[str, np.ndarray]) -> Results | Exception:
    try:
        return request.results(raw)
    except FloatingPointError as error:
        return error


def _memory_error(system: System) -> MemoryError:
    return MemoryError(
        f"out of memory for {len(system.numbers)} atoms; a smaller structure, or general mode with "
        "activation_checkpointing=True, needs less"
    )
