"""Models of mace-torch before and after acceleration: the module itself, and small models in MACECalculator."""

from __future__ import annotations

import copy
import io
import os
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.filters import FrechetCellFilter
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from devices import DEVICES
from e3nn import o3

# What mace-torch and its dependencies warn of on import is not ours, and an environment variable that it sets for the
# whole process, which changes how torch loads files, is not for the other tests.
with warnings.catch_warnings(), patch.dict(os.environ):
    warnings.simplefilter("ignore")
    pytest.importorskip("mace", reason="mace-torch is installed on its own, see the README", exc_type=ImportError)
    import mace.modules
    import mace.modules.symmetric_contraction as original
    from mace.calculators import MACECalculator

from ase_fastuma.kernels._couplings import contraction, symmetrised

from ase_fastuma.mace import AcceleratedContraction, accelerate, restore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mace", "ignore::DeprecationWarning:e3nn")

ALL = "0e+1o+2e+3o"
SPECIES = 5


@pytest.fixture
def float64():
    """Modules are built in float64, as coefficients should be."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def reduced_coefficients(monkeypatch):
    """Let mace-torch build its modules on independent symmetric coefficients, as it does with cuEquivariance."""
    redundant = original.U_matrix_real

    def independent(irreps_in, irreps_out, correlation, **kwargs):
        *names, paths = redundant(irreps_in=irreps_in, irreps_out=irreps_out, correlation=correlation, **kwargs)
        scalar = paths.dim() == correlation + 1
        dense = (paths[None] if scalar else paths).numpy()
        dense = np.stack([symmetrised(dense[..., k]) for k in range(dense.shape[-1])], axis=-1)
        u, s, _ = np.linalg.svd(dense.reshape(-1, dense.shape[-1]), full_matrices=False)
        dense = u[:, s > 1e-9].reshape(*dense.shape[:-1], -1)
        return [*names, torch.from_numpy(dense[0] if scalar else dense)]

    monkeypatch.setattr(original, "U_matrix_real", independent)


def module(irreps_out, channels=6, correlation=3, irreps_in=ALL):
    """mace-torch's module with random weights."""
    torch.manual_seed(0)
    wide_in, wide_out = (o3.Irreps([(channels, ir) for _, ir in o3.Irreps(i)]) for i in (irreps_in, irreps_out))
    return original.SymmetricContraction(wide_in, wide_out, correlation, num_elements=SPECIES)


def differentiate(contract, x, y):
    """Output, gradients of x and weights, and of a function of those: everything that training on forces takes."""
    x = x.clone().requires_grad_()
    weights = [p for p in contract.parameters() if p.requires_grad]
    out = contract(x, y)
    generator = torch.Generator().manual_seed(1)
    g, h = (torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (out, x))
    first = torch.autograd.grad(out, (x, *weights), g, create_graph=True)
    second = torch.autograd.grad((first[0] * h).sum(), (x, *weights))
    return out, *first, *second


