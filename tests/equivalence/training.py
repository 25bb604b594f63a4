"""Trains a model for a few steps under a setting, each run at most once."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import chex
import jax
import numpy as np
import optax

import zinf
from tests.equivalence.models import Model
from tests.tiers import stage_3
from zinf.core.segment import named_leaves

DEVICES = ("none", "cpu", "nvme")  # DeepSpeed's names for device, host and nvme
PLACEMENTS = tuple((p, o) for p in DEVICES for o in DEVICES)
ON_DEVICE, ON_HOST, ON_NVME = ((name, name) for name in DEVICES)
FUSED, OFFLOADED = "fused", "offloaded"
# So high a scale that the first steps overflow, are skipped and halve the scale.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}}
ACCUMULATION = {"gradient_accumulation_steps": 2}
# Below the norms that occur, so that every step is clipped.
CLIPPING = {"gradient_clipping": 0.05}
BF16 = {"bf16": {"enabled": True}}
BOTH = "accumulation and clipping"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": ACCUMULATION,
    "clipping": CLIPPING,
    "bf16": BF16,
    BOTH: ACCUMULATION | CLIPPING,
    "bf16 accumulation": BF16 | ACCUMULATION,
    "bf16 clipping": BF16 | CLIPPING,
    "fp16": FP16,
    "fp16 accumulation": FP16 | ACCUMULATION,
}
OPTIMIZERS = {
    "adam": optax.adamw(3e-3),
    "slow adam": optax.adamw(1e-3),
    "sgd": optax.sgd(3e-2, momentum=0.9),
    # Updates that need a whole leaf: norms, factored moments, orthogonalisation.
    "lamb": optax.lamb(3e-3),
    "adafactor": optax.adafactor(3e-3, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(3e-3),
}
# Devices, and how many of them go along each axis; the rest of them are `fsdp`.
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "8": (8, {}),
    "2x4": (8, {"num_replicas": 2}),
    "4x2": (8, {"num_replicas": 4}),
    "E": (8, {"num_expert": 8}),
    "E+D": (8, {"num_expert": 4}),
    "E+D+R": (8, {"num_expert": 2, "num_replicas": 2}),
    "T": (4, {"num_tensor": 4}),
    "T+D": (8, {"num_tensor": 4}),
    "T+D+R": (8, {"num_tensor": 2, "num_replicas": 2}),
    "T+d": (4, {"num_tensor": 2}),
    "E+d": (4, {"num_expert": 2}),
    "E+T": (4, {"num_expert": 2, "num_tensor": 2}),
    "E+T+D": (8, {"num_expert": 2, "num_tensor": 2}),
    "S": (4, {"num_seq": 4}),
    "S+d": (4, {"num_seq": 2}),
    "S+D": (8, {"num_seq": 2}),
    "E+S+D": (8, {"num_expert": 2, "num_seq": 2}),
}
# A mesh decides in which order numbers are added: first the examples of each device,
# then devices among themselves, and shards of gradients for a norm. What is added for a
# loss or a norm is positive, so that an order changes a few of float32's last bits,
# which are 2^-23 each; and a step carries what it changes in a gradient into the next
# loss, made smaller by the learning rate. 16 of them are allowed.
BOUND = 16 * 2.0**-23


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        place: where parameters and optimizer state of a streamed step rest, or another
            `execution`.
        name: one of SETTINGS.
        more: values of other keys of the config, by dotted path.
    """

    place: tuple[str, str] | str = ON_DEVICE
    name: str = "plain"
    mesh: str = "1"
    stage: int = 3
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def num_microbatches(self) -> int:
        return SETTINGS[self.name].get("gradient_accumulation_steps", 1)

    def config(self, model: Model, folder: str) -> dict[str, Any]:
        if isinstance(self.place, str):
            config: dict[str, Any] = {"execution": self.place, "zero_optimization": {}}
            own = {k: v for k, v in model.config.items() if k != "segment"}
        else:
            config = streamed_config(self.place, folder)
            own = dict(model.config)
        config |= own | SETTINGS[self.name]
        config["zero_optimization"] |= {"stage": self.stage}
        for path, value in self.more:
            *sections, key = path.split(".")
            section = config
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = value
        return config


@dataclass(frozen=True)
class Run:
    """Attributes:
    state: the model state after the last step; None if there is none.
    aux: what the loss returned beside itself, of each step.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    skipped: tuple[bool, ...]
    params: Any
    state: Any
    aux: tuple[Any, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        return *self.losses, *self.grad_norms

    def deviation(self, other: "Run") -> float:
        """The largest of any loss or norm from the other's, relative to that."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    def is_bit_equal(self, other: "Run") -> bool:
        """Whether losses, norms and parameters are all the same numbers."""
        mine, others = named_leaves(self.params), named_leaves(other.params)
        same = [
            np.array_equal(mine[k], others[k], equal_nan=True) for k in mine | others
        ]
        return self.numbers == other.numbers and all(same)


def assert_bit_equal(found: Run, expected: Run) -> None:
    np.testing.assert_array_equal(found.losses, expected.losses)
    np.testing.assert_array_equal(found.grad_norms, expected.grad_norms)
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)
    chex.assert_trees_all_equal(found.aux, expected.aux, strict=True)


def streamed_config(
    placement: tuple[str, str], folder: str, pinned: str = "auto"
) -> dict[str, Any]:
    """Segments are streamed; parameters and optimizer state are where `placement` says.

    Of the arrays for nvme only vectors stay on the host, to save operations.
    """
    return {
        "execution": "streamed",
        "zero_optimization": stage_3(*placement),
        "persistence_threshold": 256,
        # Kept residuals are read by another executable, which may round otherwise.
        "segment": {"remat": "always"},
        "memory": {"pinned": pinned}
        | ({"nvme": [folder]} if "nvme" in placement else {}),
    }


def mesh_of(name: str) -> jax.sharding.Mesh:
    count, axes = MESHES[name]
    return zinf.make_mesh(jax.devices()[:count], **axes)


@cache
def train(
    model: Model, setting: Setting, optimizer: str = "adam", steps: int = 3
) -> Run:
    """Some steps. Three have updates that were deferred, and read what they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        config = setting.config(model, folder)
        on = mesh_of(setting.mesh)
        with model.start(OPTIMIZERS[optimizer], config, mesh=on) as engine:
            batches = model.batches(steps, setting.num_microbatches)
            metrics = [engine.step(batch) for batch in batches]
            params, state = engine.params(), engine.model_state()
    return run_of(metrics, params, state)


def run_of(metrics: list[Mapping[str, Any]], params: Any, state: Any = None) -> Run:
    columns = [
        tuple(m.get(k) for m in metrics)
        for k in ("loss", "grad_norm", "skipped", "aux")
    ]
    return Run(*columns[:3], params, state, columns[3])
