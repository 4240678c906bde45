"""The symmetric contraction: kernels against the formula, the formula against e3nn's paths, and what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase_fastuma.kernels import reference
from ase_fastuma.kernels import symmetric_contraction as module
from ase_fastuma.kernels._couplings import contraction, symmetrised
from ase_fastuma.kernels.symmetric_contraction import _kernels, symmetric_contraction
from devices import DEVICES, waiting_is_an_error
from e3nn import o3
from edge_graphs import random
from tolerances import TOLERANCE

ALL = "0e+1o+2e+3o"
NUM_SPECIES = 4


def case(num_nodes, channels, irreps_out, device, dtype, irreps_in=ALL, correlation=3, layout="mul_ir"):
    """x, species (the last one absent), weights and the contraction."""
    spec = contraction(irreps_in, irreps_out, correlation)
    shape = (num_nodes, channels, spec.size_in) if layout == "mul_ir" else (num_nodes, spec.size_in, channels)
    x = random(shape, device, dtype).requires_grad_()
    weights = random((NUM_SPECIES, len(spec.terms), channels), device, dtype, 1).requires_grad_()
    generator = torch.Generator().manual_seed(num_nodes)
    species = torch.randint(0, NUM_SPECIES - 1, (num_nodes,), generator=generator).to(device)
    return x, species, weights, spec


def derivatives(out, x, weights, device):
    """The output, its gradients with respect to x and weights, and the gradients of a function of those."""
    g = random(out.shape, device, torch.float64, 2).to(out.dtype).requires_grad_()
    h, u = (random(t.shape, device, torch.float64, 3).to(out.dtype) for t in (x, weights))
    grad_x, grad_w = torch.autograd.grad(out, (x, weights), g, create_graph=True)
    double = torch.autograd.grad((grad_x * h).sum() + (grad_w * u).sum(), (x, weights, g))
    return dict(zip(("out", "x", "w", "xx", "xw", "xg"), (out, grad_x, grad_w, *double), strict=True))


def scaled(tensor, want):
    """A tensor in units of the largest entry of what it should be."""
    return tensor.double() / max(1.0, want.abs().max().item() if want.numel() else 1.0)


FORMS = [
    (ALL, "0e", 3),
    (ALL, "0e+1o", 3),
    (ALL, "0e+1o+2e", 3),
    (ALL, "1o+3o", 3),
    (ALL, "0e+1o+2e", 2),
    (ALL, "0e+3o", 1),
    ("0e+1o+2e", "0e+1o+2e+3o", 3),
    ("8x0e+8x1o", "8x0e+8x1o", 3),
]
# Each form in one layout where kernels are interpreted, three of them in both; each in both on a GPU.
BOTH = (0, 5, 7)
CASES = [("cpu", *form, "ir_mul" if i == 3 else "mul_ir") for i, form in enumerate(FORMS)]
CASES += [("cpu", *FORMS[i], "ir_mul") for i in BOTH]
CASES += [
    pytest.param("cuda", *form, layout, marks=pytest.mark.gpu) for form in FORMS for layout in ("mul_ir", "ir_mul")
]


@pytest.mark.parametrize(("device", "irreps_in", "irreps_out", "correlation", "layout"), CASES)
def test_all_derivatives_equal_the_reference(device, irreps_in, irreps_out, correlation, layout):
    arguments = {"irreps_in": irreps_in, "correlation": correlation, "layout": layout}
    x, species, weights, spec = case(13, 5, irreps_out, device, torch.float64, **arguments)
    got = derivatives(symmetric_contraction(x, species, weights, irreps_out, **arguments), x, weights, device)
    want = derivatives(reference.symmetric_contraction(x, species, weights, spec, layout), x, weights, device)
    for name, value in want.items():
        message = lambda found, name=name: f"{name}: {found}"  # noqa: E731
        torch.testing.assert_close(scaled(got[name], value), scaled(value, value), **TOLERANCE[x.dtype], msg=message)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_nodes", "channels"), [(0, 3), (1, 1), (1, 40), (17, 7)])
@pytest.mark.parametrize("device", DEVICES)
def test_sizes_and_types(device, dtype, num_nodes, channels, layout):
    x, species, weights, spec = case(num_nodes, channels, "0e", device, dtype, layout=layout)
    got = derivatives(symmetric_contraction(x, species, weights, "0e", layout=layout), x, weights, device)
    x, weights = (t.detach().double().requires_grad_() for t in (x, weights))
    want = derivatives(reference.symmetric_contraction(x, species, weights, spec, layout), x, weights, device)
    for name, value in want.items():
        assert got[name].dtype == dtype
        torch.testing.assert_close(scaled(got[name], value), scaled(value, value), **TOLERANCE[dtype])


@pytest.mark.parametrize("species", [[2] * 5, [0, 1, 2, 3, 0], [3, 3, 0, 0, 3]])
@pytest.mark.parametrize("device", DEVICES)
def test_species_present(device, species):
    """One species, all of them, some: absent ones get a gradient of exactly zero, the others that of their nodes."""
    x, _, weights, spec = case(5, 3, "0e+1o", device, torch.float64)
    species = torch.tensor(species, dtype=torch.int32, device=device)
    out = symmetric_contraction(x, species, weights, "0e+1o")
    want = reference.symmetric_contraction(x, species, weights, spec, "mul_ir")
    g = random(out.shape, device, torch.float64, 2)
    (got,), (want,) = (torch.autograd.grad(o, weights, g) for o in (out, want))
    torch.testing.assert_close(got, want, **TOLERANCE[x.dtype])
    for z in set(range(NUM_SPECIES)) - set(species.tolist()):
        assert (got[z] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_the_forward_pass_equal_a_sort(device, monkeypatch):
    """Bit for bit the same results where nodes are too many for the forward pass to group them."""
    results = []
    for most in (module.MAX_ORDERED, 0):
        monkeypatch.setattr(module, "MAX_ORDERED", most)
        x, species, weights, _ = case(19, 2, "0e", device, torch.float32)
        results.append(derivatives(symmetric_contraction(x, species, weights, "0e"), x, weights, device))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def paths(degree, correlation):
    """All coupling trees of degrees up to 3 to one degree, through any intermediate irreps, from e3nn's 3j symbols."""
    found = [(o3.Irrep(d, (-1) ** d), np.eye(16)[d * d : (d + 1) ** 2]) for d in range(4)]
    leaves = list(found)
    for _ in range(correlation - 1):
        found = [
            (ir, np.einsum("ijk,i...,jb->k...b", o3.wigner_3j(left.l, right.l, ir.l, dtype=torch.float64), a, b))
            for left, a in found
            for right, b in leaves
            for ir in left * right
        ]
    return [symmetrised(a) for ir, a in found if ir == o3.Irrep(degree, (-1) ** degree)]


