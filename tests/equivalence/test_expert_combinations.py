"""Every kind of router under each of DeepSpeed's six combinations with experts.

DeepSpeed-MoE combines expert parallelism (E) with data parallelism (D), ZeRO (Z), its
offload (Off) and tensor parallelism (M). One model has a layer for each router, so a
run of a combination covers its pairs with all routers. Covered are all pairs of
* a combination and a router, each with clipping, two microbatches, drops and two steps;
* a router and bfloat16, under E+Z;
* a router and a tier, under E+Z-Off+M, to the bit.

`test_experts` has, with one router each, all ZeRO stages, groups of experts on replicas
and the options of routers that are not here.
"""

import tempfile
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.meshes import BOUND, drawn_batches
from tests.equivalence.test_experts import TIERS, expert
from zinf.moe import Router, balanced_bias, experts

EXPERTS, DIM, HIDDEN = 8, 8, 16
EXAMPLES, TOKENS, MICROBATCHES, STEPS = 32, 4, 2, 2
# Of the 64 tokens of a microbatch, a device has 8.
GROUP = 8


def router(**options: Any) -> Router:
    rest = {"group_size": GROUP, "min_capacity": 1} | options
    return Router(num_experts=EXPERTS, **rest)


ROUTERS = {
    "top 1, random tokens": router(k=1),
    "top 2": router(k=2),
    "top 2, none dropped": router(k=2, drop_tokens=False),
    "top 3 by place, one group": router(k=3, drop_policy="position", group_size=None),
    # More tokens than a device has: a routing group lies on two devices.
    "sigmoid, limited groups, bias, group of two devices": router(
        k=2,
        group_size=2 * GROUP,
        score_func="sigmoid",
        num_expert_groups=4,
        num_limited_groups=2,
        route_scale=2.5,
    ),
    "experts choose": router(k=2, expert_choice=True, may_see_later_tokens=True),
}
DROPLESS = "top 2, none dropped"


@dataclass(frozen=True)
class Combination:
    """A mesh of 8 devices, a ZeRO stage and a tier of the optimizer state."""

    axes: dict[str, int] = field(hash=False)
    stage: int = 0
    tier: str = "fused"


COMBINATIONS = {
    "E": Combination({"num_expert": 8}),
    "E+D": Combination({"num_expert": 4}),
    "E+Z": Combination({"num_expert": 4}, stage=3),
    "E+D+M": Combination({"num_expert": 2, "num_tensor": 2}),
    "E+D+Z": Combination({"num_expert": 2, "num_replicas": 2}, stage=2),
    "E+Z-Off+M": Combination(
        {"num_expert": 2, "num_tensor": 2}, stage=1, tier="optimizer on host"
    ),
}
ALL_TIERS = TIERS | {"optimizer on host": ("none", "cpu")}


def init() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape, np.float32)
        return jnp.asarray(values * shape[-2] ** -0.5)

    def layer() -> dict[str, jax.Array]:
        return {
            "router": normal(DIM, EXPERTS),
            "up": normal(EXPERTS, DIM, HIDDEN),
            "bias": normal(EXPERTS, HIDDEN) * 0.1,
            "down": normal(EXPERTS, HIDDEN, DIM),
        }

    # Weights around experts, which `tensor` cuts.
    around = {"first": normal(DIM, HIDDEN), "second": normal(HIDDEN, DIM)}
    layers = {f"layer {i}": layer() for i in range(len(ROUTERS))}
    return layers | around | {"out": normal(DIM, 3)}


def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
    """Each layer reads what the one before made, in bfloat16 what comes before all."""
    x = batch["x"].reshape(-1, DIM).astype(params["out"].dtype)
    x += jnp.tanh(x @ params["first"]) @ params["second"]
    first = x if x.dtype == jnp.bfloat16 else None
    aux_loss, aux = jnp.float32(0), {}
    for i, (name, router) in enumerate(ROUTERS.items()):
        p = params[f"layer {i}"]
        bias = state if router.score_func == "sigmoid" else None
        own_key = jax.random.fold_in(key, i)
        read = x if first is None else first
        routing = router(p["router"], read, key=own_key, bias_E=bias)
        if bias is not None:
            state = balanced_bias(state, routing.counts, 0.1)
        weights = {name: p[name] for name in ("up", "bias", "down")}
        chosen = routing.choice, routing.gate
        x += experts(expert, weights, read, *chosen, capacity=routing.capacity)
        aux_loss += routing.aux_loss
        aux[name] = routing.choice
    error = (x @ params["out"]).astype(jnp.float32) - batch["y"].reshape(-1, 3)
    return jnp.mean(error**2) + 0.01 * aux_loss, (state, aux)


