"""Faster symmetric contractions in models of mace-torch, in place, with the models' own weights.

    from ase_fastuma.mace import accelerate

    accelerate(model)                       # a model of mace-torch, e.g. torch.load("my.model") or calculator.models[0]
    calculator = MACECalculator(models=model, device="cuda")

:func:`accelerate` gives each ``SymmetricContraction`` of the model another class, which overrides ``forward`` alone:
parameters, buffers, names and the state dict stay as they are, optimisers keep their parameters, and :func:`restore`
puts the old class back. Weights of mace-torch belong to its own paths, which are redundant in its default form; each
path is a combination of the polynomials of :mod:`.kernels.symmetric_contraction`, found once from the coefficients that
the model carries, so both of mace-torch's forms (original and reduced coefficients) work.

Needs mace-torch, whose own module prints and sets an environment variable when it is imported.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from mace.modules.symmetric_contraction import SymmetricContraction
from torch import Tensor

from .kernels._couplings import Contraction, contraction, symmetrised
from .kernels.symmetric_contraction import symmetric_contraction

PROJECTION_TOLERANCE = 1e-5
"""How far a path may be from a combination of our polynomials, relative: float32 coefficients are 1e-7 off."""


class AcceleratedContraction(SymmetricContraction):
    """mace-torch's module with another ``forward``; made by :func:`accelerate` alone."""

    _fastuma_spec: tuple[str, str, int]
    _fastuma_projections: list[Tensor] | None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Contract features.

        Args:
            x: [N, C, D].
            y: one-hot species [N, E]; nodes take the weights of its largest entry, and no gradient goes to it.

        Returns:
            [N, C * sum of (2 L + 1)], for each irrep (channel, m).
        """
        irreps_in, irreps_out, correlation = self._fastuma_spec
        weights = self._weights()
        if y.shape[1] != weights.shape[0]:
            raise ValueError(f"y: expected one column for each of {weights.shape[0]} species, got {list(y.shape)}")
        return symmetric_contraction(
            x, y.argmax(dim=1), weights, irreps_out, irreps_in=irreps_in, correlation=correlation
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        """A state brings coefficients along, which may be those of other paths."""
        super()._load_from_state_dict(*args)
        self._fastuma_projections = None

    def _weights(self) -> Tensor:
        """Weights [E, K, C] of our polynomials.

        Combined anew each time: averages of weights are often put in through ``.data``, which leaves no trace.
        """
        own = [_weights_of(part) for part in self.contractions]
        if self._fastuma_projections is None:
            self._fastuma_projections = _projections(self, self._fastuma_spec)
        # Moved once: a copy from the host would wait for it in every step of training.
        self._fastuma_projections = [p.to(own[0][0].device) for p in self._fastuma_projections]
        found = []
        for weights, projection in zip(own, self._fastuma_projections, strict=True):
            found.append(projection @ torch.cat(weights, dim=1).double())  # [K, paths] @ [E, paths, C]
        return torch.cat(found, dim=1).to(own[0][0].dtype)


def _weights_of(part: Any) -> list[Tensor]:
    """Weights of one output irrep: of the highest order first, then downwards, as mace-torch keeps them."""
    return [part.weights_max, *part.weights]


def _projection(part: Any, spec: Contraction, degree: int) -> Tensor:
    """Each path of one output irrep as a combination of its polynomials: [K, paths], so that new = projection @ old."""
    terms = spec.terms_of(degree)
    columns = []
    for order in range(part.correlation, 0, -1):
        paths = part.U_tensors(order).detach().cpu().double().numpy()
        paths = paths.reshape(2 * degree + 1, *(spec.size_in,) * order, -1)
        ours = [i for i, term in enumerate(terms) if len(term.factors) == order]
        wanted = np.stack([symmetrised(paths[..., k]).ravel() for k in range(paths.shape[-1])], axis=1)
        found = np.zeros((len(terms), wanted.shape[1]))
        if ours:
            basis = np.stack([terms[i].tensor(spec.lmax).ravel() for i in ours], axis=1)
            found[ours] = np.linalg.lstsq(basis, wanted, rcond=None)[0]
            wanted = wanted - basis @ found[ours]
        if abs(wanted).max() > PROJECTION_TOLERANCE * max(1.0, abs(paths).max()):
            raise ValueError(
                f"paths of order {order} to degree {degree}: expected combinations of {len(ours)} polynomials, "
                f"got a remainder of {abs(wanted).max():.1e}"
            )
        columns.append(found)
    return torch.from_numpy(np.concatenate(columns, axis=1))


def _projections(module: SymmetricContraction, spec: tuple[str, str, int]) -> list[Tensor]:
    """For each output irrep its paths as combinations of polynomials, from the coefficients that the module holds."""
    found = contraction(*spec)
    parts: list[Any] = list(module.contractions)
    return [_projection(part, found, degree) for part, degree in zip(parts, found.degrees, strict=True)]


def _accelerate_one(name: str, module: SymmetricContraction) -> None:
    """Give one module the other class."""
    contractions: list[Any] = list(module.contractions)
    correlations = {part.correlation for part in contractions}
    if len(correlations) != 1:
        raise ValueError(f"{name}: expected one correlation for all outputs, got {sorted(correlations)}")
    irreps_in = "+".join(str(irrep.ir) for irrep in module.irreps_in)
    irreps_out = "+".join(str(irrep.ir) for irrep in module.irreps_out)
    try:
        spec = (irreps_in, irreps_out, correlations.pop())
        projections = _projections(module, spec)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    module.__class__ = AcceleratedContraction
    accelerated = cast(AcceleratedContraction, module)
    accelerated._fastuma_spec = spec
    accelerated._fastuma_projections = projections


def accelerate(model: torch.nn.Module) -> torch.nn.Module:
    """Replace the symmetric contractions of a mace-torch model, in place.

    Results agree with the original to rounding, in the type of the model; weights may go on training, and energies,
    forces and Hessians are differentiable as before. On CUDA devices the work is done by Triton kernels, elsewhere by
    their plain formula. Models whose contractions cuEquivariance already replaced, or that were turned into
    TorchScript, have nothing to replace; ``MACECalculator(compile_mode=...)`` builds a model anew, without this.

    Args:
        model: any module with ``mace.modules.SymmetricContraction`` in it; classes derived from that are left alone.

    Returns:
        The same model.

    Raises:
        TypeError: no module.
        ValueError: nothing to replace, or a contraction with other irreps than 0e, 1o, 2e, 3o (all from 0e on, on
            input) or a correlation above 3; then nothing is replaced.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    # A class derived from it has a forward of its own.
    own = (SymmetricContraction, AcceleratedContraction)
    found = {name: m for name, m in model.named_modules() if type(m) in own}
    if not found:
        raise ValueError(f"model: expected modules of class SymmetricContraction, got none in {type(model).__name__}")
    done: list[AcceleratedContraction] = []
    try:
        for name, module in found.items():
            if not isinstance(module, AcceleratedContraction):
                _accelerate_one(name or "model", module)
                done.append(cast(AcceleratedContraction, module))
    except ValueError:
        for module in done:
            _restore_one(module)
        raise
    return model


def _restore_one(module: AcceleratedContraction) -> None:
    """Give one module its old class."""
    module.__class__ = SymmetricContraction
    del module._fastuma_spec, module._fastuma_projections


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`accelerate`, in place; weights stay as they are now.

    Args:
        model: any module; parts that were not accelerated are left alone.

    Returns:
        The same model.
    """
    for module in list(model.modules()):
        if isinstance(module, AcceleratedContraction):
            _restore_one(module)
    return model