@pytest.mark.parametrize(("correlation", "numbers"), [(1, (1, 1, 1, 1)), (2, (4, 3, 5, 3)), (3, (8, 12, 14, 15))])
def test_terms_are_a_basis_of_all_paths(correlation, numbers):
    """As many as there are independent paths, and the same space: every path is a combination of them."""
    for degree, number in enumerate(numbers):
        terms = [t for t in contraction(ALL, ALL, 3).terms_of(degree) if len(t.factors) == correlation]
        assert len(terms) == number
        basis = np.stack([t.tensor(3).ravel() for t in terms], axis=1)
        wanted = np.stack([p.ravel() for p in paths(degree, correlation)], axis=1)
        assert np.linalg.matrix_rank(wanted, tol=1e-8) == number
        remainder = wanted - basis @ np.linalg.lstsq(basis, wanted, rcond=None)[0]
        assert abs(remainder).max() < 1e-13


def test_reference_equals_its_coefficients():
    """Trees coupled step by step against one dense tensor a term."""
    x, species, weights, spec = case(3, 2, "0e+1o+2e+3o", "cpu", torch.float64)
    blocks = dict.fromkeys(spec.degrees, 0.0)
    for k, term in enumerate(spec.terms):
        value = torch.from_numpy(term.tensor(spec.lmax)).expand(3, 2, *(-1,) * (1 + len(term.factors)))
        for _ in term.factors:
            value = torch.einsum("nc...a,nca->nc...", value, x)
        blocks[term.degree] = blocks[term.degree] + weights[species, k][:, :, None] * value
    want = torch.cat([b.flatten(1) for b in blocks.values()], dim=1)
    torch.testing.assert_close(symmetric_contraction(x, species, weights, "0e+1o+2e+3o"), want, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences(device):
    x, species, weights, _ = case(2, 1, "0e+1o", device, torch.float64)
    function = lambda x, w: symmetric_contraction(x, species, w, "0e+1o")  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, weights), fast_mode=True)


