"""Parameters that are gathered as 8-bit integers (ZeRO++ qwZ)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.equivalence.models import Model
from tests.equivalence.training import (
    BOUND,
    ON_DEVICE,
    ON_HOST,
    OPTIMIZERS,
    Setting,
    assert_bit_equal,
    mesh_of,
    train,
)
from zinf.core.engine.initialize import make_planner
from zinf.core.sharding import Blocks
from zinf.core.step.compiled import compiled_runs, step_traffic
from zinf.core.step.planner import Planner

NUM_DEVICES, DIM, LAYERS = 8, 256, 2
ADAM = "slow adam"
# A weight changes by at most 1/254 of the largest in its block, and changes cancel
# in sums of 256 products: losses and norms differ by up to 7.3e-4 in three steps.
LOSS_BOUND = 2e-3
QUANTIZED = (("zero_optimization.zero_quantized_weights", True),)


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


def draw(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    shapes = {"x": (size, 16), "y": (size, 128)}
    return {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}


WIDE = Model("wide", init, loss, draw, size=16, config={"persistence_threshold": 1})
WHOLE = Setting(mesh="8")
ROUNDED = Setting(mesh="8", more=QUANTIZED)


def planner(setting: Setting, **rest: Any) -> Planner:
    config = setting.config(WIDE, "") | rest
    mesh = mesh_of(setting.mesh)
    return make_planner(loss, init, OPTIMIZERS[ADAM], config, mesh=mesh)


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
    value, grads = jax.value_and_grad(loss)(params, WIDE.batches(1)[0])
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    found, whole = (train(WIDE, s, ADAM) for s in (ROUNDED, WHOLE))
    first = found.losses[0], found.grad_norms[0]
    np.testing.assert_allclose(first, (value, norm), rtol=BOUND)
    # Masters are whole, so all steps stay near those of whole weights.
    assert BOUND < found.deviation(whole) <= LOSS_BOUND
    assert found.losses[-1] < found.losses[0]
    on_host = Setting(ON_HOST, mesh="8", more=QUANTIZED)
    assert_bit_equal(train(WIDE, on_host, ADAM), found)


@pytest.mark.slow
def test_copies_that_groups_hold_are_equal_on_all_tiers_and_read_unrounded():
    """With hpZ, updates go to other groups as integers where copies are on devices."""
    groups = ("zero_optimization.zero_hpz_partition_size", 4)
    more = (*QUANTIZED, groups)
    settings = [
        Setting(place, "bf16 accumulation", mesh="2x4", more=more)
        for place in (ON_DEVICE, ON_HOST, ("none", "cpu"), "fused")
    ]
    expected, *streamed = (train(WIDE, s, ADAM) for s in settings[:3])
    for found in streamed:
        assert_bit_equal(found, expected)
    assert train(WIDE, settings[-1], ADAM).deviation(expected) <= BOUND
    # Of leaves larger than a segment the devices update and read some rows at a time.
    tiled = ("segment.max_bytes", 2 * DIM * DIM // 4)
    by_rows = replace(settings[0], more=(*more, tiled))
    assert train(WIDE, by_rows, ADAM).deviation(expected) <= BOUND
    with pytest.raises(NotImplementedError, match="last rests .* by rows"):
        train(WIDE, replace(by_rows, place=("none", "cpu")), ADAM)
    for setting in (settings[0], by_rows, settings[-1]):
        config = setting.config(WIDE, "")
        with WIDE.start(OPTIMIZERS[ADAM], config, mesh=mesh_of("2x4")) as engine:
            engine.step(WIDE.batches(1, 2)[0])
            for path in ("first", "layers", "last"):
                master, copy = (engine.get(path, k) for k in ("master", "compute"))
                np.testing.assert_array_equal(master.astype(copy.dtype), copy)


@pytest.mark.slow
def test_gathers_send_a_quarter_of_the_bytes():
    def gathered_bytes(setting: Setting) -> float:
        made = planner(setting, segment={}).plan_batch(WIDE.batches(1)[0])
        return step_traffic(compiled_runs(made))["all-gather"].sent_bytes

    # Of each leaf, how often a step gathers it and the numbers in a block: the backward
    # pass does not need "first", and the last segment runs both passes at once.
    leaves = [(16 * DIM, 1, 32), (LAYERS * DIM * DIM, 2, 256), (DIM * 128, 1, 16)]
    plain = sum(4 * n * times for n, times, _ in leaves)
    sent = sum(n * times * (1 + 4 / block) for n, times, block in leaves)
    ratio = gathered_bytes(WHOLE) / gathered_bytes(ROUNDED)
    assert ratio == pytest.approx(plain / sent, rel=1e-3)
    assert ratio > 3.8


def test_on_one_device_nothing_is_gathered_or_rounded():
    one = planner(Setting(ON_DEVICE, more=QUANTIZED))
    source = one.trace(jax.eval_shape(lambda: WIDE.batches(1)[0]))
    assert all(x.layout.is_gathered for x in one.layouts(source).arrays.values())


@pytest.mark.slow
def test_a_fused_step_gathers_once_what_a_streamed_step_gathers():
    found = train(WIDE, Setting("fused", mesh="8", more=QUANTIZED), ADAM)
    assert found.deviation(train(WIDE, ROUNDED, ADAM)) <= BOUND
    made = planner(ROUNDED, execution="fused").plan_batch(WIDE.batches(1)[0])
    # Integers of one byte and a scale of four for each block; leaves are gathered once.
    leaves = [(16 * DIM, 32), (LAYERS * DIM * DIM, 256), (DIM * 128, 16)]
    others = (NUM_DEVICES - 1) / NUM_DEVICES
    expected = sum(n * (1 + 4 / block) * others for n, block in leaves)
    sent = step_traffic(compiled_runs(made))["all-gather"].sent_bytes
    assert sent == pytest.approx(expected, rel=1e-3)
