"""Layers that are equal share their executables, however many there are."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence import programs
from zinf.core.engine.initialize import make_planner
from zinf.core.program import Program
from zinf.core.step.planner import Planner
from zinf.core.step.run.streamed import Streamed
from zinf.core.step.shrink import cut
from zinf.models import GPTConfig
from zinf.models.gpt_functions import init_and_loss

DIM, BATCH, FEW, MANY = 8, 4, 4, 48
X = np.ones((BATCH, DIM), np.float32)
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)
KEY = jax.random.key(0)


def gpt(num_layers: int, *, scan_layers: bool) -> tuple[Callable, Callable]:
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


def planner_of(num_layers: int, *, scan_layers: bool) -> Planner:
    init, loss = gpt(num_layers, scan_layers=scan_layers)
    config = {"execution": "streamed"}
    return make_planner(loss, init, optax.adam(1e-3), config, rng=KEY)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_48_layers_have_as_many_executables_as_4(scan_layers):
    """Of modules in a list, and of stacked ones in one scan; dropout in each."""
    planners = [planner_of(n, scan_layers=scan_layers) for n in (FEW, MANY)]
    sources = [planner.trace(SPEC) for planner in planners]
    few, many = (
        cut(p, source, p.layouts(source), None).program
        for p, source in zip(planners, sources, strict=True)
    )
    assert len(many.segments) - len(few.segments) == MANY - FEW
    assert count_bodies(many) == count_bodies(few)


# Layers that differ in literals, keys or operands of equal code.
ALIKE = [
    "dropout_with_microbatches",
    "a_chain_of_split_keys",
    "keys_scanned_along_with_layers",
    "keys_and_constants_that_the_loss_closes_over",
    "custom_rules_in_every_layer",
    "loops_and_branches_in_every_layer",
    "experts_of_every_layer",
    "a_haiku_transform",
]


@pytest.mark.parametrize("name", ALIKE)
def test_more_layers_have_no_more_executables(name, monkeypatch):
    (program,) = (p for p in programs.PROGRAMS if p.name == name)
    counts = []
    for num_layers in (5, 8):
        monkeypatch.setattr(programs, "LAYERS", num_layers)
        planner = make_planner(
            program.loss,
            program.init,
            optax.adam(1e-3),
            {"execution": "streamed", **program.config},
            rng=KEY if program.uses_key else None,
        )
        source = planner.trace(planner.batch_spec(program.batch))
        made = cut(planner, source, planner.layouts(source), None).program
        counts.append((len(made.segments), count_bodies(made)))
    (few, bodies), (many, same) = counts
    assert many == few + 3
    assert same == bodies < few


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
        prepared = planner_of(num_layers, scan_layers=False).plan(SPEC)
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
