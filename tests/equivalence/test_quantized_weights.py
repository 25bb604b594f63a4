"""Parameters that are gathered as 8-bit integers (ZeRO++ qwZ)."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.meshes import BOUND
from zinf.initialize import make_planner
from zinf.prepare.compiled import compiled_runs, step_traffic
from zinf.sharding import Blocks

NUM_DEVICES, STEPS, DIM, LAYERS = 8, 3, 256, 2
TX = optax.adamw(1e-3)
# A weight changes by at most 1/254 of the largest in its block, and changes cancel
# in sums of 256 products: losses and norms differ by up to 7.3e-4 in three steps.
LOSS_BOUND = 2e-3


def init() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape, np.float32)
        return jnp.asarray(values * shape[-2] ** -0.5)

    return {
        "first": normal(16, DIM),
        "layers": normal(LAYERS, DIM, DIM),
        "last": normal(DIM, 128),
        "scale": jnp.float32(1.5),
    }


def loss(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w), None

    x = jax.lax.scan(layer, batch["x"] @ params["first"], params["layers"])[0]
    out = params["scale"] * (x @ params["last"])
    return jnp.mean(jnp.square(out - batch["y"]))


def batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    shapes = {"x": (16, 16), "y": (16, 128)}
    return [
        {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}
        for _ in range(STEPS)
    ]


def config(tier: str = "none", quantizes: bool = True) -> dict[str, Any]:
    return {
        "execution": "streamed",
        "persistence_threshold": 1,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": quantizes,
            "offload_param": {"device": tier},
            "offload_optimizer": {"device": tier},
        },
        "memory": {"device": "64MiB", "host": "64MiB"},
    }


def mesh() -> Any:
    return zinf.make_mesh(jax.devices()[:NUM_DEVICES])


@cache
def train(tier: str, quantizes: bool = True) -> Any:
    """Losses and gradient norms, and the parameters after the last step."""
    settings = config(tier, quantizes)
    engine = zinf.initialize(loss, init, TX, settings, mesh=mesh())
    metrics = [engine.step(batch) for batch in batches()]
    params = engine.params()
    engine.close()
    return [(m["loss"], m["grad_norm"]) for m in metrics], params


def rounded(leaf: jax.Array) -> jax.Array:
    """A leaf of which each device rounded its own part."""
    if leaf.ndim < 2:
        return leaf
    parts = []
    for part in jnp.split(leaf, NUM_DEVICES, axis=1):
        sent = [x[None] for x in Blocks().encode(part)]
        parts += list(Blocks().decode(sent, part.shape, part.dtype))
    return jnp.concatenate(parts, axis=1)


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_those_of_rounded_weights():
    params = jax.tree.map(rounded, init())
    value, grads = jax.value_and_grad(loss)(params, batches()[0])
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    found = train("none")[0][0]
    np.testing.assert_allclose(found, (value, norm), rtol=BOUND)


@pytest.mark.slow
def test_losses_stay_near_those_of_whole_weights():
    found, expected = train("none")[0], train("none", False)[0]
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=LOSS_BOUND)
    assert found[-1] < found[0]


@pytest.mark.slow
def test_tiers_give_the_same_bits():
    found, expected = train("cpu"), train("none")
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


def gathered_bytes(quantizes: bool) -> float:
    settings = config(quantizes=quantizes)
    planner = make_planner(loss, init, TX, settings, mesh=mesh())
    made = planner.plan_batch(batches()[0])
    return step_traffic(compiled_runs(made))["all-gather"].sent_bytes


@pytest.mark.slow
def test_gathers_send_a_quarter_of_the_bytes():
    # Of each leaf, how often a step gathers it and the numbers in a block: the backward
    # pass does not need "first", and the last segment runs both passes at once.
    leaves = [(16 * DIM, 1, 32), (LAYERS * DIM * DIM, 2, 256), (DIM * 128, 1, 16)]
    plain = sum(4 * n * times for n, times, _ in leaves)
    sent = sum(n * times * (1 + 4 / block) for n, times, block in leaves)
    ratio = gathered_bytes(False) / gathered_bytes(True)
    assert ratio == pytest.approx(plain / sent, rel=1e-3)
    assert ratio > 3.8


def test_on_one_device_nothing_is_gathered_or_rounded():
    one = zinf.make_mesh(jax.devices()[:1])
    planner = make_planner(loss, init, TX, config(), mesh=one)
    source = planner.trace(jax.eval_shape(lambda: batches()[0]))
    layouts = planner.layouts(source).arrays.values()
    assert all(layout.is_gathered for layout in layouts)


def test_a_fused_step_is_refused():
    settings = {**config(), "execution": "fused"}
    with pytest.raises(ValueError, match="execution.*zero_quantized_weights"):
        zinf.initialize(loss, init, TX, settings, mesh=mesh())
    # Left to zinf, it is streamed.
    planner = make_planner(
        loss, init, TX, {**config(), "execution": "auto"}, mesh=mesh()
    )
    assert not planner.plan_batch(batches()[0]).plan.is_fused