@pytest.mark.parametrize(
    ("irreps_in", "irreps_out", "correlation", "reduced"),
    [
        (ALL, "0e", 3, False),
        (ALL, "0e", 3, True),
        (ALL, "0e+1o", 3, True),
        (ALL, "0e+1o", 2, False),
        (ALL, "0e+1o", 2, True),
        (ALL, "0e+1o+2e", 3, False),
        ("0e+1o+2e", "0e+1o+2e", 3, False),
        ("0e+1o+2e", "0e+1o+2e", 3, True),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_module_agrees_in_float64(float64, monkeypatch, device, irreps_in, irreps_out, correlation, reduced):
    """To 1e-12, all derivatives, with the original and with reduced coefficients."""
    if reduced:
        reduced_coefficients(monkeypatch)
    contract = module(irreps_out, irreps_in=irreps_in, correlation=correlation).to(device)
    x = torch.randn(9, 6, o3.Irreps(irreps_in).dim).to(device)
    y = torch.eye(SPECIES, device=device)[[0, 1, 1, 3, 0, 0, 3, 1, 1]]
    want = differentiate(contract, x, y)
    got = differentiate(accelerate(contract), x, y)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize(("irreps_out", "paths", "terms"), [("0e", 28, 13), ("0e+1o", 86, 29), ("0e+1o+2e", 159, 49)])
def test_redundant_paths(float64, irreps_out, paths, terms):
    """How many paths the original has, and how many polynomials they come down to."""
    contract = module(irreps_out)
    assert sum(w.shape[1] for n, w in contract.named_parameters() if w.requires_grad) == paths
    assert len(contraction(ALL, irreps_out, 3).terms) == terms


@pytest.mark.parametrize("irreps_out", ["0e", "0e+1o", "0e+1o+2e"])
@pytest.mark.parametrize("device", DEVICES)
def test_module_agrees_in_float32(float64, device, irreps_out):
    """To 5e-7 of the largest entry, against the original in float64."""
    contract = module(irreps_out, channels=8)
    x = torch.randn(20, 8, 16)
    y = torch.eye(SPECIES)[torch.randint(0, SPECIES, (20,))]
    exact = copy.deepcopy(contract)
    contract.float()
    with torch.no_grad():  # the weights are rounded in both; the exact one's coefficients are not, and nor are ours
        for kept, rounded in zip(exact.parameters(), contract.parameters(), strict=True):
            kept.copy_(rounded)
    want = differentiate(exact, x.float().double(), y)
    got = differentiate(accelerate(contract.to(device)), x.float().to(device), y.float().to(device))
    for a, b in zip(got[:2], want[:2], strict=True):
        assert (a.double().cpu() - b).abs().max() <= 5e-7 * b.abs().max()


def small_model(hidden="4x0e+4x1o", dtype=torch.float64, **changes):
    """A random MACE for copper, oxygen and hydrogen."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block = mace.modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
            arguments = {
                "r_max": 3.5,
                "num_bessel": 6,
                "num_polynomial_cutoff": 5,
                "max_ell": 3,
                "interaction_cls": block,
                "interaction_cls_first": block,
                "num_interactions": 2,
                "num_elements": 3,
                "hidden_irreps": o3.Irreps(hidden),
                "MLP_irreps": o3.Irreps("8x0e"),
                "atomic_energies": np.array([-1.0, -2.0, -3.0]),
                "avg_num_neighbors": 8.0,
                "atomic_numbers": [1, 8, 29],
                "correlation": 3,
                "gate": torch.nn.functional.silu,
                "atomic_inter_scale": 1.0,
                "atomic_inter_shift": 0.0,
            }
            return mace.modules.ScaleShiftMACE(**(arguments | changes))
    finally:
        torch.set_default_dtype(torch.float32)


def calculator(model, device="cpu"):
    """mace-torch's ASE calculator, in the model's type."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MACECalculator(models=model, device=device, default_dtype=dtype)


def structures():
    """A rattled crystal, then a rattled molecule."""
    crystal = bulk("Cu", cubic=True)
    crystal.symbols[1] = "O"
    water = molecule("H2O", vacuum=3.0)
    for atoms in (crystal, water):
        atoms.rattle(0.1, seed=1)
    return crystal, water


@pytest.mark.parametrize("hidden", ["4x0e", "4x0e+4x1o", "4x0e+4x1o+4x2e"])
@pytest.mark.parametrize("device", DEVICES)
def test_calculator_agrees_in_float64(device, hidden):
    """Energy, forces and stress of MACECalculator."""
    model = small_model(hidden)
    plain, fast = calculator(copy.deepcopy(model), device), calculator(accelerate(model), device)
    assert any(isinstance(m, AcceleratedContraction) for m in fast.models[0].modules())
    for atoms in structures():
        plain.calculate(atoms)
        fast.calculate(atoms)
        for name in ("energy", "forces", "stress"):
            np.testing.assert_allclose(fast.results[name], plain.results[name], rtol=1e-10, atol=1e-10)
        assert abs(plain.results["forces"]).max() > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_hessian_agrees(device):
    model = small_model()
    plain, fast = calculator(copy.deepcopy(model), device), calculator(accelerate(model), device)
    water = structures()[1]
    want = plain.get_hessian(water)
    np.testing.assert_allclose(fast.get_hessian(water), want, rtol=1e-9, atol=1e-9)
    assert abs(want).max() > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_calculator_agrees_in_float32(device):
    model = small_model(dtype=torch.float32)
    plain, fast = calculator(copy.deepcopy(model), device), calculator(accelerate(model), device)
    for atoms in structures():
        plain.calculate(atoms)
        fast.calculate(atoms)
        for name in ("energy", "forces", "stress"):
            scale = abs(np.asarray(plain.results[name])).max()
            np.testing.assert_allclose(fast.results[name], plain.results[name], rtol=0, atol=5e-6 * scale)


def test_runs_in_ase():
    """Relaxation of a cell and dynamics of a molecule, as ASE's users do them, go where they go with the original."""

    def run(model):
        crystal, water = structures()
        crystal.calc = water.calc = calculator(model)
        BFGS(FrechetCellFilter(crystal), logfile=None).run(fmax=1e-6, steps=3)
        water.set_velocities(0.02 * np.random.default_rng(0).normal(size=(3, 3)))
        VelocityVerlet(water, 0.5).run(5)
        return crystal.cell.array, crystal.positions, water.positions, water.get_total_energy()

    got, want = run(accelerate(small_model())), run(small_model())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    assert abs(want[0] - structures()[0].cell.array).max() > 1e-3
    assert abs(want[2] - structures()[1].positions).max() > 1e-3


def test_training_step_agrees():
    """One step on energies and forces: the loss goes through the double backward into weights."""
    losses = []
    models = [small_model(), accelerate(small_model())]
    batch = calculator(small_model())._atoms_to_batch(structures()[0]).to_dict()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            out = model({k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()}, training=True)
            loss = out["energy"].square().sum() + out["forces"].square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-10)
    assert losses[0] != losses[1]
    for (name, a), (other, b) in zip(*(m.state_dict().items() for m in models), strict=True):
        assert name == other
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


def test_state_stays_and_comes_back():
    """State dict, parameters and classes, through acceleration, other weights, saving, copying and restoring."""
    model, other = small_model(), small_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parameters = list(model.parameters())
    classes = [type(m) for m in model.modules()]
    (atoms, _), plain = structures(), calculator(copy.deepcopy(other))
    assert accelerate(model) is model
    accelerate(model)  # again: nothing more to do
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    fast = calculator(model)
    atoms.calc = fast
    first = atoms.get_potential_energy()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)  # as torch_ema does: no version of the parameter tells
    fast.reset()
    plain.calculate(atoms)
    assert atoms.get_potential_energy() == pytest.approx(plain.results["energy"], abs=1e-10)
    assert abs(plain.results["energy"] - first) > 1e-6

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        found = calculator(again)
        found.calculate(atoms)
        assert found.results["energy"] == pytest.approx(plain.results["energy"], abs=1e-10)

    assert restore(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert not any(name.startswith("_fastuma") for m in model.modules() for name in vars(m))
    fast.calculate(atoms)
    assert fast.results["energy"] == pytest.approx(plain.results["energy"], abs=1e-10)


def test_a_state_with_other_paths(float64):
    """Coefficients are in the state: those that are loaded count, not those of before."""
    other = module("0e+1o")
    with torch.no_grad():
        for part in other.contractions:
            for name, buffer in part.named_buffers():
                if name.startswith("U_"):
                    buffer.copy_(buffer.flip(-1))
            for weight in part.parameters():
                weight.copy_(torch.randn_like(weight))
    fast = accelerate(module("0e+1o"))
    fast.load_state_dict(other.state_dict())
    x = torch.randn(5, 6, 16)
    y = torch.nn.functional.one_hot(torch.arange(5) % SPECIES, SPECIES).double()
    torch.testing.assert_close(fast(x, y), other(x, y), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=rf"y: expected one column for each of {SPECIES} species, got \[5, 2\]"):
        fast(x, y[:, :2])


class Doubled(original.SymmetricContraction):
    """A class of the user's own."""

    def forward(self, x, y):
        return 2 * super().forward(x, y)


def test_derived_classes_are_left_alone(float64):
    model = torch.nn.Sequential(module("0e"), module("0e"))
    model[1].__class__ = Doubled
    accelerate(model)
    assert type(model[0]) is AcceleratedContraction
    assert type(model[1]) is Doubled


def test_refusals(float64):
    with pytest.raises(ValueError, match="model: expected modules of class SymmetricContraction, got none in Linear"):
        accelerate(torch.nn.Linear(2, 2))
    pair = torch.nn.Sequential(module("0e"), module("0e", irreps_in="0e+1e+2e"))
    with pytest.raises(ValueError, match="1: irreps_in: expected some of 0e, 1o, 2e, 3o"):
        accelerate(pair)
    assert not any(isinstance(m, AcceleratedContraction) for m in pair.modules())
    wrong = module("0e")
    wrong.contractions[0].U_matrix_2[0, 1] += 1.0  # not equivariant
    with pytest.raises(ValueError, match="paths of order 2 to degree 0: expected combinations of 4 polynomials"):
        accelerate(wrong)


def test_agnostic_products():
    """One set of weights for all species."""
    model = small_model(use_agnostic_product=True)
    plain, fast = calculator(copy.deepcopy(model)), calculator(accelerate(model))
    atoms: Atoms = structures()[0]
    plain.calculate(atoms)
    fast.calculate(atoms)
    np.testing.assert_allclose(fast.results["forces"], plain.results["forces"], rtol=1e-10, atol=1e-10)