def batches() -> list[dict[str, np.ndarray]]:
    return drawn_batches(STEPS, EXAMPLES, TOKENS, DIM)


@dataclass(frozen=True)
class Trained:
    """Attributes:
    numbers: the loss and gradient norm of each step.
    choices: of each router, [steps, microbatches, tokens, choices]; -1 is a drop.
    bias: the state of the router that balances without a loss.
    """

    numbers: tuple[float, ...]
    choices: dict[str, np.ndarray]
    bias: np.ndarray


@cache
def train(name: str | None, *, tier: str = "", bf16: bool = False) -> Trained:
    """Some steps, or one in bfloat16; without a combination, fused on one device."""
    one = Combination({})
    combination = one if name is None else COMBINATIONS[name]
    devices = jax.devices()[: 1 if name is None else 8]
    tier = tier or combination.tier
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "execution": "fused" if tier == "fused" else "streamed",
            "zero_optimization": {"stage": combination.stage},
            "persistence_threshold": 1,
            "gradient_clipping": 0.05,
            "gradient_accumulation_steps": MICROBATCHES,
            "bf16": {"enabled": bf16},
            "memory": {"device": "64MiB", "host": "64MiB", "nvme": [folder]},
        }
        if tier != "fused":
            params, state = ALL_TIERS[tier]
            # One segment of several layers compiles faster than each alone.
            settings["segment"] = {"remat": "always", "max_bytes": "64KiB"}
            settings["zero_optimization"] |= {
                "offload_param": {"device": params},
                "offload_optimizer": {"device": state},
            }
        engine = zinf.initialize(
            loss,
            init,
            optax.adamw(1e-2),
            settings,
            has_aux=True,
            rng=jax.random.key(3),
            model_state=jnp.zeros(EXPERTS),
            mesh=zinf.make_mesh(devices, **combination.axes),
        )
        metrics = [engine.step(batch) for batch in batches()[: 1 if bf16 else STEPS]]
        bias = np.asarray(engine.model_state())
        engine.close()
    numbers = tuple(float(m[k]) for m in metrics for k in ("loss", "grad_norm"))
    choices = {n: np.stack([np.asarray(m["aux"][n]) for m in metrics]) for n in ROUTERS}
    return Trained(numbers, choices, bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_losses_norms_and_dropped_tokens_are_those_of_one_device(name):
    expected, found = train(None), train(name)
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=BOUND)
    np.testing.assert_array_equal(found.bias, expected.bias)
    assert expected.bias.any()
    for router, choice in expected.choices.items():
        np.testing.assert_array_equal(found.choices[router], choice, router)
        assert (choice < 0).any() == (router != DROPLESS), router


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_tiers_are_bit_equal_for_every_router(tier):
    expected, found = (train("E+Z-Off+M", tier=t) for t in ("optimizer on host", tier))
    assert found.numbers == expected.numbers
    for router, choice in expected.choices.items():
        np.testing.assert_array_equal(found.choices[router], choice, router)


@pytest.mark.exhaustive
def test_in_bfloat16_losses_norms_and_routes_are_those_of_one_device():
    """Of one step, with all layers side by side.

    What devices add in another order may be rounded to another of bfloat16's numbers,
    and a router that reads it may choose another expert.
    """
    expected, found = (train(name, bf16=True) for name in (None, "E+Z"))
    # A gradient is rounded to 8 bits on each device before it is summed.
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=2.0**-7)
    np.testing.assert_array_equal(found.bias, expected.bias)
    for router, choice in expected.choices.items():
        np.testing.assert_array_equal(found.choices[router], choice, router)
