"""What a process of a run does that trains: the network of `tests.equivalence.meshes`.

It prints what it found as lines of JSON, each after its name.
"""

import json
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from tests.equivalence import weighted
from tests.equivalence.meshes import (
    MICROBATCHES,
    TIERS,
    batches,
    config,
    init,
    loss,
)
from tests.equivalence.test_compressed_optimizers import drawn, to_targets
from tests.equivalence.test_quantized_weights import WIDE
from zinf.core.program import Tier
from zinf.core.sharding import batch_share
from zinf.distributed import AbstractGroup, Flags, Limits, find_seat, join

STEPS = 3
PROCESSES = 2
CASES = ((3, "device"), (3, "nvme"), (2, "fused"))
# In the step of this number a gradient of the first process overflows in float16.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
OVERFLOWS = 2
WEIGHTED_MICROBATCHES = (1, 4)
# Optimizers that send signs: the stage of ZeRO, and parameters by which every phase
# comes in a few steps. All are saved after one of the last phase.
SIGNED = {
    "OneBitAdam": (0, {"freeze_step": 2}),
    "OneBitLamb": (1, {"freeze_step": 2}),
    "ZeroOneAdam": (
        0,
        {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 2},
    ),
}
SIGNED_STEPS, SIGNED_SAVED = 9, 6
# Networks of `tests.equivalence.networks`, meshes of four devices, and stages.
MESHED = (
    ("ATTENTION", "T", 3),
    ("ROUTED", "E+d", 2),
    ("TRANSFORMER", "S+d", 3),
)


def own_part(
    batch: Any, index: int, count: int, microbatches: int = MICROBATCHES
) -> Any:
    """The rows of each microbatch that a process gives, as a batch."""

    def rows(leaf: np.ndarray) -> np.ndarray:
        parts = leaf.reshape(microbatches, count, -1, *leaf.shape[1:])
        return parts[:, index].reshape(-1, *leaf.shape[1:])

    return jax.tree.map(rows, batch)


def overflowing(number: int, batch: Any) -> Any:
    """Batch `number`, from 1; of the step that overflows, its first example does."""
    if number != OVERFLOWS:
        return batch
    y = batch["y"].copy()
    y[0] *= 1e5
    return batch | {"y": y}


def fingerprint(params: Any) -> int:
    return crc32(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))


def report(name: str, value: Any) -> None:
    print(name, json.dumps(value), flush=True)


