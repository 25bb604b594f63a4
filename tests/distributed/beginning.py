"""What a process of a run does that begins with other values than the others."""

import json
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from zinf.distributed import AbstractGroup, Flags, Limits, find_seat, join


def main(coordinator: str, count: str, index: str, folder: str) -> None:
    seat = find_seat(Flags(coordinator, int(count), int(index)), {})
    with join(seat, Limits(join_seconds=40.0)) as group:
        begin(group, folder)


def begin(group: AbstractGroup, folder: str) -> None:
    """Try to train from values that differ in the last process, and from equal ones."""
    mesh, saved = zinf.make_mesh(jax.devices()), f"{folder}/saved"
    own = float(group.index == group.count - 1)
    params = {"w": np.ones((4, 6), np.float32), "b": np.zeros(6, np.float32)}
    # The same numbers, of which each row lies apart in memory.
    apart = params | {"w": np.ones((6, 4), np.float32).T}
    mine = apart if own else params
    state = {"seen": np.zeros((), np.float32)}

    def init(seed: int = 0) -> dict[str, jax.Array]:
        key = jax.random.key(seed)
        return params | {"w": jax.random.normal(key, (4, 6))}

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        noise = jax.random.normal(key, (6,))
        out = batch @ params["w"] + (params["b"] + noise)[None]
        return jnp.mean(jnp.square(out)), {"seen": state["seen"] + 1}

    def start(params: Any, state: Any = state, seed: int = 7) -> zinf.Engine:
        settings = {"zero_optimization": {"stage": 3}, "persistence_threshold": 1}
        return zinf.initialize(
            loss,
            params,
            optax.sgd(0.1),
            settings,
            rng=jax.random.key(seed),
            model_state=state,
            mesh=mesh,
            group=group,
        )

    shifted = params | {"b": params["b"] + own * np.float32(1e-7)}
    batch = np.ones((4, 4), np.float32)
    cases = {
        "an array": lambda: start(shifted),
        "an init function": lambda: start(lambda: init(int(own))),
        "model state": lambda: start(params, {"seen": np.float32(own)}),
        "rng": lambda: start(params, seed=7 + int(own)),
    }
    for name, make in cases.items():
        with closing(make()) as engine:
            try:
                engine.step(batch)
            except ValueError as error:
                print(f"{name} refused:", json.dumps(str(error)))
    for name, given in {"lying apart": mine, "made": init}.items():
        with closing(start(given)) as engine:
            print(f"{name} trained:", engine.step(batch)["loss"])
            if name == "made":
                engine.save(saved)
    with closing(start(shifted)) as engine:
        engine.restore(saved)
        print("restored:", engine.step(batch)["step"])
