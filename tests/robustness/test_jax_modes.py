"""Under jax's global modes an engine computes the same, or is refused with a reason."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf import Engine
from zinf.executor.streamed import StreamedRunner
from zinf.program import ArrayId, Role

DIM, ROWS, STEPS = 8, 16, 3
EXECUTIONS = ("fused", "streamed")
KEY = jax.random.key(1)


def make_params(dtype: Any = np.float32) -> dict[str, Any]:
    random = np.random.default_rng(0)
    layers = [
        {"w": 0.3 * random.standard_normal((DIM, DIM)), "b": np.zeros((1, 1, DIM))}
        for _ in range(2)
    ]
    tree = {"layers": layers, "table": random.standard_normal((ROWS, DIM))}
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Clean under strict promotion; draws the same bits in any mode; ties `table`."""
    table = params["table"]
    x = table[batch["tokens"]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    kept = jax.random.bernoulli(key, jnp.float32(0.9), x.shape)
    logits = jnp.where(kept, x, jnp.zeros((), x.dtype)) @ table.T
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["tokens"][..., None], -1
    )
    return -jnp.mean(chosen)


def draw(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {"tokens": random.integers(0, ROWS, (4, 2), dtype=np.int32)}


def start(execution: str, params: Any = None) -> Engine:
    """With accumulation, and clipping that waits for the norm but changes nothing."""
    config: dict[str, Any] = {
        "execution": execution,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1000.0,
    }
    if execution == "streamed":
        config["segment"] = {"max_bytes": 1024}
    params = make_params() if params is None else params
    tx = optax.adamw(1e-2)
    return zinf.initialize(loss_fn, params, tx, config, rng=KEY, batch=draw(0))


def train(engine: Engine) -> tuple[list[float], Any]:
    return [engine.step(draw(i))["loss"] for i in range(STEPS)], engine.params()


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


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "transfer_guard of all": lambda: jax.transfer_guard("disallow_explicit"),
    "transfer_guard everywhere": lambda: set_globally(
        "jax_transfer_guard", "disallow_explicit"
    ),
    "set_mesh": lambda: surrounding_mesh(jax.sharding.AxisType.Auto),
    "set_mesh explicit": lambda: surrounding_mesh(jax.sharding.AxisType.Explicit),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "strict promotion everywhere": lambda: set_globally(
        "jax_numpy_dtype_promotion", "strict"
    ),
}
WITH_X64: dict[str, Callable[[], AbstractContextManager]] = {
    "here": lambda: jax.enable_x64(True),
    "everywhere": lambda: set_globally("jax_enable_x64", True),
}


@pytest.fixture(scope="module", params=EXECUTIONS)
def execution(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(execution: str) -> tuple[list[float], Any]:
    with start(execution) as engine:
        return train(engine)


def expect_equal(found: tuple[list[float], Any], expected: tuple[list[float], Any]):
    assert found[0] == expected[0]
    chex.assert_trees_all_equal(found[1], expected[1], strict=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_made_under_a_mode_computes_the_same(mode, execution, expected):
    with MODES[mode](), start(execution) as engine:
        expect_equal(train(engine), expected)


@pytest.mark.sampled(1)
def test_an_engine_made_before_or_under_a_mode_may_step_outside(execution, expected):
    with start(execution) as engine:
        losses = []
        modes = [*MODES.values(), *WITH_X64.values(), jax.disable_jit]
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", WITH_X64)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(np.float32, 1e-4), (np.float64, 1e-12)], ids=str
)
def test_with_x64_an_engine_trains_as_jax_does(dtype, rtol, where, execution):
    """Sums of float64 gradients are float64, and the plan counts them as such."""
    params = make_params(dtype)
    with WITH_X64[where]():
        with start(execution, params) as engine:
            losses, found = train(engine)
            for tier in engine.stores.tiers:
                peak = engine.stores[tier].ledger.peak_bytes
                assert peak <= engine.plan.peak_bytes[tier]
            runner = engine._current
            if isinstance(runner, StreamedRunner):
                gradient = ArrayId(Role.GRADIENT, "layers/0/w")
                counted = runner.arranged.catalog.nbytes(gradient)
                assert counted == params["layers"][0]["w"].nbytes
        expected, wanted = train_in_jax(params)
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    chex.assert_trees_all_close(found, wanted, rtol=rtol, atol=rtol)
    chex.assert_type(jax.tree.leaves(found), dtype)


@pytest.mark.slow
def test_an_engine_made_with_x64_keeps_it(execution):
    with jax.enable_x64(True):
        engine = start(execution, make_params(np.float64))
    with engine:
        losses, found = train(engine)
    assert found["table"].dtype == np.float64
    with jax.enable_x64(True):
        expected, _ = train_in_jax(make_params(np.float64))
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def train_in_jax(params: Any) -> tuple[list[float], Any]:
    tx = optax.adamw(1e-2)
    state, losses = tx.init(params), []

    @jax.jit
    def step(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        def mean(params: Any) -> jax.Array:
            halves = [{"tokens": x} for x in jnp.split(batch["tokens"], 2)]
            keys = [jax.random.fold_in(key, m) for m in range(2)]
            pairs = zip(halves, keys, strict=True)
            return sum(loss_fn(params, half, key) for half, key in pairs) / 2

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    for i in range(STEPS):
        key = jax.random.fold_in(KEY, i)
        loss, params, state = step(params, state, draw(i), key)
        losses.append(float(loss))
    return losses, params


def test_a_function_that_needs_the_surrounding_mesh_is_told_what_to_do():
    def constrained(params: Any, batch: Any) -> jax.Array:
        spec = jax.sharding.PartitionSpec("x")
        return jnp.sum(jax.lax.with_sharding_constraint(params * batch, spec))

    sizes = np.ones(8, np.float32)
    mesh = surrounding_mesh(jax.sharding.AxisType.Auto)
    with mesh, pytest.raises(RuntimeError) as caught:
        zinf.initialize(constrained, sizes, optax.sgd(0.1), batch=sizes)
    assert "pass mesh= to zinf.initialize" in "".join(caught.value.__notes__)