def main(
    coordinator: str, index: str, num_devices: str, folder: str, part: str
) -> None:
    """One of `PARTS`."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    # Tiers of a stage have the same executables.
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    seat = find_seat(Flags(coordinator, PROCESSES, int(index)), {})
    with join(seat, Limits(join_seconds=40.0)) as group:
        PARTS[part](group, folder)


def train(group: AbstractGroup, folder: str) -> None:
    """Every case; the state of nvme is saved at its end."""
    mesh = zinf.make_mesh(jax.devices())
    for stage, tier in CASES:
        settings = config(stage, tier, folder)
        engine = zinf.initialize(
            loss,
            init,
            optax.adamw(1e-2),
            settings,
            # The same loss, by a program of its own.
            eval_loss_fn=(lambda *given: loss(*given)) if tier == "nvme" else None,
            mesh=mesh,
            group=group,
        )
        given = [own_part(b, group.index, group.count) for b in batches(STEPS)]
        metrics = [engine.step(batch) for batch in given]
        found = {
            "loss": [m["loss"] for m in metrics],
            "grad_norm": [m["grad_norm"] for m in metrics],
            "evaluated": engine.evaluate(given[0]),
            "applied": [applied(engine, group, given[0], n) for n in (1, MICROBATCHES)],
            "params": fingerprint(engine.params()),
            "peaks": {t.name: max(m[f"{t}_bytes"] for m in metrics) for t in Tier},
            "planned": {t.name: engine.plan.peak_bytes[t] for t in Tier},
            "read": metrics[-1]["nvme_read_bytes"],
            "files": sorted(p.name for p in Path(folder).glob("process-*")),
        }
        if tier == "nvme":
            engine.save(Path(folder) / "saved")
            # What one process saved, and then what these have.
            for name in ("alone", "saved"):
                engine.restore(Path(folder) / name)
                found[f"restored {name}"] = fingerprint(engine.params())
            found |= set_arrays(engine)
        report(f"{stage} {tier}", found)
        engine.close()
    train_fp16(group, folder)
    train_weighted(group)
    report("quantized", quantized(zinf.make_mesh(jax.devices()), group))
    in_groups = zinf.make_mesh(jax.devices(), num_replicas=PROCESSES)
    report("in groups", quantized(in_groups, group, holds_copies=True))


def train_signed(group: AbstractGroup, folder: str) -> None:
    mesh = zinf.make_mesh(jax.devices())
    for kind in SIGNED:
        report(kind, signed(kind, mesh, f"{folder}/{kind}", group))


def signed(
    kind: str,
    mesh: Any,
    saved: str,
    group: AbstractGroup | None = None,
) -> dict[str, Any]:
    """Steps of an optimizer that sends signs, with a restore.

    Args:
        saved: a checkpoint, which processes make and one process finds.
    """
    stage, params = SIGNED[kind]
    settings = {
        "optimizer": {"type": kind, "params": {"lr": 1e-2, **params}},
        "zero_optimization": {"stage": stage},
        "persistence_threshold": 1,
    }
    own = slice(None)
    if group is not None:
        size = mesh.size // group.count
        own = slice(group.index * size, (group.index + 1) * size)
    given = [
        {k: x[own] for k, x in drawn(1 + n, mesh.size).items()}
        for n in range(SIGNED_STEPS)
    ]
    losses, fingerprints = [], []
    for part in (given[:SIGNED_SAVED], given[SIGNED_SAVED:]):
        arguments = to_targets, drawn(0), None, settings
        with zinf.initialize(*arguments, mesh=mesh, group=group) as engine:
            if losses:
                engine.restore(saved)
            losses += [engine.step(batch)["loss"] for batch in part]
            fingerprints.append(fingerprint(engine.params()))
            if group is not None and len(losses) == SIGNED_SAVED:
                engine.save(saved)
    return {"loss": losses, "params": fingerprints}


def train_weighted(group: AbstractGroup) -> None:
    """One step of SGD with a rate of 1, so that its gradient is the change."""
    mesh, found = zinf.make_mesh(jax.devices()), {}
    for number in WEIGHTED_MICROBATCHES:
        settings = weighted.STREAMED | {
            "gradient_accumulation_steps": number,
            "zero_optimization": {"stage": 3},
        }
        arguments = weighted.loss, weighted.WEIGHTS, optax.sgd(1.0), settings
        own = own_part(weighted.batch(), group.index, group.count, number)
        with zinf.initialize(*arguments, mesh=mesh, group=group) as engine:
            taken = engine.step(own)["loss"]
            new = engine.params()
            evaluated = engine.evaluate_weighted(own)
        change = jax.tree.map(lambda x, y: (x - y).tolist(), weighted.WEIGHTS, new)
        after = float(evaluated.total), float(evaluated.weight)
        found[str(number)] = {"loss": taken, "gradient": change, "evaluated": after}
    report("weighted", found)


def quantized(
    mesh: Any, group: AbstractGroup | None = None, *, holds_copies: bool = False
) -> dict[str, Any]:
    """Steps whose gradients are exchanged in 4 bits, between nodes too, with LoCo.

    A process is a node; in one process, half of its devices are.

    Args:
        holds_copies: each node holds bfloat16 copies of weights, updated in 8 bits.
    """
    zero = {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {}}
    if group is None or holds_copies:
        zero["zero_hpz_partition_size"] = mesh.size // PROCESSES
    settings = {
        "execution": "streamed",
        "persistence_threshold": 1,
        "zero_optimization": zero | {"zero_quantized_weights": holds_copies},
        "bf16": {"enabled": holds_copies},
    }
    found = []
    arguments = WIDE.loss, WIDE.init, optax.adamw(1e-3), settings
    with zinf.initialize(*arguments, mesh=mesh, group=group) as engine:
        for batch in WIDE.batches(STEPS):
            own = own_part(batch, group.index, group.count, 1) if group else batch
            found.append(engine.step(own))
        copies = [engine.get(path, "compute") for path in engine.params()]
        params = fingerprint([engine.params(), copies])
    columns = {k: [m[k] for m in found] for k in ("loss", "grad_norm")}
    return columns | {"params": params}


def applied(engine: zinf.Engine, group: AbstractGroup, batch: Any, num: int) -> int:
    """What all processes get, of which this one can check its own rows."""
    found = engine.apply(hidden, batch, num_microbatches=num)
    own = np.split(found, group.count)[group.index]
    expected = hidden(engine.params(), batch)
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    return fingerprint(found)


def hidden(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["up"] + params["up_bias"][None])
    return jnp.tanh(x @ params["mid"] + params["mid_bias"][None])


def set_arrays(engine: zinf.Engine) -> dict[str, bool]:
    """Sets each parameter, and a moment of it, to what it was plus one."""
    found = {}
    for path in engine.planner.problem.params:
        for kind in ("master", "mu"):
            before = engine.get(path, kind)
            engine.set(path, before + 1, kind)
            found[f"{kind} of {path} is set"] = bool(
                np.array_equal(engine.get(path, kind), before + 1)
            )
    return {"are set": all(found.values()) and len(found) > 0}


def train_fp16(group: AbstractGroup, folder: str) -> None:
    mesh = zinf.make_mesh(jax.devices())
    settings = config(3, "host", folder) | FP16
    engine = zinf.initialize(
        loss, init, optax.adamw(1e-2), settings, mesh=mesh, group=group
    )
    metrics = []
    for number, batch in enumerate(batches(STEPS), start=1):
        batch = overflowing(number, batch)
        metrics.append(engine.step(own_part(batch, group.index, group.count)))
    found = {k: [m[k] for m in metrics] for k in ("loss", "skipped", "loss_scale")}
    report("fp16", found | {"params": fingerprint(engine.params())})
    engine.close()


def offloaded() -> dict[str, Any]:
    """Without tiles, which the offloaded step does not read."""
    return config(3, "host", "") | {
        "execution": "offloaded",
        "memory": {"device": "1GiB", "host": "1GiB"},
        "zero_optimization": {"stage": 3},
        "segment": {},
    }


def train_offloaded(group: AbstractGroup, folder: str) -> None:
    mesh = zinf.make_mesh(jax.devices())
    engine = zinf.initialize(
        loss, init, optax.adamw(1e-2), offloaded(), mesh=mesh, group=group
    )
    parts = [own_part(batch, group.index, group.count) for batch in batches(STEPS)]
    metrics = [engine.step(part) for part in parts]
    found = {k: [m[k] for m in metrics] for k in ("loss", "grad_norm")}
    report("offloaded", found | {"params": fingerprint(engine.params())})
    engine.close()


def train_meshed(group: AbstractGroup, folder: str) -> None:
    for case in MESHED:
        report(" ".join(map(str, case)), meshed(*case, group=group))


def meshed(
    name: str, mesh: str, stage: int, group: AbstractGroup | None = None
) -> dict[str, Any]:
    """Steps of a network on a mesh, with accumulation and clipping."""
    # They draw keys, before which processes must have joined.
    from tests.equivalence import networks
    from tests.equivalence.training import BOTH, OPTIMIZERS, Setting, mesh_of

    model = getattr(networks, name)
    setting = Setting(TIERS["device"], BOTH, mesh, stage)
    on, tx = mesh_of(mesh), OPTIMIZERS["adam"]
    given = model.batches(STEPS, setting.num_microbatches)
    index, count = batch_share(on)
    parts = [own_part(b, index, count, setting.num_microbatches) for b in given]
    with model.start(tx, setting.config(model, ""), mesh=on, group=group) as engine:
        metrics = [engine.step(batch) for batch in parts]
        params = fingerprint(engine.params())
    found = {k: [m[k] for m in metrics] for k in ("loss", "grad_norm")}
    return found | {"params": params}


PARTS = {
    "all": train,
    "offloaded": train_offloaded,
    "signed": train_signed,
    "meshed": train_meshed,
}
