"""fairchem-core's own model in its general mode, behind the interface of the backends.

Nothing is fused, compiled or padded here, and every UMA and eSEN that fairchem-core can build runs: this is the way for
what the fused backend does not cover, and the reference that the fused backend is tested against.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ase_fastuma.checkpoint import Checkpoint, CheckpointError
from ase_fastuma.experts import mixture_key
from ase_fastuma.hessian import at_a_time, hessian_of_products, products
from ase_fastuma.kernels.operand import ieee_products
from ase_fastuma.memory import free_memory
from ase_fastuma.settings import Settings
from ase_fastuma.system import System

# Merged models kept; each holds the model's weights once (24 MB for UMA-S).
_CACHED_MODELS = 16
# Numbers that an evaluation with forces holds at its peak for each edge, layer and channel: 110 as torch's profiler
# counts them for 32 to 256 Cu atoms, and 99 by the peak memory of 1000 on a GPU.
_NUMBERS_OF_AN_EDGE = 110
# A pass of many systems on a CPU: 48 small molecules take 7.5 s in passes of 8 MB, 1.8 s of 128 MB, 2.3 s of 512 MB.
_CPU_PASS_BYTES = 1 << 27


class GeneralBackend:
    """Runs fairchem-core's model in float32, or in float64 where the settings say so.

    The experts are merged once for each (reduced composition, charge, spin, task); merged models are kept, the least
    recently used one giving way. A pass of systems that differ in these mixes the experts as it runs. The unmerged
    model stays on the CPU and shares its weights with the checkpoint; on another device, such passes use a copy of it.
    Two things differ from fairchem-core's own use of it: sums over atoms are in float64, and results are repeatable on
    the CPU (on a GPU its sums over neighbours are not).
    """

    name = "general"

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        """`settings.device` names the device. Raises CheckpointError where weights and architecture disagree."""
        architecture = checkpoint.architecture
        self._checkpoint = checkpoint
        self._settings = settings
        self._device = torch.device(settings.device or "cpu")
        self._dtype = torch.float64 if settings.precision == "float64" else torch.float32
        # fairchem-core merges the experts of the SO(2) layers, in all layers or none.
        self._merges = settings.merge_mole and architecture.moe_type == "so2" and architecture.layers_moe is None
        self._models: OrderedDict[tuple, Any] = OrderedDict()
        with construction(self._dtype):
            self._template = _build(checkpoint, settings.activation_checkpointing).to(self._dtype)

    @property
    def precision(self) -> str:
        """The precision in force."""
        return "float64" if self._dtype == torch.float64 else "float32"

    def prepare(self, system: System) -> None:
        """Merge the experts for the system, unless that has been done."""
        self._model([system])

    def evaluate(self, system: System, properties: frozenset[str]) -> dict[str, np.ndarray]:
        """See `Backend.evaluate`. Raises ValueError where two atoms coincide."""
        return self.evaluate_many([system], properties)[0]

    def evaluate_many(self, systems: Sequence[System], properties: frozenset[str]) -> list[dict[str, np.ndarray]]:
        """See `Backend.evaluate_many`. Raises ValueError where two atoms coincide."""
        for system in systems:
            system.check_distinct()
        energies, output = self._run(systems, properties)
        outputs = {"energies": _numpy(energies).reshape(-1)}
        for system in systems:
            prefix = self._checkpoint.tasks[system.task].prefix
            for name in self._offered(system, properties) - {"energy", "energies"}:
                if prefix + name not in outputs:
                    outputs[prefix + name] = _numpy(_find(output, prefix + name, name))
        ends = np.cumsum([len(system.numbers) for system in systems])
        return [
            self._results(system, outputs, i, slice(end - len(system.numbers), end), properties)
            for i, (system, end) in enumerate(zip(systems, ends, strict=True))
        ]

    def _run(self, systems: Sequence[System], properties: frozenset[str]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The model's outputs: of each atom towards the energy [N, 1], and all others by name; not yet physical."""
        model = self._model(systems)
        direct = self._checkpoint.architecture.direct_forces
        wanted = properties if not direct else properties - {"stress"}
        _request(model, wanted)
        derivatives = not direct and bool(wanted & {"forces", "stress"})
        with self._arithmetic(derivatives), self._energies_of_atoms(model) as energies:
            output = model(_data(systems, self._dtype).to(self._device))
        return energies[0].detach(), output

    @contextmanager
    def _arithmetic(self, derivatives: bool) -> Iterator[None]:
        """Whatever mode the caller is in: gradients exactly where needed, IEEE arithmetic, no half precision."""
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(derivatives),
            torch.autocast(self._device.type, enabled=False),
            ieee_products(),
            _fixed_rolls(self._device),
            _beta_warnings_ignored(),
            _root_logger_as_it_was(),
        ):
            yield

    @contextmanager
    def _energies_of_atoms(self, model: Any) -> Iterator[list[torch.Tensor]]:
        """A list to which each pass through the model adds what its atoms give to the energy [N, 1]."""
        head = model.output_heads[self._checkpoint.architecture.head_name]
        block = getattr(head, "head", head).energy_block
        found: list[torch.Tensor] = []
        hook = block.register_forward_hook(lambda _module, _inputs, output: found.append(output))
        try:
            yield found
        finally:
            hook.remove()

    def hessian(self, system: System, indices: np.ndarray) -> np.ndarray:
        """See `Backend.hessian`."""
        return hessian_of_products(self, system, indices)

    def hessian_products(self, system: System, directions: np.ndarray) -> np.ndarray:
        """See `Backend.hessian_products`. Raises ValueError where two atoms coincide."""
        system.check_distinct()
        model = self._model([system])
        _request(model, frozenset({"energy"}))
        positions = torch.tensor(system.wrapped, device=self._device)

        def energy(displacements: torch.Tensor) -> torch.Tensor:
            data = _data([system], self._dtype).to(self._device)
            data.pos = (positions + displacements).to(self._dtype)
            with self._energies_of_atoms(model) as energies:
                model(data)
            return energies[0].double().sum()

        with self._arithmetic(True):
            found = products(energy, directions, self._device, partial(self._directions_at_a_time, system))
        return found * self._checkpoint.tasks[system.task].rmsd

    def _directions_at_a_time(self, system: System) -> int:
        architecture = self._checkpoint.architecture
        numbers = system.estimated_edges(architecture.cutoff) * self._channels * architecture.num_layers
        return at_a_time(numbers, self._dtype, self._device)

    @property
    def _channels(self) -> int:
        return max(self._checkpoint.architecture.sphere_channels, self._checkpoint.architecture.hidden_channels)

    def _offered(self, system: System, properties: frozenset[str]) -> frozenset[str]:
        """Those of the properties that the model has for the system's task."""
        if not self._checkpoint.architecture.direct_forces:
            return properties
        return properties & {"energy", "energies", *self._checkpoint.tasks[system.task].properties}

    def _results(
        self, system: System, outputs: dict[str, np.ndarray], index: int, atoms: slice, properties: frozenset[str]
    ) -> dict[str, np.ndarray]:
        """One system's share of a pass, in physical units; arrays that the caller owns."""
        task, numbers = self._checkpoint.tasks[system.task], system.numbers
        references = 0.0 if task.element_references is None else task.element_references[numbers]
        energies = outputs["energies"][atoms] * task.rmsd + task.mean / len(numbers) + references
        results = {"energies": energies, "energy": energies.sum()}
        for name, chosen, shape, scale in (
            ("forces", atoms, (-1, 3), task.forces_rmsd),
            ("stress", index, (3, 3), task.rmsd),
        ):
            if task.prefix + name in outputs:
                results[name] = outputs[task.prefix + name][chosen].reshape(shape) * scale
        return {name: np.array(value) for name, value in results.items() if name in properties}

    def footprint(self, system: System) -> float:
        """See `Backend.footprint`: in bytes."""
        architecture = self._checkpoint.architecture
        edges = system.estimated_edges(architecture.cutoff) + len(system.numbers)  # atoms take room as well
        numbers = _NUMBERS_OF_AN_EDGE * self._channels * architecture.num_layers * edges + self._mixed_weights
        return self._dtype.itemsize * numbers

    def shared_footprint(self, system: System) -> tuple[Hashable, float]:
        """See `Backend.shared_footprint`: nothing, since experts are mixed for each system."""
        return None, 0.0

    def capacity(self) -> float:
        """See `Backend.capacity`."""
        if self._device.type != "cuda":
            return _CPU_PASS_BYTES
        return free_memory(self._device) / 2

    @cached_property
    def _mixed_weights(self) -> int:
        """Numbers in the weights of one system where experts are mixed in the pass."""
        experts = max(1, self._checkpoint.architecture.num_experts)
        return sum(
            weight.numel() // experts
            for name, weight in self._checkpoint.state.items()
            if name.startswith("backbone.") and name.endswith(".weights")
        )

    def describe(self) -> dict[str, str]:
        """What runs, for the report."""
        from importlib.metadata import version

        return {
            "implementation": f"fairchem-core {version('fairchem-core')}, execution mode general",
            "precision": self.precision,
            "experts": f"merged ({len(self._models)} in the cache)" if self._merges else "mixed in each evaluation",
        }

    @torch.inference_mode(False)
    def _model(self, systems: Sequence[System]) -> Any:
        """The model for the systems: merged where one mixture serves all of them, else the one for any."""
        keys = {mixture_key(self._checkpoint.architecture, system) for system in systems}
        merge = self._merges and len(keys) == 1
        key = keys.pop() if merge else ()
        model = self._models.get(key)
        if model is None:
            model = self._merged(systems[0]) if merge else self._unmerged()
            model = model.to(self._device).requires_grad_(False).eval()
            model.backbone.balance_channels = partial(_balance, model.backbone)
            self._models[key] = model
            if len(self._models) > _CACHED_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return model

    def _unmerged(self) -> Any:
        """A model that mixes the experts in each pass. Where others are merged from the template, it stays as it is."""
        if not self._merges:
            return self._template
        weights = {id(weight): torch.nn.Parameter(weight.to(self._device)) for weight in self._template.parameters()}
        return copy.deepcopy(self._template, weights)

    def _merged(self, system: System) -> Any:
        from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

        # Merging rebuilds part of the model in place, so it works on a copy; the copy shares all weights.
        shared = {id(tensor): tensor for tensor in (*self._template.parameters(), *self._template.buffers())}
        model = copy.deepcopy(self._template, shared)
        with construction(self._dtype), ieee_products(), torch.no_grad():
            model.prepare_for_inference(
                _data([system], self._dtype), InferenceSettings(merge_mole=True, activation_checkpointing=False)
            )
        return model


