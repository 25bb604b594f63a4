"""Trains a model for a few steps on zinf and in plain JAX, each run at most once."""

import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.equivalence.models import Model
from zinf.program import ArrayId, Role
from zinf.segment import named_leaves

STEPS = 20
DEVICES = ("none", "cpu", "nvme")  # DeepSpeed's names for device, host and nvme
PLACEMENTS = tuple((p, o) for p in DEVICES for o in DEVICES)
ON_DEVICE = ("none", "none")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    # Below the norms that occur, so that every step is clipped.
    "clipping": {"gradient_clipping": 0.05},
    "bf16": {"bf16": {"enabled": True}},
}
BOTH = "accumulation and clipping"
# The scale starts so high that steps are skipped, and clipping waits for the norm.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
MIXED = {
    "bf16 accumulation": VARIANTS["bf16"] | VARIANTS["accumulation"],
    "bf16 clipping": VARIANTS["bf16"] | VARIANTS["clipping"],
    "fp16": FP16,
    "fp16 accumulation": FP16 | VARIANTS["accumulation"],
}
SETTINGS = {
    **VARIANTS,
    **MIXED,
    BOTH: VARIANTS["accumulation"] | VARIANTS["clipping"],
}
OPTIMIZERS = {
    "adam": optax.adamw(3e-3),
    # Its trace is the gradient itself after the first step.
    "sgd": optax.sgd(3e-2, momentum=0.9),
    # Updates that need a whole leaf: norms, factored moments, orthogonalisation.
    "lamb": optax.lamb(3e-3),
    "adafactor": optax.adafactor(3e-3, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(3e-3),
}


@dataclass(frozen=True)
class Run:
    """What a run did; `gradients` are those of the first step, under SGD."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    params: Any
    gradients: dict[str, np.ndarray]


def streamed_config(
    placement: tuple[str, str], folder: str, pinned: str = "auto"
) -> dict[str, Any]:
    """Segments are streamed; parameters and optimizer state are where `placement` says.

    Of the arrays for nvme only vectors stay on the host, to save operations.
    """
    params, optimizer = placement
    return {
        "execution": "streamed",
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": params},
            "offload_optimizer": {"device": optimizer},
        },
        "persistence_threshold": 256,
        # Kept residuals are read by another executable, which may round otherwise.
        "segment": {"remat": "always"},
        "memory": {"pinned": pinned}
        | ({"nvme": [folder]} if "nvme" in placement else {}),
    }


@cache
def train(
    model: Model,
    variant: str,
    placement: tuple[str, str] | str | None,
    optimizer: str = "adam",
    pinned: str = "auto",
) -> Run:
    """Twenty steps on zinf; without a placement, of the fused step.

    Args:
        placement: of the arrays of a streamed step, or the name of an `execution`.
        pinned: `memory.pinned` of a streamed step.
    """
    settings = SETTINGS[variant]
    with tempfile.TemporaryDirectory() as folder:
        config = {"execution": placement or "fused"}
        if isinstance(placement, tuple):
            config = streamed_config(placement, folder, pinned)
        engine = model.start(OPTIMIZERS[optimizer], {**config, **settings})
        batches = model.batches(STEPS, settings.get("gradient_accumulation_steps", 1))
        metrics, gradients = [], {}
        for batch in batches:
            metrics.append(engine.step(batch))
            if optimizer == "sgd" and not gradients:
                paths = [leaf.path for leaf in engine.planner.separated.leaves]
                gradients = {
                    p: np.array(engine.residents.read(ArrayId(Role.STATE, p, slot=0)))
                    for p in paths
                }
        params = engine.params()
        engine.close()
    losses, norms = (tuple(m[name] for m in metrics) for name in ("loss", "grad_norm"))
    return Run(losses, norms, params, gradients)


@cache
def initial_params(model: Model) -> Any:
    """What every run on zinf starts from."""
    return model.start(OPTIMIZERS["sgd"], None).params()


@cache
def train_in_jax(model: Model, variant: str, optimizer: str) -> Run:
    """The same with `jax.value_and_grad` and optax alone, on whole batches.

    Every loss is a mean over samples, so that of a batch is the mean of those of its
    microbatches.
    """
    settings = SETTINGS[variant]
    tx = OPTIMIZERS[optimizer]
    if "gradient_clipping" in settings:
        tx = optax.chain(optax.clip_by_global_norm(settings["gradient_clipping"]), tx)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        norm = optax.tree.norm(grads)
        return optax.apply_updates(params, updates), state, loss, norm

    params = jax.tree.map(jnp.asarray, initial_params(model))
    state, metrics, gradients = tx.init(params), [], {}
    for batch in model.batches(STEPS, settings.get("gradient_accumulation_steps", 1)):
        params, state, *measured = step(params, state, batch)
        metrics.append([float(x) for x in measured])
        if optimizer == "sgd" and not gradients:
            gradients = named_leaves(optax.tree.get(state, "trace"))
    losses, norms = map(tuple, zip(*metrics, strict=True))
    return Run(losses, norms, params, gradients)
