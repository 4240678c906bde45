"""Make the demo potential: generate its data, train fairchem's own UMA architecture on it, write a checkpoint.

    python examples/train_demo.py data  --out demo_data.npz
    python examples/train_demo.py train --data demo_data.npz --out demo.pt --minutes 20

The data need tblite and a few minutes of two cores; the training wants a GPU. The result is a checkpoint in
fairchem-core's own format, which `FastUMACalculator` and fairchem-core load like any other.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import demo_data
import hydra
import numpy as np
import torch
from demo_data import TASKS
from fairchem.core.models.uma.nn.mole import MOLE
from fairchem.core.models.uma.outputs import compute_energy
from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint
from torch.nn import functional

CUTOFF = 5.5  # A; EMT's own interaction ends at 5.4
ELEMENTS = 100
WEIGHTS = {"energy": 4.0, "forces": 1.0, "virial": 1.0}  # of errors in eV/atom, eV/A, eV/atom
TASK_WEIGHTS = (0.35, 0.65)  # of the tasks' mean errors: a batch has far more molecules than metal frames
FINAL_ENERGY_WEIGHT = 20.0  # reached in the last part of the training, when forces are nearly learned
WARM_UP, DECAY = 0.05, 0.01  # AdamW; warm-up as a fraction of the budget
CLIP = 10.0  # largest norm of the gradient
EMA_HALF_LIFE = 150  # steps

# --------------------------------------------------------------------------------------------------- data on the device


def neighbours(positions: np.ndarray, cell: np.ndarray, periodic: bool) -> np.ndarray:
    """All directed edges within CUTOFF, int8 [E, 5]: source, target, lattice shift of the source.

    `positions` [N, 3] and `cell` [3, 3] are in A; indices fit in int8 because no frame has 128 atoms.
    """
    shifts = np.zeros((1, 3), int)
    if periodic:
        fractional = np.linalg.solve(cell.T, positions.T).T
        heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)
        reach = np.ceil(CUTOFF / heights + np.ptp(fractional, axis=0)).astype(int)
        shifts = np.stack(np.meshgrid(*[np.arange(-n, n + 1) for n in reach], indexing="ij"), -1).reshape(-1, 3)
    vectors = positions[None, :, None] - positions[None, None] + (shifts @ cell)[:, None, None]
    squared = (vectors**2).sum(-1)  # [shifts, source, target]
    shift, source, target = np.nonzero((squared < CUTOFF**2) & (squared > 1e-8))
    return np.column_stack([source, target, shifts[shift]]).astype(np.int8)


@dataclass(frozen=True)
class Structures:
    """Every frame as flat tensors on one device; per-frame counts stay in numpy, where batches are planned."""

    natoms: np.ndarray  # [S]
    nedges: np.ndarray  # [S]
    frames: dict[str, torch.Tensor]  # one row per frame: counts, starts, task, charge, spin, cell and labels
    atoms: dict[str, torch.Tensor]  # one row per atom: numbers, positions, forces
    edges: torch.Tensor  # [sum E, 5]


def load(path: Path, device: torch.device) -> tuple[Structures, np.ndarray]:
    """The data on `device` with their edges, and the mask of held-out frames."""
    arrays = dict(np.load(path))
    natoms = arrays["natoms"].astype(np.int64)
    starts = np.cumsum(natoms) - natoms
    positions = np.split(arrays["positions"].astype(np.float64), starts[1:])
    edges = [
        neighbours(*structure)
        for structure in zip(positions, arrays["cell"].astype(np.float64), arrays["periodic"], strict=True)
    ]
    nedges = np.array([len(e) for e in edges])

    cell = arrays["cell"].astype(np.float64)
    frames = {
        "natoms": natoms,
        "nedges": nedges,
        "first_atom": starts,
        "first_edge": np.cumsum(nedges) - nedges,
        "charge": arrays["charge"].astype(np.int64),
        "spin": arrays["spin"].astype(np.int64),
        "task": arrays["task"].astype(np.int64),
        "periodic": arrays["periodic"],
        "cell": arrays["cell"],
        "energy": arrays["energy"],
        "virial": np.where(arrays["periodic"], np.linalg.det(cell), 0)[:, None, None] * np.nan_to_num(arrays["stress"]),
    }
    atoms = {
        "numbers": arrays["numbers"].astype(np.int64),
        "positions": arrays["positions"],
        "forces": arrays["forces"],
    }
    structures = Structures(
        natoms,
        nedges,
        {k: torch.as_tensor(v, device=device) for k, v in frames.items()},
        {k: torch.as_tensor(v, device=device) for k, v in atoms.items()},
        torch.as_tensor(np.concatenate(edges), device=device),
    )
    return structures, demo_data.held_out(arrays["group"])


class Batch(dict):
    """The input of fairchem's backbone, without AtomicData's checks, each of which waits for the GPU."""

    def get(self, key: str, default: object = None) -> object:
        return super().get(key, default)


def assemble(structures: Structures, chosen: np.ndarray) -> tuple[Batch, dict[str, torch.Tensor]]:
    """The batch of the `chosen` frames, and their labels; all indexing happens on the device."""
    device = structures.edges.device
    index = torch.as_tensor(chosen).to(device, non_blocking=True)
    frame = {name: values[index] for name, values in structures.frames.items()}
    total_atoms, total_edges = int(structures.natoms[chosen].sum()), int(structures.nedges[chosen].sum())

    def rows(first: torch.Tensor, count: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        system = torch.repeat_interleave(torch.arange(len(chosen), device=device), count, output_size=total)
        offset = torch.cumsum(count, 0) - count
        return system, (first - offset)[system] + torch.arange(total, device=device), offset

    batch, atom_rows, atom_offset = rows(frame["first_atom"], frame["natoms"], total_atoms)
    edge_system, edge_rows, _ = rows(frame["first_edge"], frame["nedges"], total_edges)
    edges = structures.edges[edge_rows].long()
    inputs = Batch(
        pos=structures.atoms["positions"][atom_rows],
        atomic_numbers=structures.atoms["numbers"][atom_rows],
        cell=frame["cell"],
        natoms=frame["natoms"],
        nedges=frame["nedges"],
        batch=batch,
        charge=frame["charge"],
        spin=frame["spin"],
        dataset=frame["task"],
        edge_index=edges[:, :2].T + atom_offset[edge_system],
        cell_offsets=edges[:, 2:].float(),
    )
    labels = {name: frame[name] for name in ("energy", "virial", "periodic")}
    return inputs, labels | {"forces": structures.atoms["forces"][atom_rows]}


def batches(nedges: np.ndarray, chosen: np.ndarray, budget: int) -> list[np.ndarray]:
    """`chosen` in order, cut into runs of about `budget` edges."""
    cuts = np.flatnonzero(np.diff(np.cumsum(nedges[chosen]) // budget)) + 1
    return np.split(chosen, cuts)


def forever(rng: np.random.Generator, nedges: np.ndarray, chosen: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Shuffled batches without end."""
    while True:
        yield from batches(nedges, rng.permutation(chosen), budget)