def _build(checkpoint: Checkpoint, activation_checkpointing: bool) -> Any:
    """fairchem-core's model with the checkpoint's weights, experts not merged, on the CPU."""
    import_fairchem()
    from fairchem.core.models.base import HydraModel

    config = copy.deepcopy({key: value for key, value in checkpoint.config.items() if key != "_target_"})
    config["backbone"] |= {
        "always_use_pbc": False,  # axes that the structure leaves open stay open
        "otf_graph": True,
        "radius_pbc_version": 2,
        "use_quaternion_wigner": True,
        "activation_checkpointing": activation_checkpointing,
        "execution_mode": "general",
    }
    model = HydraModel(**config)
    # Weights are assigned, not copied: model and checkpoint share them.
    outcome = model.load_state_dict(checkpoint.state, strict=False, assign=True)
    if outcome.missing_keys or outcome.unexpected_keys:
        shown = [f"missing {key}" for key in outcome.missing_keys] + [
            f"unknown {key}" for key in outcome.unexpected_keys
        ]
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        raise CheckpointError(f"{checkpoint.path}: weights do not fit the architecture: {', '.join(shown[:5])}{more}")
    return model


def _data(systems: Sequence[System], dtype: torch.dtype) -> Any:
    """The systems as fairchem-core's batch, on the CPU; edges are left to the model."""
    from fairchem.core.datasets.atomic_data import AtomicData

    sizes = torch.tensor([len(system.numbers) for system in systems])
    return AtomicData(
        pos=torch.tensor(np.concatenate([system.wrapped for system in systems]), dtype=dtype),
        atomic_numbers=torch.tensor(np.concatenate([system.numbers for system in systems])),
        cell=torch.tensor(np.stack([system.cell for system in systems]), dtype=dtype),
        pbc=torch.tensor(np.stack([system.pbc for system in systems])),
        natoms=sizes,
        edge_index=torch.empty((2, 0), dtype=torch.long),
        cell_offsets=torch.empty((0, 3), dtype=dtype),
        nedges=torch.zeros_like(sizes),
        charge=torch.tensor([system.charge for system in systems]),
        spin=torch.tensor([system.spin for system in systems]),
        fixed=torch.zeros(int(sizes.sum()), dtype=torch.long),
        tags=torch.zeros(int(sizes.sum()), dtype=torch.long),
        batch=torch.repeat_interleave(sizes),
        sid=[""] * len(systems),
        dataset=[system.task for system in systems],
    )


