"""Programs that zinf once trained wrong, without a word, beside plain JAX.

Layers that call different host functions are different code, however alike. A lookup
beyond a table is the same by tile.
"""

from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import zinf
from zinf.core.engine.initialize import make_planner
from zinf.core.step import shrink

SHAPE = jax.ShapeDtypeStruct((4, 8), jnp.float32)
PARAMS = [np.full((8, 8), (i + 1) / 8, np.float32) for i in range(3)]
BATCH = np.arange(32, dtype=np.float32).reshape(4, 8) / 32
STREAMED = {"execution": "streamed", "segment": {"max_bytes": 4 * 64}}


def scaled(factor: float) -> Any:
    return lambda x: (np.asarray(x) * factor).astype(np.float32)


def plain_callback(factor: float, x: Any) -> Any:
    return jax.pure_callback(scaled(factor), SHAPE, jax.lax.stop_gradient(x))


def in_a_rule(factor: float, x: Any) -> Any:
    """A `custom_vjp` that calls a host function forward and another one backward."""
    forward, backward = scaled(factor), scaled(2 * factor)

    @jax.custom_vjp
    def call(x: Any) -> Any:
        return jax.pure_callback(forward, SHAPE, x)

    call.defvjp(
        lambda x: (call(x), None),
        lambda _, g: (jax.pure_callback(backward, SHAPE, g),),
    )
    return call(x)


def layers(call: Any, params: Any, batch: Any) -> Any:
    x = batch
    for i, w in enumerate(params):
        x = x @ w + call(float(i + 1), x)
    return x


def loss(call: Any, params: Any, batch: Any) -> Any:
    return jnp.mean(layers(call, params, batch))


@pytest.mark.parametrize("call", [plain_callback, in_a_rule])
def test_each_layer_calls_its_own_host_function(call):
    function = partial(loss, call)
    expected, gradient = jax.value_and_grad(function)(PARAMS, BATCH)
    arguments = function, PARAMS, optax.sgd(1.0), STREAMED
    with closing(zinf.initialize(*arguments, batch=BATCH)) as engine:
        applied = engine.apply(partial(layers, call), BATCH)
        found, new = engine.step(BATCH)["loss"], engine.params()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(applied, layers(call, PARAMS, BATCH), rtol=1e-6)
    for old, x, g in zip(PARAMS, new, gradient, strict=True):
        np.testing.assert_allclose(old - x, g, rtol=1e-5, atol=1e-5)


def test_each_layer_reports_to_its_own_callback():
    heard: list[int] = []

    def reporting(params: Any, batch: Any) -> Any:
        x = batch
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            jax.debug.callback(lambda _, i=i: heard.append(i), x[0, 0])
        return jnp.mean(x)

    arguments = reporting, PARAMS, optax.sgd(1.0), STREAMED
    with closing(zinf.initialize(*arguments, batch=BATCH)) as engine:
        engine.evaluate(BATCH)
        jax.effects_barrier()
        assert {*heard} == {0, 1, 2}


@pytest.mark.parametrize("call", [jnp.tanh, jax.nn.relu, jax.checkpoint(jnp.sin)])
def test_layers_of_one_function_share_one_body(call):
    def alike(params: Any, batch: Any) -> Any:
        x = batch
        for w in params:
            x = call(x @ w)
            jax.debug.callback(print_nothing, x[0, 0])
        return jnp.mean(x)

    planner = make_planner(alike, PARAMS * 2, optax.sgd(1.0), STREAMED)
    program = planner.plan(jax.ShapeDtypeStruct((4, 8), np.float32)).segmented.program
    assert len({segment.body for segment in program.segments}) == 3
    assert len(program.segments) == len(PARAMS * 2) + 1


def print_nothing(_: Any) -> None: ...


@pytest.mark.parametrize("mode", [None, "clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("max_bytes", [1 << 20, 4 * 4 * 8], ids=["whole", "by_tile"])
def test_a_lookup_beyond_the_table_has_the_gradient_of_jax(mode, max_bytes):
    """In jax's default mode the nearest row is read, and its gradient is dropped."""
    table = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    ids = np.array([[0, 3, 15, 16], [40, -1, -17, -40]], np.int32)

    def loss(params: Any, ids: Any) -> Any:
        rows = params["table"].at[ids].get(mode=mode)
        return jnp.sum(jnp.square(jnp.nan_to_num(rows)))

    params = {"table": table}
    expected, gradient = jax.value_and_grad(loss)(params, ids)
    config = {"execution": "streamed", "segment": {"max_bytes": max_bytes}}
    with closing(zinf.initialize(loss, params, optax.sgd(1.0), config)) as engine:
        found, new = engine.step(ids)["loss"], engine.params()["table"]
    assert found == pytest.approx(float(expected))
    np.testing.assert_allclose(table - new, gradient["table"], rtol=1e-6, atol=1e-6)


def test_parameters_that_are_overwritten_with_their_gradient_are_refused():
    """As scales of Flax's float8 layers, which an optimizer would train."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)

    variables = Model().init(jax.random.key(0), BATCH)

    def loss(variables: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(Model().apply(variables, batch)))

    with pytest.raises(NotImplementedError, match="_overwrite_with_gradient.*float8"):
        zinf.initialize(loss, variables, optax.adam(1e-3))
    state = TrainState.create(
        apply_fn=Model().apply, params=variables, tx=optax.adam(1e-3)
    )
    with pytest.raises(NotImplementedError, match="_overwrite_with_gradient.*float8"):
        zinf.linen.initialize(loss, state, batch=BATCH)


def wide_init() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [
        0.05 * jax.random.normal(k, (320, n))
        for k, n in zip(keys, (64, 320), strict=True)
    ]
    return {"w": weights, "c": [jnp.zeros(320)] * 2}


def by_sample(params: Any, batch: Any) -> Any:
    """Products of a weight and one sample, whose dims are NumPy's integers."""

    def one(x: Any) -> Any:
        for w, c in zip(params["w"], params["c"], strict=True):
            x = jnp.tanh(w @ x + c)
        return x

    return jnp.mean(jnp.square(jax.vmap(one)(batch)))


def test_weights_of_one_sample_are_read_by_tile():
    memory = {"device": 2**18, "host": 2**22}
    config = {"train_batch_size": 4, "execution": "streamed", "memory": memory}
    batch = np.ones((4, 64), np.float32)
    found = zinf.verify(by_sample, wide_init, optax.sgd(0.1), config, batch=batch)
    assert found, repr(found)


def test_what_cannot_rest_anywhere_is_refused_after_one_attempt(monkeypatch):
    """Adam's state of 1.5 MB, in 1.25 MiB of budgets: smaller segments do not help."""
    tried = []
    compile_once = shrink.compiled
    monkeypatch.setattr(
        shrink, "compiled", lambda *given: tried.append(1) or compile_once(*given)
    )
    memory = {"device": 2**18, "host": 2**20}
    config = {"train_batch_size": 4, "execution": "streamed", "memory": memory}
    batch = np.ones((4, 64), np.float32)
    with pytest.raises(ValueError, match="Raise memory.device .* and memory.host to"):
        zinf.initialize(by_sample, wide_init, optax.adam(0.1), config, batch=batch)
    assert len(tried) == 1
