"""Under jax's global modes an engine computes the same, or is refused with a reason."""

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.unit.plain import trained_in_jax
from zinf import Engine
from zinf.core.program import ArrayId, Role
from zinf.core.step.run.streamed import StreamedRunner

DIM, ROWS, STEPS = 8, 16, 3
KEY = jax.random.key(1)


def make_params(dtype: Any = np.float32) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"w": (DIM, DIM), "b": (1, 1, DIM), "table": (ROWS, DIM)}
    return {k: 0.3 * random.standard_normal(s).astype(dtype) for k, s in shapes.items()}


def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Clean under strict promotion; draws the same bits in any mode; ties `table`."""
    tokens, table = batch["tokens"], params["table"]
    x = table[tokens]
    x = x + jnp.tanh(x @ params["w"] + params["b"])
    kept = jax.random.bernoulli(key, jnp.float32(0.9), x.shape)
    logits = jnp.where(kept, x, jnp.zeros((), x.dtype)) @ table.T
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))


def draw(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {"tokens": random.integers(0, ROWS, (4, 2), dtype=np.int32)}


def start(execution: str, params: Any = None) -> Engine:
    """With accumulation, and clipping that waits for the norm but changes nothing."""
    config = {
        "execution": execution,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1000.0,
        "segment": {"max_bytes": 1024},
    }
    params = make_params() if params is None else params
    tx = optax.adamw(1e-2)
    return zinf.initialize(loss_fn, params, tx, config, rng=KEY, batch=draw(0))


def train(engine: Engine) -> tuple[list[float], Any]:
    return [engine.step(draw(i))["loss"] for i in range(STEPS)], engine.params()


def by_plain_jax(params: Any) -> tuple[list[float], Any]:
    steps = []
    for i in range(STEPS):
        keys = [jax.random.fold_in(jax.random.fold_in(KEY, i), m) for m in range(2)]
        halves = [{"tokens": x} for x in np.split(draw(i)["tokens"], 2)]
        steps.append(list(zip(halves, keys, strict=True)))
    return trained_in_jax(loss_fn, params, optax.adamw(1e-2), steps)


@contextmanager
def set_globally(name: str, value: Any) -> Generator[None, None, None]:
    """For every thread, as a program does that calls `jax.config.update`."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def surrounding_mesh(kind: Any) -> AbstractContextManager:
    return jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(kind,)))


# Each mode in this thread, and for every thread.
HERE = [
    lambda: jax.transfer_guard("disallow_explicit"),
    lambda: surrounding_mesh(jax.sharding.AxisType.Explicit),
    lambda: jax.numpy_dtype_promotion("strict"),
]
EVERYWHERE = [
    lambda: set_globally("jax_transfer_guard", "disallow_explicit"),
    lambda: surrounding_mesh(jax.sharding.AxisType.Auto),
    lambda: set_globally("jax_numpy_dtype_promotion", "strict"),
]
X64 = {
    "here": lambda: jax.enable_x64(True),
    "everywhere": lambda: set_globally("jax_enable_x64", True),
}


@pytest.fixture(scope="module", params=["fused", "streamed"])
def execution(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(execution: str) -> tuple[list[float], Any]:
    with start(execution) as engine:
        return train(engine)


def expect_equal(found: tuple[list[float], Any], expected: tuple[list[float], Any]):
    assert found[0] == expected[0]
    chex.assert_trees_all_equal(found[1], expected[1], strict=True)


@pytest.mark.parametrize("modes", [HERE, EVERYWHERE], ids=["here", "everywhere"])
def test_an_engine_made_under_modes_computes_the_same(modes, execution, expected):
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        with start(execution) as engine:
            expect_equal(train(engine), expected)


def test_an_engine_made_before_or_under_a_mode_may_step_outside(execution, expected):
    modes = [*HERE, *EVERYWHERE, *X64.values(), jax.disable_jit]
    with start(execution) as engine:
        losses = []
        for i, some in enumerate(np.array_split(np.array(modes), STEPS)):
            for mode in some[:-1]:
                with mode():
                    engine.evaluate(draw(i))
            with some[-1]():
                losses.append(engine.step(draw(i))["loss"])
        expect_equal((losses, engine.params()), expected)
    with jax.set_mesh(jax.make_mesh((8,), ("x",))), jax.transfer_guard("disallow"):
        engine = start(execution)
    with engine:
        expect_equal(train(engine), expected)


def test_disable_jit_is_refused_with_what_to_do():
    with jax.disable_jit(), pytest.raises(ValueError, match="disable_jit is on") as e:
        start("fused")
    assert "call loss_fn(params, batch) yourself" in str(e.value)


@pytest.mark.parametrize(
    ("dtype", "rtol", "where", "execution"),
    [
        (np.float32, 1e-4, "everywhere", "fused"),
        (np.float64, 1e-12, "everywhere", "streamed"),
        (np.float64, 1e-12, "here", "streamed"),
    ],
)
def test_with_x64_an_engine_trains_as_jax_does(dtype, rtol, where, execution):
    """Sums of float64 gradients are float64, and the plan counts them as such."""
    params = make_params(dtype)
    with X64[where]():
        engine = start(execution, params)
        expected, wanted = by_plain_jax(params)
    # The engine keeps the mode in which it was made.
    with engine:
        losses, found = train(engine)
        for tier in engine.stores.tiers:
            peak = engine.stores[tier].ledger.peak_bytes
            assert peak <= engine.plan.peak_bytes[tier]
        runner = engine._runners.current
        if isinstance(runner, StreamedRunner):
            gradient = ArrayId(Role.GRADIENT, "w")
            counted = runner.arranged.catalog.nbytes(gradient)
            assert counted == params["w"].nbytes
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    chex.assert_trees_all_close(found, wanted, rtol=rtol, atol=rtol)
    chex.assert_type(jax.tree.leaves(found), dtype)


def test_a_function_that_needs_the_surrounding_mesh_is_told_what_to_do():
    def constrained(params: Any, batch: Any) -> jax.Array:
        spec = jax.sharding.PartitionSpec("x")
        return jnp.sum(jax.lax.with_sharding_constraint(params * batch, spec))

    sizes = np.ones(8, np.float32)
    mesh = surrounding_mesh(jax.sharding.AxisType.Auto)
    with mesh, pytest.raises(RuntimeError) as caught:
        zinf.initialize(constrained, sizes, optax.sgd(0.1), batch=sizes)
    assert "pass mesh= to zinf.initialize" in "".join(caught.value.__notes__)