def _balance(
    backbone: Any,
    x_message_prime: torch.Tensor,
    charge: torch.Tensor,
    spin: torch.Tensor,
    natoms: torch.Tensor,
    batch: torch.Tensor,
) -> torch.Tensor:
    """Shift the balanced channels [N, coefficients, C] so that they add up to charge and spin, with sums in float64.

    In float32 the rounding of the sum, which all atoms share, makes the energy of a large cell differ from that of its
    parts. Takes fairchem-core's arguments: charge, spin and natoms [systems], batch [N] with the system of each atom.
    """
    x = x_message_prime.clone()
    for start, end, total in (
        (backbone.charge_channel_start, backbone.charge_channel_end, charge.double()),
        (backbone.spin_channel_start, backbone.spin_channel_end, spin.double() - 1),
    ):
        excess = -total[:, None].expand(-1, end - start)
        excess = excess.index_add(0, batch, x_message_prime[:, 0, start:end].double()) / natoms[:, None]
        x[:, 0, start:end] -= excess[batch].to(x.dtype)
    return x


def _request(model: torch.nn.Module, properties: frozenset[str]) -> None:
    """Switch on the derivatives that are asked for, and no others. Merging leaves several copies of the switches."""
    for module in model.modules():
        switches = getattr(module, "regress_config", None)
        if switches is not None and not switches.direct_forces:
            switches.forces = "forces" in properties
            switches.stress = "stress" in properties