@pytest.mark.parametrize("correlation", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_third_derivatives(device, correlation):
    """A gradient of a gradient of a gradient equals that of the reference."""
    x, species, weights, spec = case(3, 2, "0e+1o", device, torch.float64, correlation=correlation)

    def third(out):
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), (x, weights))

    got = third(symmetric_contraction(x, species, weights, "0e+1o", correlation=correlation))
    want = third(reference.symmetric_contraction(x, species, weights, spec, "mul_ir"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(scaled(a, b), scaled(b, b), **TOLERANCE[x.dtype])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_batched_derivatives_equal_a_loop(device, frozen):
    """Rows of a Hessian through torch.vmap, as mace-torch takes them; with weights that take gradients too."""
    x, species, weights, _ = case(3, 2, "0e", device, torch.float64)
    wanted = (x,) if frozen else (x, weights)
    energy = symmetric_contraction(x, species, weights.detach() if frozen else weights, "0e").square().sum()
    (grad,) = torch.autograd.grad(energy, x, create_graph=True)
    rows = torch.eye(x.numel(), dtype=x.dtype, device=device)[:2].view(2, *x.shape)
    got = torch.vmap(lambda v: torch.autograd.grad(grad, wanted, v, retain_graph=True))(rows)
    want = [torch.autograd.grad(grad, wanted, v, retain_graph=True) for v in rows]
    for a, b in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b), **TOLERANCE[x.dtype])


def representation(rotation):
    """How features turn, [16, 16], from e3nn's harmonics of turned points; its own matrices are good to 1e-6 only."""
    points = random((64, 3), "cpu", torch.float64)
    before, after = (o3.spherical_harmonics([0, 1, 2, 3], p, False) for p in (points, points @ rotation.T))
    return torch.linalg.lstsq(before, after).solution.T


def test_no_gradient_of_weights_unless_asked(monkeypatch):
    """Not for forces, nor for a Hessian, of weights that do take gradients; but wherever one asks for it."""
    launched = []
    launch = module._launch_walks

    def counted(kernels, name, *arguments):
        launched.append(name)
        return launch(kernels, name, *arguments)

    monkeypatch.setattr(module, "_launch_walks", counted)
    x, species, weights, _ = case(2, 1, "0e", "cpu", torch.float64)
    scaled_weights = weights * 2.0
    for w in (weights, scaled_weights):
        out = symmetric_contraction(x, species, w, "0e").square().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        torch.autograd.grad(grad.sum(), x, retain_graph=True)
        assert launched == []
        torch.autograd.grad(out, w, retain_graph=True)
        assert launched == ["grad_w"]
        torch.autograd.grad(grad.square().sum(), (x, w), retain_graph=True)
        assert sorted(launched) == ["double_w", "grad_w", "grad_xw"]
        launched.clear()
    grad.square().sum().backward()
    assert sorted(launched) == ["double_w", "grad_xw"]
    assert weights.grad.abs().max() > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("device", DEVICES)
