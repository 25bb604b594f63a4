"""Layers that are equal share their executables, however many there are."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.marks import slow_except
from zinf.initialize import make_planner
from zinf.models import GPTConfig
from zinf.models.gpt import init_and_loss
from zinf.prepare.planner import Planner, Streamed
from zinf.program import Program

DIM, BATCH, FEW, MANY = 8, 4, 4, 48
X = np.ones((BATCH, DIM), np.float32)
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)
KEY = jax.random.key(0)
Pair = tuple[Callable, Callable]


def linen(num_layers: int) -> Pair:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            hidden = nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x)))
            return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(DIM)(hidden))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(DIM)(x)
            for _ in range(num_layers):
                x = Block()(x)
            return nn.Dense(1)(x)

    def init():
        keys = {"params": KEY, "dropout": KEY}
        return Net().init(keys, X)["params"]

    def loss(params, batch, key):
        out = Net().apply({"params": params}, batch, rngs={"dropout": key})
        return jnp.mean(jnp.square(out))

    return init, loss


def nnx_list(num_layers: int) -> Pair:
    """Dropout draws from the module's own streams, whose counts are state."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(DIM, rngs=rngs)
            self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(nnx.tanh(self.linear(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(num_layers)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def init():
        return nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0))))

    def loss(params, batch, key):
        return jnp.mean(jnp.square(nnx.merge(graphdef, params)(batch)))

    return init, loss


def gpt(num_layers: int, *, scan_layers: bool) -> Pair:
    config = GPTConfig(
        num_layers=num_layers,
        num_heads=2,
        embed_dim=DIM,
        vocab_size=8,
        max_length=DIM,
        dropout=0.1,
        scan_layers=scan_layers,
    )
    init, loss = init_and_loss(config, seed=0)
    return init, lambda p, x, key: loss(p, {"tokens": x.astype(jnp.int32)}, key)


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(DIM, DIM, key=key)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        return x + self.dropout(jnp.tanh(self.linear(x)), key=key)


def equinox(num_layers: int) -> Pair:
    def build():
        return [Layer(k) for k in jax.random.split(KEY, num_layers)]

    static = eqx.filter(build(), eqx.is_array, inverse=True)

    def loss(params, batch, key):
        def apply(x, key):
            keys = jax.random.split(key, num_layers)
            for layer, k in zip(eqx.combine(params, static), keys, strict=True):
                x = layer(x, k)
            return x

        out = jax.vmap(apply)(batch, jax.random.split(key, BATCH))
        return jnp.mean(jnp.square(out))

    return lambda: eqx.filter(build(), eqx.is_array), loss


def haiku(num_layers: int) -> Pair:
    def forward(x):
        for _ in range(num_layers):
            hidden = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, jnp.tanh(hk.Linear(DIM)(hidden)))
        return x

    net = hk.transform(forward)

    def loss(params, batch, key):
        return jnp.mean(jnp.square(net.apply(params, key, batch)))

    return lambda: net.init(KEY, X), loss


FRAMEWORKS = {
    "linen": linen,
    "nnx_list": nnx_list,
    "gpt_list": partial(gpt, scan_layers=False),
    "gpt_scan": partial(gpt, scan_layers=True),
    "equinox": equinox,
    "haiku": haiku,
}


def planner_of(name: str, num_layers: int) -> Planner:
    init, loss = FRAMEWORKS[name](num_layers)
    config = {"execution": "streamed"}
    return make_planner(loss, init, optax.adam(1e-3), config, rng=KEY)


@pytest.mark.parametrize("name", slow_except(["linen", "gpt_scan"], FRAMEWORKS))
def test_48_layers_have_as_many_executables_as_4(name):
    planners = [planner_of(name, n) for n in (FEW, MANY)]
    sources = [planner.trace(SPEC) for planner in planners]
    few, many = (
        p.cut(source, p.layouts(source), None).program
        for p, source in zip(planners, sources, strict=True)
    )
    assert len(many.segments) - len(few.segments) == MANY - FEW
    assert count_bodies(many) == count_bodies(few)


def count_bodies(program: Program) -> int:
    return len({segment.body for segment in program.segments})


@pytest.mark.slow
def test_48_layers_are_compiled_in_as_many_calls_as_4(monkeypatch):
    compiled = []
    compile_lowered = jax.stages.Lowered.compile

    def count(lowered: jax.stages.Lowered, *args: Any, **options: Any) -> Any:
        compiled[-1] += 1
        return compile_lowered(lowered, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", count)
    for num_layers in (FEW, MANY):
        compiled.append(0)
        prepared = planner_of("linen", num_layers).plan(SPEC)
        assert isinstance(prepared, Streamed)
        assert len(prepared.segments) >= num_layers
    few, many = compiled
    assert few == many > 4


def test_a_rule_that_jax_differentiated_before_is_streamed_and_shared():
    """As diffrax's solvers have: a rule that raises if asked for one more input.

    `jax.jit` gives jax and zinf the same equation, and jax keeps one store of output
    structures for all derivatives of it.
    """

    @jax.custom_vjp
    def layer(x, w, t):
        return jnp.tanh(x @ w) * t

    def forward(x, w, t):
        if t.perturbed:
            raise RuntimeError("t cannot be differentiated")
        return layer(x.value, w.value, t.value), (x.value, w.value, t.value)

    def backward(residuals, g):
        x, w, t = residuals
        d = g * t * (1 - jnp.square(jnp.tanh(x @ w)))
        return d @ w.T, x.T @ d, jnp.zeros(())

    layer.defvjp(forward, backward, symbolic_zeros=True)
    jitted = jax.jit(layer)

    def loss(params, batch):
        for w in params:
            batch = jitted(batch, w, jnp.float32(1))
        return jnp.mean(jnp.square(batch))

    params = [jnp.eye(DIM) * (i + 1) for i in range(FEW)]
    expected, grads = jax.value_and_grad(loss)(params, X)
    config = {"execution": "streamed", "segment": {"max_bytes": 4 * DIM * DIM}}
    program = make_planner(loss, params, optax.sgd(1.0), config).plan(SPEC).segmented
    # The first layer has no cotangent for its input, and the last computes the loss.
    assert count_bodies(program.program) == 3
    assert len(program.program.segments) == FEW + 1
    engine = zinf.initialize(loss, params, optax.sgd(1.0), config, batch=X)
    with closing(engine):
        np.testing.assert_allclose(engine.step(X)["loss"], expected, rtol=1e-6)
        new = engine.params()
    for before, after, grad in zip(params, new, grads, strict=True):
        np.testing.assert_allclose(before - after, grad, rtol=1e-4, atol=1e-7)
