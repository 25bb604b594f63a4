"""With weights divided over devices, training is that of one device."""

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
from zinf.initialize import make_planner
from zinf.program import Role, Tier

DIM, HEADS, HIDDEN, LAYERS = 16, 8, 64, 2
EXAMPLES, TOKENS, MICROBATCHES, STEPS = 16, 4, 2, 3
# Devices, and how many of them divide weights; the rest are `fsdp`.
MESHES = {"2": (2, 2), "4": (4, 4), "8": (8, 8), "2x4": (8, 4), "4x2": (8, 2)}
TIERS = {
    "device": ("none", "none"),
    "optimizer on host": ("none", "cpu"),
    "host": ("cpu", "cpu"),
    "nvme": ("nvme", "nvme"),
}
CASES = [
    *[("2x4", stage, "fused") for stage in range(4)],
    *[("2x4", stage, "host") for stage in (0, 1, 3)],
    ("2", 0, "fused"),
    ("4", 1, "device"),
    ("8", 0, "fused"),
    ("4x2", 2, "optimizer on host"),
]
FAST = [("2x4", 2, "fused")]
COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")


def init() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape, np.float32)
        return jnp.asarray(values * shape[0] ** -0.5)

    layers = {
        f"layer {i}": {
            **{name: normal(DIM, DIM) for name in ("q", "k", "v", "o")},
            "up": normal(DIM, HIDDEN),
            "bias": normal(HIDDEN) * 0.1,
            "down": normal(HIDDEN, DIM),
            "last": normal(DIM) * 0.1,
        }
        for i in range(LAYERS)
    }
    return layers | {"out": normal(DIM, 3)}


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3)


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["out"].dtype)
    heads = (*x.shape[:2], HEADS, DIM // HEADS)
    for i in range(LAYERS):
        p, h = params[f"layer {i}"], normed(x)
        q, k, v = ((h @ p[name]).reshape(heads) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += y.reshape(x.shape) @ p["o"]
        hidden = jnp.tanh(normed(x) @ p["up"] + p["bias"][None, None])
        x += hidden @ p["down"] + p["last"][None, None]
    error = (normed(x) @ params["out"]).astype(jnp.float32) - batch["y"]
    return jnp.mean(error**2)


def batches() -> list[dict[str, np.ndarray]]:
    return drawn_batches(STEPS, EXAMPLES, TOKENS, DIM)


def config(stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Clipping at a norm below those that occur, and accumulation."""
    settings: dict[str, Any] = {
        "execution": "fused" if tier == "fused" else "streamed",
        "zero_optimization": {"stage": stage},
        # Vectors of DIM are whole.
        "persistence_threshold": 4 * DIM + 1,
        "gradient_clipping": 0.05,
        "gradient_accumulation_steps": MICROBATCHES,
        "memory": {"device": "64MiB", "host": "64MiB"},
    }
    if tier != "fused":
        params, state = TIERS[tier]
        settings["segment"] = {"remat": "always", "max_bytes": 8 * DIM * HIDDEN}
        settings["zero_optimization"] |= {
            "offload_param": {"device": params},
            "offload_optimizer": {"device": state},
        }
        settings["memory"] |= {"nvme": [folder]} if tier == "nvme" else {}
    return settings


def mesh_of(name: str) -> Any:
    count, num_tensor = MESHES[name]
    return zinf.make_mesh(jax.devices()[:count], num_tensor=num_tensor)


def start(mesh: Any, settings: dict[str, Any]) -> Any:
    return zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=mesh)


@dataclass(frozen=True)
class Trained:
    numbers: tuple[float, ...]  # The loss and gradient norm of each step.
    params: dict[str, np.ndarray]


@cache
def train(mesh: str | None, stage: int, tier: str, *, bf16: bool = False) -> Trained:
    """Some steps; without a mesh on one device."""
    on = zinf.make_mesh(jax.devices()[:1]) if mesh is None else mesh_of(mesh)
    with tempfile.TemporaryDirectory() as folder:
        settings = config(stage, tier, folder) | {"bf16": {"enabled": bf16}}
        engine = start(on, settings)
        metrics = [engine.step(batch) for batch in batches()]
        leaves = jax.tree_util.tree_leaves_with_path(engine.params())
        engine.close()
    params = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    numbers = tuple(float(m[k]) for m in metrics for k in ("loss", "grad_norm"))
    return Trained(numbers, params)


# A device adds some of the terms of a product with a weight that is cut by rows, and
# then devices add what they have; a norm is summed over parts of weights in the same
# way. That changes the order of sums alone, as other meshes do.
@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize(("mesh", "stage", "tier"), slow_except(FAST, CASES))
def test_losses_and_norms_are_those_of_one_device(mesh, stage, tier):
    expected, found = train(None, 0, "fused"), train(mesh, stage, tier)
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "optimizer on host", "nvme"])
def test_tiers_are_bit_equal_with_weights_divided(tier):
    expected, found = (train("2x4", 3, t) for t in ("host", tier))
    assert found.numbers == expected.numbers
    for path, content in expected.params.items():
        np.testing.assert_array_equal(found.params[path], content, path)


@pytest.mark.slow
def test_in_bfloat16_losses_are_those_of_one_device():
    expected = train(None, 0, "fused", bf16=True)
    found = train("2x4", 2, "fused", bf16=True)
    # Each device rounds its part of a sum to 8 bits before devices add them.
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=2.0**-7)


# A group of 4 devices, of which 2 divide weights, has all parameters (ZeRO++'s hpZ).
@pytest.mark.slow
def test_groups_that_keep_parameters_may_divide_weights():
    settings = config(3, "fused", "")
    settings["zero_optimization"]["zero_hpz_partition_size"] = 4
    mesh = zinf.make_mesh(jax.devices()[:8], num_replicas=2, num_tensor=2)
    expected = train(None, 0, "fused").numbers
    np.testing.assert_allclose(numbers(mesh, settings), expected, rtol=BOUND)


# Each part of a weight is rounded by at most 1/254 of its largest number (ZeRO++'s
# qwZ). The bound is that of `test_quantized_weights`, of a wider network.
@pytest.mark.slow
def test_weights_that_are_divided_may_be_gathered_as_integers():
    settings = config(3, "device", "")
    settings["zero_optimization"]["zero_quantized_weights"] = True
    expected = train(None, 0, "fused").numbers
    found = numbers(mesh_of("4x2"), settings)
    # Beyond what the order of sums does.
    assert np.abs(np.array(found) / expected - 1).max() > BOUND
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def numbers(mesh: Any, settings: dict[str, Any]) -> list[float]:
    """The loss and gradient norm of each step."""
    engine = start(mesh, settings)
    metrics = [engine.step(batch) for batch in batches()]
    engine.close()
    return [float(m[k]) for m in metrics for k in ("loss", "grad_norm")]


def test_all_arrays_of_a_weight_are_cut_as_it_is_and_zero_cuts_them_further():
    settings = config(3, "fused", "") | {"bf16": {"enabled": True}}
    settings |= {"persistence_threshold": 1}
    tx = optax.adamw(1e-2)
    planner = make_planner(loss, init, tx, settings, mesh=mesh_of("2x4"))
    layouts = planner.layouts(planner.trace(planner.batch_spec(batches()[0])))
    roles = {a.role for a in layouts.arrays if a.path == "layer 0/up"}
    assert roles == {Role.PARAM, Role.GRADIENT, Role.MASTER, Role.STATE}
    for array, layout in layouts.arrays.items():
        name = array.path.rsplit("/", 1)[-1]
        shape = list(layout.shape)
        if array.path.startswith("layer") and name in (*COLUMNS, *ROWS):
            tensor_dim = 1 if name in COLUMNS else 0
            shape[tensor_dim] //= 4  # Along `tensor`,
            assert layout.computed.shard_shape(layout.shape) == tuple(shape), array
            shape[1 - tensor_dim] //= 2  # and ZeRO along `fsdp`.
            assert layout.device_shape == tuple(shape), array
        elif name == "bias":
            assert layout.device_shape == (HIDDEN // 4,), array
        else:
            # ZeRO divides other leaves among all devices. A scalar is whole.
            assert layout.computed.is_fully_replicated, array
            parts = np.prod(layout.padded) // np.prod(layout.device_shape)
            assert parts == (8 if layout.shape else 1), array


@pytest.mark.slow
def test_a_plan_counts_the_bytes_of_the_cut():
    whole, cut = (
        zinf.plan_only(
            loss,
            init,
            optax.adamw(1e-2),
            config(0, "device", ""),
            batch=batches()[0],
            mesh=mesh,
        )
        for mesh in (zinf.make_mesh(jax.devices()[:4]), mesh_of("4"))
    )
    divided = LAYERS * (4 * DIM * DIM + 2 * DIM * HIDDEN + HIDDEN)
    # Three of four parts of each weight and of its two moments are on other devices.
    saved = 3 * 4 * divided * 3 // 4
    resident = [plan.home_bytes[Tier.DEVICE] for plan in (whole, cut)]
    assert resident[0] - resident[1] == saved


@pytest.mark.slow
def test_a_run_is_saved_and_restored_with_weights_divided_otherwise(tmp_path):
    cases = [("2x4", 3, "nvme"), ("2", 0, "fused"), ("8", 1, "host"), (None, 0, "host")]

    def started() -> Iterator[zinf.Engine]:
        for number, (name, stage, tier) in enumerate(cases):
            folder = str(tmp_path / f"nvme {number}")
            mesh = zinf.make_mesh(jax.devices()[:1]) if name is None else mesh_of(name)
            yield start(mesh, config(stage, tier, folder))

    check_each_restores_the_one_before(started(), batches()[0], tmp_path)


def test_a_model_without_weights_to_divide_is_refused():
    def flat(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    params = {"w": jnp.zeros((DIM, 3))}
    engine = zinf.initialize(flat, params, optax.sgd(1.0), mesh=mesh_of("2"))
    with pytest.raises(ValueError, match="none of this model's can be divided: w"):
        engine.step(batches()[0])
    engine.close()


def test_a_config_asks_for_a_tensor_axis_in_two_spellings():
    for section in ({"mesh": {"tensor": 4}}, {"tensor_parallel": {"autotp_size": 4}}):
        settings = {"zero_optimization": {"stage": 1}, "persistence_threshold": 1}
        engine = zinf.initialize(loss, init, optax.sgd(1.0), settings | section)
        assert dict(engine.planner.rule.mesh.shape)["tensor"] == 4
        assert engine.planner.rule.mesh.shape["fsdp"] == 2
        engine.close()
