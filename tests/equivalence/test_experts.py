"""With experts divided over devices, training is that of one device."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.meshes import (
    BOUND,
    check_each_restores_the_one_before,
    drawn_batches,
)
from tests.marks import slow_except
from zinf.moe import Router, experts
from zinf.program import ArrayId, Role

EXPERTS, DIM, HIDDEN, LAYERS = 8, 8, 12, 2
EXAMPLES, TOKENS, MICROBATCHES, STEPS = 32, 4, 2, 3
# Tokens of a device in a microbatch are 8 on 8 devices.
GROUP = 8
ROUTERS = {
    "top 1, jitter": Router(
        num_experts=EXPERTS, noisy_gate_policy="Jitter", use_rts=False, min_capacity=1
    ),
    "top 1, noise": Router(
        num_experts=EXPERTS, noisy_gate_policy="RSample", group_size=GROUP
    ),
    "top 2": Router(num_experts=EXPERTS, k=2, group_size=GROUP, min_capacity=1),
    "top 3, one group": Router(num_experts=EXPERTS, k=3, min_capacity=1),
    "top 2, none dropped": Router(num_experts=EXPERTS, k=2, drop_tokens=False),
}
DROPLESS = "top 2, none dropped"
# Replicas, and devices that divide experts; the rest of 8 devices are `fsdp`.
MESHES = {"E": (1, 8), "E+D": (1, 4), "E+D+replicas": (2, 2), "D": (1, 1)}
TIERS = {
    "device": ("none", "none"),
    "host": ("cpu", "cpu"),
    "nvme": ("nvme", "nvme"),
}
CASES = [
    # `test_expert_combinations` has the other kinds of routers.
    ("E+D", 2, "top 1, jitter", "fused"),
    ("E+D", 2, "top 1, noise", "fused"),
    ("E+D", 2, "top 2", "fused"),
    ("E+D", 2, "top 3, one group", "fused"),
    *[("E+D", stage, "top 2", "fused") for stage in (0, 1, 3)],
    *[("E+D", stage, "top 2", "host") for stage in (0, 1, 2, 3)],
    ("E", 0, "top 2", "fused"),
    ("E", 3, DROPLESS, "device"),
    ("E+D+replicas", 1, DROPLESS, "fused"),
    ("E+D+replicas", 3, "top 2", "host"),
    ("D", 3, "top 2", "fused"),
]
FAST = [("E+D", 2, "top 2", "fused")]


@dataclass(frozen=True)
class Trained:
    numbers: tuple[float, ...]
    counts: np.ndarray  # Of each step, microbatch, layer and expert.
    dropped: np.ndarray


def init() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape, np.float32)
        return jnp.asarray(values * shape[-2] ** -0.5)

    return {
        f"layer {i}": {
            "router": normal(DIM, EXPERTS),
            "up": normal(EXPERTS, DIM, HIDDEN),
            "bias": normal(EXPERTS, HIDDEN) * 0.1,
            "down": normal(EXPERTS, HIDDEN, DIM),
        }
        for i in range(LAYERS)
    } | {"out": normal(DIM, 3)}


def expert(weights: Any, rows: jax.Array) -> jax.Array:
    hidden = jnp.tanh(rows @ weights["up"] + weights["bias"][None])
    return hidden @ weights["down"]


def loss_with(router: Router) -> Any:
    def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        x = batch["x"].reshape(-1, DIM).astype(params["out"].dtype)
        aux_loss, routings = jnp.float32(0), []
        for i in range(LAYERS):
            p = params[f"layer {i}"]
            routing = router(p["router"], x, key=jax.random.fold_in(key, i))
            weights = {name: p[name] for name in ("up", "bias", "down")}
            x += experts(
                expert,
                weights,
                x,
                routing.choice,
                routing.gate,
                capacity=routing.capacity,
            )
            aux_loss += routing.aux_loss
            routings.append(routing)
        error = (x @ params["out"]).astype(jnp.float32) - batch["y"].reshape(-1, 3)
        aux = {
            "counts": jnp.stack([r.counts for r in routings]),
            "dropped": jnp.stack([r.dropped for r in routings]),
        }
        return jnp.mean(error**2) + 0.01 * aux_loss, aux

    return loss


def batches() -> list[dict[str, np.ndarray]]:
    return drawn_batches(STEPS, EXAMPLES, TOKENS, DIM)


def config(stage: int, tier: str, folder: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "execution": "fused" if tier == "fused" else "streamed",
        "zero_optimization": {"stage": stage},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
        "gradient_accumulation_steps": MICROBATCHES,
        "memory": {"device": "64MiB", "host": "64MiB"},
    }
    if tier != "fused":
        params, state = TIERS[tier]
        settings["segment"] = {"remat": "always"}
        settings["zero_optimization"] |= {
            "offload_param": {"device": params},
            "offload_optimizer": {"device": state},
        }
        settings["memory"] |= {"nvme": [folder]} if tier == "nvme" else {}
    return settings


def mesh_of(name: str) -> Any:
    replicas, num_expert = MESHES[name]
    return zinf.make_mesh(
        jax.devices()[:8], num_replicas=replicas, num_expert=num_expert
    )


def start(mesh: Any, router: str, settings: dict[str, Any]) -> Any:
    return zinf.initialize(
        loss_with(ROUTERS[router]),
        init,
        optax.adamw(1e-2),
        settings,
        has_aux=True,
        rng=jax.random.key(3),
        mesh=mesh,
    )


@cache
def train(
    mesh: str | None,
    stage: int,
    router: str,
    tier: str,
    *,
    bf16: bool = False,
    quantized: bool = False,
) -> Trained:
    """Losses, norms and routes of some steps; without a mesh on one device."""
    on = zinf.make_mesh(jax.devices()[:1]) if mesh is None else mesh_of(mesh)
    with tempfile.TemporaryDirectory() as folder:
        settings = config(stage, tier, folder) | {"bf16": {"enabled": bf16}}
        settings["zero_optimization"] |= {"zero_quantized_weights": quantized}
        engine = start(on, router, settings)
        metrics = [engine.step(batch) for batch in batches()]
        engine.close()
    numbers = tuple(float(m[k]) for m in metrics for k in ("loss", "grad_norm"))
    counts, dropped = (
        np.stack([np.asarray(m["aux"][k]) for m in metrics])
        for k in ("counts", "dropped")
    )
    return Trained(numbers, counts, dropped)


@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize(("mesh", "stage", "router", "tier"), slow_except(FAST, CASES))
def test_losses_norms_and_routes_are_those_of_one_device(mesh, stage, router, tier):
    expected, found = train(None, 0, router, "fused"), train(mesh, stage, router, tier)
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=BOUND)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.dropped, expected.dropped)
    assert (expected.dropped.max() > 0) == (router != DROPLESS)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_tiers_are_bit_equal_with_experts_divided(tier):
    expected, found = (train("E+D", 3, "top 2", t) for t in ("device", tier))
    assert found.numbers == expected.numbers


@pytest.mark.slow
@pytest.mark.parametrize("router", ["top 2", DROPLESS])
def test_in_bfloat16_losses_are_those_of_one_device(router):
    expected = train(None, 0, router, "fused", bf16=True)
    found = train("E+D", 2, router, "fused", bf16=True)
    # A gradient is rounded to 8 bits on each device before it is summed.
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=2.0**-7)


@pytest.mark.slow
def test_quantized_weights_of_experts_are_those_of_their_devices():
    expected = train(None, 0, "top 2", "fused")
    found = train("E+D", 3, "top 2", "device", quantized=True)
    # Each weight is rounded by 1/254 of the largest in its block; masters are not.
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=1 / 254)
    assert found.numbers != expected.numbers


@pytest.mark.slow
def test_state_of_experts_is_divided_by_experts_and_among_their_own_devices():
    engine = start(mesh_of("E+D"), "top 2", config(3, "fused", ""))
    engine.step(batches()[0])
    sizes = {
        name: engine.residents.layouts.of(ArrayId(role, f"layer 0/{name}"))
        for name in ("router", "up", "bias")
        for role in (Role.PARAM, Role.GRADIENT)
    }
    for name, layout in sizes.items():
        assert np.prod(layout.device_shape) * 8 == np.prod(layout.shape), name
    for name in ("up", "bias"):
        # Each has the experts of its place along `expert`, of 4.
        assert sizes[name].device_shape[0] == EXPERTS // 4
    engine.close()


@pytest.mark.slow
def test_a_run_is_saved_and_restored_with_experts_divided_otherwise(tmp_path):
    cases = [
        ("E+D", 3, "nvme"),
        ("E", 0, "fused"),
        ("D", 2, "host"),
        ("E+D+replicas", 3, "device"),
    ]

    def started() -> Iterator[zinf.Engine]:
        for number, (name, stage, tier) in enumerate(cases):
            folder = str(tmp_path / f"nvme {number}")
            yield start(mesh_of(name), "top 2", config(stage, tier, folder))

    check_each_restores_the_one_before(started(), batches()[0], tmp_path)


def test_experts_that_devices_cannot_divide_are_refused():
    devices = jax.devices()[:6]
    engine = start(zinf.make_mesh(devices, num_expert=3), "top 2", {})
    with pytest.raises(ValueError, match="8 experts, which mesh.expert = 3 devices"):
        engine.step(jax.tree.map(lambda x: x[:24], batches()[0]))
    engine.close()