def _find(output: dict[str, Any], task_name: str, name: str) -> torch.Tensor:
    """An output of the model, which heads wrap in a dictionary or not."""
    value = output[task_name]
    return value[name] if isinstance(value, dict) else value


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()


@contextmanager
def construction(dtype: torch.dtype) -> Iterator[None]:
    """Build modules on the CPU in `dtype`, and leave torch's random generator, default dtype and device as they were.

    fairchem-core creates some constants in the default dtype; converting them later would round them to float32.
    """
    before = torch.get_default_dtype()
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.device("cpu"), _beta_warnings_ignored():
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def _fixed_rolls(device: torch.device) -> Iterator[None]:
    """fairchem-core draws a roll about each edge at random, which results do not depend on beyond rounding.

    Here the draws are the same in each evaluation, and the process's own random numbers stay as they are.
    """
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device.index] if on_cuda else []):
        generator = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
        generator.manual_seed(0)
        yield


@contextmanager
def _beta_warnings_ignored() -> Iterator[None]:
    """torch warns that index_reduce, which the mixing of experts uses, is in beta; that helps no user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="index_reduce\\(\\) is in beta", category=UserWarning)
        yield


@contextmanager
def _root_logger_as_it_was() -> Iterator[None]:
    """fairchem-core warns through the root logger, which would set itself up to print where no one has done so."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)


def import_fairchem() -> None:
    """Import fairchem-core's models without their traces: warning filters, environment variables, a line on stderr."""
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available() and find_spec("nvalchemiops") is not None:
            _import_silently("nvalchemiops.torch.neighbors")
        import fairchem.core.models.uma.escn_moe  # noqa: F401
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


def _import_silently(module: str) -> None:
    """Import a module whose native library reports a missing CUDA driver on the process's stderr, below Python's."""
    from importlib import import_module

    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        import_module(module)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
