"""What a process of a run with `execution: offloaded` does; it prints lines of JSON."""

import os

import jax
import optax

import zinf
from tests.distributed.training import fingerprint, own_part, report
from tests.equivalence.meshes import batches, config, init, loss
from zinf.distributed import AbstractGroup, Flags, Limits, find_seat, join

STEPS = 3


def settings() -> dict:
    """Without tiles, which the offloaded step does not read."""
    own = {"execution": "offloaded", "memory": {"device": "1GiB", "host": "1GiB"}}
    return (
        config(3, "host", "")
        | own
        | {"zero_optimization": {"stage": 3}}
        | {"segment": {}}
    )


def main(coordinator: str, count: str, index: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    seat = find_seat(Flags(coordinator, int(count), int(index)), {})
    with join(seat, Limits(join_seconds=40.0)) as group:
        train(group)


def train(group: AbstractGroup) -> None:
    mesh = zinf.make_mesh(jax.devices())
    engine = zinf.initialize(
        loss, init, optax.adamw(1e-2), settings(), mesh=mesh, group=group
    )
    parts = [own_part(batch, group.index, group.count) for batch in batches(STEPS)]
    metrics = [engine.step(part) for part in parts]
    found = {k: [m[k] for m in metrics] for k in ("loss", "grad_norm")}
    report("offloaded", found | {"params": fingerprint(engine.params())})
    engine.close()