def test_equivariance(device, seed):
    """Turning the input turns the output; rotations with and without inversion."""
    x, species, weights, spec = case(4, 3, "0e+1o+2e+3o", device, torch.float64)
    rotation = torch.linalg.qr(random((3, 3), "cpu", torch.float64, seed)).Q * (-1) ** seed
    turn = representation(rotation).to(device)
    arguments = (species, weights, "0e+1o+2e+3o")
    out = symmetric_contraction(x, *arguments, layout="mul_ir")
    turned = symmetric_contraction(x @ turn.T, *arguments, layout="mul_ir")
    first = 0
    for degree in spec.degrees:
        last = first + 3 * (2 * degree + 1)
        a, b = (t[:, first:last].view(4, 3, -1) for t in (out, turned))
        block = slice(degree * degree, (degree + 1) ** 2)
        torch.testing.assert_close(a @ turn[block, block].T, b, rtol=1e-9, atol=1e-9, msg=f"{degree}: {rotation}")
        first = last


@pytest.mark.parametrize("device", DEVICES)
def test_results_repeat_bitwise(device):
    x, species, weights, _ = case(25, 3, "0e", device, torch.float32)
    runs = [derivatives(symmetric_contraction(x, species, weights, "0e"), x, weights, device) for _ in range(2)]
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_agree(device):
    x, species, weights, _ = case(9, 5, "0e+1o", device, torch.float32)
    a = symmetric_contraction(x, species, weights, "0e+1o")
    b = symmetric_contraction(x.transpose(1, 2), species, weights, "0e+1o", layout="ir_mul")
    b = torch.cat([part.transpose(1, 2).flatten(1) for part in (b[:, :1], b[:, 1:])], dim=1)
    torch.testing.assert_close(scaled(a, a), scaled(b, a), **TOLERANCE[x.dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_half_and_strided_input(device):
    x, species, weights, _ = case(5, 3, "0e+1o", device, torch.float32)
    half = symmetric_contraction(x.half(), species, weights, "0e+1o")
    assert half.dtype == torch.float32
    assert torch.equal(half, symmetric_contraction(x.half().float(), species, weights, "0e+1o"))
    wide = torch.stack([x, x], dim=3).select(3, 0)
    assert not wide.is_contiguous()
    got, want = (symmetric_contraction(t, species, weights, "0e+1o") for t in (wide, x))
    assert torch.equal(got, want)
    # the gradient of a sum is an expanded number
    got, want = (torch.autograd.grad(o.sum(), x)[0] for o in (got, want))
    assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_an_unknown_species_shows(device):
    x, species, weights, _ = case(6, 3, "0e+1o", device, torch.float32)
    species[2], species[4] = -1, NUM_SPECIES
    out = symmetric_contraction(x, species, weights, "0e+1o")
    known = torch.tensor([True, True, False, True, False, True], device=device)
    assert out[~known].isnan().all()
    assert out[known].isfinite().all()
    grad_x, grad_w = torch.autograd.grad(out[known].sum(), (x, weights))
    assert grad_x[known].isfinite().all()
    assert grad_w.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, 9)}, ValueError, r"x: expected shape \[any, any, 16\], got \[2, 3, 9\]"),
        ({"x": torch.zeros(2, 3, 16, dtype=torch.int64)}, TypeError, "x: expected a floating-point tensor"),
        ({"weights": torch.zeros(4, 12, 3)}, ValueError, r"weights: expected shape \[any, 13, 3\], got \[4, 12, 3\]"),
        ({"weights": torch.zeros(4, 13, 3, dtype=torch.float64)}, TypeError, "weights: expected torch.float32"),
        ({"weights": torch.zeros(0, 13, 3)}, ValueError, "weights: expected at least one species"),
        ({"species": torch.zeros(2)}, TypeError, "species: expected a tensor of int32 or int64, got torch.float32"),
        ({"species": torch.zeros(3, dtype=torch.int64)}, ValueError, r"species: expected shape \[2\], got \[3\]"),
        ({"irreps_out": "0o"}, ValueError, "irreps_out: expected some of 0e, 1o, 2e, 3o.*'0o'"),
        ({"irreps_out": "1o+0e"}, ValueError, "irreps_out: expected some of 0e, 1o, 2e, 3o.*'1o.0e'"),
        ({"irreps_in": "1o+2e"}, ValueError, "irreps_in: expected all degrees from 0e on, got '1o.2e'"),
        ({"correlation": 4}, ValueError, "correlation: expected 1, 2 or 3, got 4"),
        (
            {"irreps_in": "0e", "irreps_out": "1o"},
            ValueError,
            "irreps_out: expected irreps that 3 factors of '0e' reach",
        ),
        ({"layout": "ncd"}, ValueError, "layout: expected 'mul_ir' or 'ir_mul', got 'ncd'"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {
        "x": torch.zeros(2, 3, 16),
        "species": torch.zeros(2, dtype=torch.int64),
        "weights": torch.zeros(4, 13, 3),
        "irreps_out": "0e",
    }
    with pytest.raises(error, match=message):
        symmetric_contraction(**(arguments | changes))


@pytest.mark.parametrize(
    ("irreps_out", "forward", "backward", "double"),
    [("0e", 150, 360, 790), ("0e+1o", 291, 660, 1460), ("0e+1o+2e", 436, 960, 2140)],
)
def test_operations(irreps_out, forward, backward, double):
    """What the trees are for: a flat polynomial takes 235, 958 and 2264 operations forward."""
    found = _kernels(contraction(ALL, irreps_out, 3), "mul_ir").operations()
    assert found["forward"] <= forward
    assert found["backward x"] <= backward
    assert found["double"] <= double


SHARED = {"forward": 1024, "grad_xw": 512}
# As in kernels/README.md, forward passes with groups; the double backward of Triton 3.9, which takes most.
REGISTERS = {
    "0e forward": 72,
    "0e grad_x": 64,
    "0e grad_xw": 96,
    "0e double": 96,
    "0e+1o forward": 72,
    "0e+1o grad_x": 80,
    "0e+1o grad_xw": 168,
}


def test_kernels_fit_into_registers():
    """Compiled for the H100 without a GPU: no spills, wide loads and stores, and as few registers as documented."""
    script = Path(__file__).with_name("compile_contraction.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        assert found["local"] == 0, (name, found)
        # Sums over comparisons in the forward pass, and whole blocks of gradients; nothing else passes between lanes.
        assert found["shared"] <= {"0e grad_x": 2048}.get(name, SHARED.get(name.split()[1], 0)), (name, found)
        assert found["wide_loads"] >= 4, (name, found)
        assert found["wide_stores"] == (0 if "forward" in name else 4), (name, found)
        assert found["registers"] <= REGISTERS[name], (name, found)


@pytest.mark.gpu
def test_graph_replay_and_no_waiting():
    """Forward, gradients of x and weights and the double backward in one CUDA graph; no call waits for the device."""
    x, species, weights, _ = case(300, 64, "0e+1o", "cuda", torch.float32)
    derivatives(symmetric_contraction(x, species, weights, "0e+1o"), x, weights, "cuda")  # compile
    g = random((300, 256), "cuda", torch.float32, 2).requires_grad_()
    h = random(x.shape, "cuda", torch.float32, 3)

    def step():
        out = symmetric_contraction(x, species, weights, "0e+1o")
        grad_x, grad_w = torch.autograd.grad(out, (x, weights), g, create_graph=True)
        return out, grad_x, grad_w, *torch.autograd.grad(grad_x, (x, weights, g), h)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with waiting_is_an_error():
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [result.detach() for result in step()]  # torch warns where a graph of operations meets two streams
    with torch.no_grad():
        x.copy_(random(x.shape, "cuda", torch.float32, 7))
        species.copy_(species.flip(0))
    graph.replay()
    for a, b in zip(recorded, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_species_out_of_range_on_a_cpu(wrong, monkeypatch):
    """The plain formula would take weights from the end for negative ones."""
    monkeypatch.setattr("ase_fastuma.kernels.symmetric_contraction.runs_kernels", lambda _: False)
    x, _, weights, _ = case(2, 2, "0e", "cpu", torch.float64)
    species = torch.tensor([0, wrong])
    with pytest.raises(IndexError, match=rf"species: expected 0 to 2, got {wrong}"):
        symmetric_contraction(x, species, weights[:3], "0e")