# ---------------------------------------------------------------------------------------------------------------- model


def model_config(channels: int) -> dict:
    """fairchem's configuration of a small UMA: its MoE backbone and its energy-force-stress head."""
    mapping = {task: task for task in TASKS}
    return {
        "_target_": "fairchem.core.models.base.HydraModel",
        "model_id": "ase-fastuma-demo",
        "pass_through_head_outputs": True,
        "backbone": {
            "model": "fairchem.core.models.uma.escn_moe.eSCNMDMoeBackbone",
            "num_experts": 4,
            "moe_dropout": 0.0,
            "moe_layer_type": "pytorch",
            "use_composition_embedding": True,
            "use_global_embedding": False,
            "max_num_elements": ELEMENTS,
            "sphere_channels": channels,
            "hidden_channels": channels,
            "edge_channels": channels,
            "num_layers": 2,
            "lmax": 2,
            "mmax": 2,
            "otf_graph": True,
            "max_neighbors": 300,
            "use_pbc": True,
            "use_pbc_single": True,
            "cutoff": CUTOFF,
            "distance_function": "gaussian",
            "num_distance_basis": 32,
            "regress_forces": True,
            "regress_stress": True,
            "direct_forces": False,
            "norm_type": "rms_norm_sh",
            "act_type": "gate",
            "ff_type": "spectral",
            "chg_spin_emb_type": "rand_emb",
            "cs_emb_grad": True,
            "dataset_mapping": mapping,
            "charge_balanced_channels": [0, 1, 2],
        },
        "heads": {
            "energyandforcehead": {
                "module": "fairchem.core.models.uma.escn_moe.DatasetSpecificMoEWrapper",
                "head_cls": "fairchem.core.models.uma.escn_md.MLP_EFS_Head",
                "head_kwargs": {"wrap_property": False},
                "dataset_mapping": mapping,
            }
        },
    }


class BatchedMOLE(MOLE):
    """Experts mixed row by row in one matrix product: fairchem's own layer loops over the systems of a batch.

    The result is the same: sum_k c_k W_k x = [W_1 ... W_K] [c_1 x; ...; c_K x].
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coefficients = self.global_mole_tensors.row_coefficients  # [rows, K]
        coefficients = coefficients.view(len(x), *[1] * (x.dim() - 2), -1, 1)
        weights = self.weights.transpose(0, 1).flatten(1)  # [out, K * in]
        return functional.linear((x.unsqueeze(-2) * coefficients).flatten(-2), weights, self.bias)


class Trainee:
    """fairchem's model without what slows the training of many small systems: loops over systems and waits."""

    def __init__(self, model: torch.nn.Module):
        self.model = model.eval()  # nothing in it depends on the mode but logging and plots
        self.backbone = model.backbone
        self.backbone.otf_graph = False
        self.wrapper = model.output_heads["energyandforcehead"]
        for module in model.modules():
            if isinstance(module, MOLE):
                module.__class__ = BatchedMOLE
        self.backbone.set_MOLE_sizes = self._spread_coefficients
        self.backbone.dataset_embedding.forward = self._embed_tasks
        experts = torch.tensor([self.wrapper.dataset_name_to_exp[task] for task in TASKS])
        self.head_coefficients = functional.one_hot(experts, len(TASKS)).to(
            next(model.parameters())
        )  # [tasks, experts]

    def _spread_coefficients(self, nsystems: int, batch_full: torch.Tensor, edge_index: torch.Tensor) -> None:
        experts = self.backbone.global_mole_tensors
        experts.row_coefficients = experts.expert_mixing_coefficients[batch_full[edge_index[1]]]

    def _embed_tasks(self, task: torch.Tensor) -> torch.Tensor:
        table = torch.cat([self.backbone.dataset_embedding.dataset_emb_dict[name].weight for name in TASKS])
        return table[task]

    def __call__(self, batch: Batch, training: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Energy [B], forces [N, 3] and virial, dE/dstrain [B, 3, 3], in the model's unit of energy."""
        embedding = self.backbone(batch)
        self.wrapper.global_mole_tensors.row_coefficients = self.head_coefficients[batch["dataset"][batch["batch"]]]
        block = self.wrapper.head.energy_block
        energy, _ = compute_energy(embedding, block, batch["batch"], len(batch["natoms"]))
        by_position, by_cell = torch.autograd.grad(energy.sum(), [batch["pos"], batch["cell"]], create_graph=training)
        virial = batch["cell"].mT @ by_cell
        virial = virial.index_add(0, batch["batch"], batch["pos"].unsqueeze(2) * by_position.unsqueeze(1))
        return energy, -by_position, (virial + virial.mT) / 2


# ---------------------------------------------------------------------------------------------- references and the loss


@dataclass(frozen=True)
class Scales:
    """Per task: what is taken off the energies, eV per element, and the unit of the model's output, eV."""

    references: torch.Tensor  # float64 [tasks, ELEMENTS]
    rmsd: torch.Tensor  # float64 [tasks]


def fit_scales(structures: Structures, chosen: np.ndarray) -> Scales:
    """Least-squares energies per element (charge states apart) and the root mean square of force components."""
    frames = {name: values.cpu().numpy() for name, values in structures.frames.items()}
    numbers, forces = structures.atoms["numbers"].cpu().numpy(), structures.atoms["forces"].cpu().numpy()
    counts = np.zeros((len(structures.natoms), ELEMENTS))
    np.add.at(counts, (np.repeat(np.arange(len(structures.natoms)), structures.natoms), numbers), 1)
    references, rmsd = np.zeros((len(TASKS), ELEMENTS)), np.zeros(len(TASKS))
    for task in range(len(TASKS)):
        rows = chosen[frames["task"][chosen] == task]
        present = np.flatnonzero(counts[rows].sum(0))
        charged = np.column_stack([frames["charge"][rows] == q for q in (-1, 1)])
        design = np.column_stack([counts[rows][:, present], charged])
        references[task, present] = np.linalg.lstsq(design, frames["energy"][rows], rcond=None)[0][: len(present)]
        atoms = np.isin(np.repeat(np.arange(len(structures.natoms)), structures.natoms), rows)
        rmsd[task] = np.sqrt((forces[atoms].astype(np.float64) ** 2).mean())
    device = structures.edges.device
    return Scales(torch.as_tensor(references, device=device), torch.as_tensor(rmsd, device=device))


def stored_scales(tasks: list[dict], device: torch.device) -> Scales:
    """The scales of a checkpoint that `write_checkpoint` wrote."""
    references = torch.zeros(len(TASKS), ELEMENTS, dtype=torch.float64)
    rmsd = torch.zeros(len(TASKS), dtype=torch.float64)
    for task in tasks:
        index = TASKS.index(task["datasets"][0])
        rmsd[index] = task["normalizer"]["rmsd"]
        if task["property"] == "energy":
            values = task["element_references"]["element_references"]["_args_"][0]
            references[index] = torch.tensor(values, dtype=torch.float64)
    return Scales(references.to(device), rmsd.to(device))


def errors(trainee: Trainee, scales: Scales, batch: Batch, labels: dict, training: bool) -> dict[str, torch.Tensor]:
    """Prediction minus label: energy [B] in eV/atom, forces [N, 3] in eV/A, virial [B, 3, 3] in eV/atom."""
    unit = scales.rmsd[batch["dataset"]]  # [B]
    of_atom = batch["batch"]
    reference = scales.references[batch["dataset"][of_atom], batch["atomic_numbers"]]
    reference = torch.zeros_like(unit).index_add_(0, of_atom, reference)
    energy, forces, virial = trainee(batch, training)
    virial_error = virial * unit[:, None, None] - labels["virial"]
    return {
        "energy": (energy * unit + reference - labels["energy"]) / batch["natoms"],
        "forces": forces * unit[of_atom, None] - labels["forces"],
        "virial": virial_error * (labels["periodic"] / batch["natoms"])[:, None, None],
    }


def loss_of(error: dict[str, torch.Tensor], batch: Batch, task_weights: torch.Tensor, progress: float) -> torch.Tensor:
    """Mean absolute energy and virial errors and mean length of force errors, each averaged within its task first.

    Energies count more towards the end.
    """
    late = min(max((progress - 0.5) / 0.4, 0.0), 1.0)
    energy_weight = WEIGHTS["energy"] * (FINAL_ENERGY_WEIGHT / WEIGHTS["energy"]) ** late

    def mean(values: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        count = torch.zeros_like(task_weights).index_add_(0, task, torch.ones_like(task, dtype=task_weights.dtype))
        return (values * (task_weights / count)[task]).sum()

    of_frame, of_atom = batch["dataset"], batch["dataset"][batch["batch"]]
    return (
        energy_weight * mean(error["energy"].abs(), of_frame)
        + WEIGHTS["forces"] * mean((error["forces"].square().sum(1) + 1e-12).sqrt(), of_atom)
        + WEIGHTS["virial"] * mean(error["virial"].abs().mean((1, 2)), of_frame)
    )


def held_out_errors(trainee: Trainee, scales: Scales, structures: Structures, chosen: np.ndarray, budget: int) -> str:
    """One line: mean absolute errors of energy (meV/atom) and forces (meV/A) per task."""
    sums = torch.zeros(len(TASKS), 4, dtype=torch.float64, device=structures.edges.device)
    for part in batches(structures.nedges, chosen, budget):
        batch, labels = assemble(structures, part)
        error = errors(trainee, scales, batch, labels, training=False)
        force = error["forces"].abs().mean(1).double()
        task, of_atom = batch["dataset"], batch["dataset"][batch["batch"]]
        columns = (error["energy"].abs().double(), torch.ones_like(task).double(), force, torch.ones_like(force))
        for column, (where, value) in enumerate(zip((task, task, of_atom, of_atom), columns, strict=True)):
            sums[:, column].index_add_(0, where, value.detach())
    sums = sums.cpu()
    return "; ".join(
        f"{name} energy {1e3 * row[0] / row[1]:.2f} meV/atom forces {1e3 * row[2] / row[3]:.1f} meV/A"
        for name, row in zip(TASKS, sums, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------- training


def schedule(progress: float) -> float:
    """The learning rate over its peak: linear warm-up, then a cosine down to 1 %."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


class Average:
    """Exponential moving average of the parameters."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters
        self.values = [p.detach().clone() for p in parameters]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        keep = min(0.5 ** (1 / EMA_HALF_LIFE), self.updates / (self.updates + 10))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - keep)

    def swap(self) -> None:
        """Exchange the parameters and their average; a second call undoes the first."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.values, strict=True):
                held = parameter.detach().clone()
                parameter.copy_(value)
                value.copy_(held)


def train(options: argparse.Namespace) -> None:
    """Train for `--minutes` of wall time, saving as it goes."""
    start = time.perf_counter()
    device = torch.device(options.device)
    structures, test = load(options.data, device)
    torch.manual_seed(demo_data.SEED)
    torch.set_float32_matmul_precision("high")  # TF32: noise far below the errors of the fit
    train_rows, test_rows = np.flatnonzero(~test), np.flatnonzero(test)
    config = model_config(options.channels)
    model = hydra.utils.instantiate(config).to(device)
    if options.init:
        stored = torch.load(options.init, map_location="cpu", weights_only=False)  # our own file
        model.load_state_dict(stored.model_state_dict)
        scales = stored_scales(stored.tasks_config, device)  # the weights belong to these
    else:
        scales = fit_scales(structures, train_rows)
    trainee = Trainee(model)
    task_weights = torch.tensor(TASK_WEIGHTS, device=device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    average = Average(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, weight_decay=DECAY, fused=True)
    # Nothing is scaled: the scaler skips a step that is not finite without waiting for the GPU to say so.
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=2**31 - 1)
    stream = forever(np.random.default_rng(demo_data.SEED), structures.nedges, train_rows, options.edges)
    print(
        f"{len(train_rows)} training and {len(test_rows)} held-out frames, {structures.nedges[train_rows].sum()} "
        f"training edges, {sum(p.numel() for p in parameters)} parameters, "
        f"set up in {time.perf_counter() - start:.0f} s",
        flush=True,
    )

    def save() -> None:
        average.swap()
        write_checkpoint(options.out, config, model, scales)
        average.swap()

    def report(step: int, progress: float) -> None:
        average.swap()
        line = held_out_errors(trainee, scales, structures, test_rows, options.edges)
        average.swap()
        elapsed = time.perf_counter() - start
        print(f"{elapsed:6.0f} s  step {step}  {100 * progress:5.1f} %  held out: {line}", flush=True)

    step, next_report = 0, options.report
    while True:
        elapsed = time.perf_counter() - start
        progress = elapsed / (60 * options.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * schedule(progress)
        batch, labels = assemble(structures, next(stream))
        loss = loss_of(errors(trainee, scales, batch, labels, training=True), batch, task_weights, progress)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward(inputs=parameters)  # not to the positions, which require a gradient too
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        scaler.step(optimizer)
        scaler.update()
        average.update()
        step += 1
        if step in (1, 10, 100, 300):
            print(f"{elapsed:6.0f} s  step {step}  loss {loss.item():.3f}  gradient {norm.item():.1f}", flush=True)
        if elapsed > next_report:
            next_report += options.report
            print(f"loss {loss.item():.4f}, gradient {norm.item():.2f}", flush=True)
            save()
            report(step, progress)
    save()
    report(step, 1.0)


# ----------------------------------------------------------------------------------------------------------- checkpoint


def task_config(task: str, prop: str, references: list[float], rmsd: float) -> dict:
    """fairchem's configuration of one output."""
    config = {
        "_target_": "fairchem.core.units.mlip_unit.mlip_unit.Task",
        "name": f"{task}_{prop}",
        "level": "atom" if prop == "forces" else "system",
        "property": prop,
        "loss_fn": {"_target_": "torch.nn.L1Loss"},
        "out_spec": {
            "_target_": "fairchem.core.units.mlip_unit.mlip_unit.OutputSpec",
            "dim": {"energy": [1], "forces": [3], "stress": [1, 9]}[prop],
            "dtype": "float32",
        },
        "normalizer": {
            "_target_": "fairchem.core.modules.normalization.normalizer.Normalizer",
            "mean": 0.0,
            "rmsd": rmsd,
        },
        "datasets": [task],
        "metrics": ["mae"],
    }
    if prop == "energy":
        config["element_references"] = {
            "_target_": "fairchem.core.modules.normalization.element_references.ElementReferences",
            "element_references": {"_target_": "torch.DoubleTensor", "_args_": [references]},
        }
    return config


def write_checkpoint(path: Path, config: dict, model: torch.nn.Module, scales: Scales) -> None:
    """The model as fairchem's inference checkpoint; raw and averaged weights are the same tensors, stored once."""
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    average = {"n_averaged": torch.tensor(1)} | {f"module.{name}": value for name, value in state.items()}
    properties = {"omat": ("energy", "forces", "stress"), "omol": ("energy", "forces")}
    tasks = [
        task_config(task, prop, scales.references[index].tolist(), scales.rmsd[index].item())
        for index, task in enumerate(TASKS)
        for prop in properties[task]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(MLIPInferenceCheckpoint(config, state, average, tasks), partial)
    os.replace(partial, path)


# -------------------------------------------------------------------------------------------------------------- command


def main() -> None:
    """Parse the command line and run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="generate the labelled structures")
    data.add_argument("--out", type=Path, required=True)
    data.add_argument("--scale", type=float, default=1.0, help="size of the set")
    data.add_argument("--workers", type=int, default=2)
    fit = commands.add_parser("train", help="train and write the checkpoint")
    fit.add_argument("--data", type=Path, required=True)
    fit.add_argument("--out", type=Path, required=True)
    fit.add_argument("--minutes", type=float, default=20.0, help="wall time, set-up included")
    fit.add_argument("--channels", type=int, default=64)
    fit.add_argument("--edges", type=int, default=24_000, help="edges per batch")
    fit.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    fit.add_argument("--report", type=float, default=60.0, help="seconds between reports")
    fit.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    fit.add_argument("--init", type=Path, help="start from the weights and scales of this checkpoint")
    options = parser.parse_args()
    if options.command == "data":
        print(demo_data.describe(demo_data.generate(options.out, options.scale, options.workers)))
    else:
        train(options)


if __name__ == "__main__":
    main()
