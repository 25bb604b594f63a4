"""Segments run by hand, one after the other, give the loss and gradients of jax."""

from collections import defaultdict

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.segment.on_one import compiled_on
from zinf.jaxpr import abstract
from zinf.segment import (
    named_leaves,
    segment_loss,
    trace_loss,
)

WIDTH = 8
CPU = jax.devices("cpu")[0]
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 3, jnp.float32)


def layers(count):
    return [{"w": normal(WIDTH, WIDTH), "b": normal(1, WIDTH)} for _ in range(count)]


def compiled(loss, params, batch, *, key=None, frozen=(), **options):
    specs = [jax.tree.map(abstract, t) for t in (params, batch)]
    key = None if key is None else abstract(key)
    source = trace_loss(loss, *specs, key=key, max_remat_bytes=0, **options)
    segmented = segment_loss(
        source,
        frozen=frozen,
        splittable=set(source.params.values()),
        max_bytes=4 * (WIDTH + 1) * WIDTH,
    )
    return segmented, compiled_on(CPU, segmented)


def arrays_of(params):
    leaves = named_leaves(params)

    def read(array):
        leaf = leaves[array.path]
        return leaf if array.rows is None else leaf[slice(*array.rows)]

    return read


def run(segmented, segments, params, batch, *, seed=1.0):
    """`(loss, aux, gradients by array)` of a program, segment by segment."""
    read = arrays_of(params)
    values = {f"batch/{n}": x for n, x in named_leaves(batch).items()}
    values.update({n: jnp.asarray(x) for n, x in segmented.consts.items()})
    arguments = {}
    for segment in segments:
        spec = segment.spec
        arguments[spec.name] = (
            [read(a) for a in spec.params],
            [values[n] for n in spec.inputs],
        )
        if segment is not segments[-1]:
            outputs = segment.forward(*arguments[spec.name])
            values.update(zip(spec.outputs, outputs, strict=True))
    gradients, cotangents = defaultdict(float), {}

    def collect(spec, of_params, of_inputs):
        for array, gradient in zip(spec.trained_params, of_params, strict=True):
            gradients[array] += gradient
        for name, cotangent in zip(spec.active_inputs, of_inputs, strict=True):
            cotangents[name] = cotangents.get(name, 0) + cotangent

    last = segments[-1]
    seed = jnp.float32(seed)
    outputs, *results = last.loss(*arguments[last.spec.name], seed)
    collect(last.spec, *results)
    for segment in reversed(segments[:-1]):
        if segment.spec.has_backward:
            spec = segment.spec
            given = [cotangents[n] for n in spec.active_outputs]
            params_read = [read(a) for a in spec.read_backward]
            inputs = arguments[spec.name][1]
            collect(spec, *segment.backward(params_read, inputs, given))
    loss, *aux = outputs
    return loss, aux, dict(gradients)


def check(loss, params, batch, *, frozen=(), has_aux=False):
    segmented, segments = compiled(loss, params, batch, frozen=frozen, has_aux=has_aux)
    found, aux, gradients = run(segmented, segments, params, batch)
    function = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)
    wanted, wanted_gradients = jax.jit(function)(params, batch)
    if has_aux:
        wanted, wanted_aux = wanted
        wanted_aux = jax.tree.leaves(wanted_aux)
        chex.assert_trees_all_close(aux, wanted_aux, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    read = arrays_of(wanted_gradients)
    trained = {
        a for f in segmented.program.leaves if f.is_trainable for a in f.arrays()
    }
    assert set(gradients) == trained
    for array, gradient in gradients.items():
        # Rounding only: XLA groups the operations of a segment in its own way.
        scale = float(jnp.abs(read(array)).max()) + 1e-12
        np.testing.assert_allclose(
            gradient, read(array), rtol=1e-5, atol=1e-5 * scale, err_msg=str(array)
        )
    return segmented, segments


def block(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def plain(params, x):
    for p in params["layers"]:
        x = x + block(p, x)
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda c, p: (block(p, c), None), x, params)[0] ** 2)


def tied(params, x):
    x = jnp.tanh(x @ params["table"])
    for p in params["layers"]:
        x = block(p, x)
    return jnp.mean((x @ params["table"].T) ** 2)


def rematerialised(params, x):
    for p in params["layers"]:
        x = jax.checkpoint(block)(p, x)
    return jnp.mean(x**2)


def with_control_flow(params, x):
    for p in params["layers"]:
        x = jax.lax.cond(x.sum() > 0, block, lambda p, y: y * p["b"], p, x)
    return jnp.mean(x**2)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def with_custom_rule(params, x):
    for p in params["layers"]:
        x = clipped(block(p, x))
    return jnp.mean(x**2)


X = normal(4, WIDTH)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss", [plain, rematerialised, with_control_flow, with_custom_rule]
)
def test_streamed_gradients_are_those_of_jax(loss):
    _, segments = check(loss, {"layers": layers(3)}, X)
    assert len(segments) >= 3


def test_gradients_of_a_stacked_leaf_come_row_by_row():
    params = jax.tree.map(lambda *x: jnp.stack(x), *layers(4))
    segmented, _ = check(scanned, params, X)
    assert {leaf.num_layers for leaf in segmented.program.leaves} == {4}


def test_gradients_of_a_stacked_leaf_of_which_a_row_is_not_read():
    def loss(params, x):
        for i in (0, 2, 3):
            x = jnp.tanh(x @ params["w"][i])
        return jnp.mean(x**2)

    check(loss, {"w": normal(4, WIDTH, WIDTH)}, X)


def test_gradients_of_a_tied_parameter_are_the_sum_over_its_segments():
    params = {"table": normal(WIDTH, WIDTH), "layers": layers(2)}
    check(tied, params, X)


def test_frozen_integer_and_unused_leaves_and_auxiliary_outputs():
    table = np.arange(WIDTH, dtype=np.float32)[None]

    def loss(params, batch):
        x = batch["x"] * table
        x = x[:, params["order"]]
        for p in params["layers"]:
            x = block(p, x)
        value = jnp.mean(x**2)
        return value, {"x": x, "batch": batch["x"], "two": 2, "value": value}

    params = {
        "layers": layers(3),
        "order": jnp.arange(WIDTH)[::-1],
        "unused": normal(3, 3),
    }
    frozen = {"layers/1/w"}

    segmented, segments = compiled(loss, params, {"x": X}, frozen=frozen, has_aux=True)
    found, aux, gradients = run(segmented, segments, params, {"x": X})
    (wanted, wanted_aux), wanted_gradients = jax.value_and_grad(
        loss, has_aux=True, allow_int=True
    )(params, {"x": X})
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    wanted_aux = jax.tree.leaves(wanted_aux)
    chex.assert_trees_all_close(aux, wanted_aux, rtol=1e-5, atol=1e-6)
    paths = {a.path for a in gradients}
    assert "layers/1/w" not in paths and "order" not in paths
    read = arrays_of(wanted_gradients)
    for array, gradient in gradients.items():
        np.testing.assert_allclose(gradient, read(array), rtol=1e-4, atol=1e-7)


def test_the_seed_scales_gradients_and_not_the_loss():
    params = {"layers": layers(2)}
    segmented, segments = compiled(plain, params, X)
    loss, _, gradients = run(segmented, segments, params, X)
    same, _, scaled = run(segmented, segments, params, X, seed=4.0)
    assert loss == same
    for array, gradient in gradients.items():
        # A power of two: exact.
        np.testing.assert_array_equal(scaled[array], 4 * gradient)


def test_equal_segments_hold_the_same_executables():
    _, segments = compiled(plain, {"layers": layers(6)}, X)
    middle = [s for s in segments if s.spec.body == segments[2].spec.body]
    assert len(middle) >= 4
    first = middle[0]
    assert all(s.executables is first.executables for s in middle)
    assert all(s.executables.backward is first.executables.backward for s in middle)
    others = {id(s.executables) for s in segments if s not in middle}
    assert id(first.executables) not in others


def test_a_backward_pass_reads_only_the_parameters_that_gradients_depend_on():
    def loss(p, batch):
        x = p["table"][batch] + p["shift"]
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["head"]) ** 2)

    width = WIDTH
    params = {
        "table": normal(5, width),
        "shift": normal(1, width),
        "w": normal(width, width),
        "head": normal(width, width),
    }
    segmented, segments = compiled(loss, params, jnp.arange(4))
    read = {a.path for s in segments[:-1] for a in s.spec.read_backward}
    assert {"table", "shift", "w"} == {
        a.path for s in segments[:-1] for a in s.spec.params
    }
    assert read == {"w"}  # of tanh(x @ w), x is an input or follows from one
    check(loss, params, jnp.arange(4))


def test_workspace_is_what_xla_says():
    wide = {"layers": [{"w": normal(WIDTH, WIDTH), "b": normal(1, WIDTH)}] * 3}
    x = normal(512, WIDTH)
    _, segments = compiled(plain, wide, x)
    for segment in segments:
        workspace = segment.workspace()
        assert workspace.forward_bytes >= 0 and workspace.backward_bytes >= 0
    assert sum(s.workspace().backward_bytes for s in segments) > 0
    assert segments[-1].workspace().forward_bytes == 0
    assert segments[-1].evaluation_bytes() >= 0


def test_a_loss_without_a_path_from_the_parameters_has_zero_gradients():
    params = {"w": normal(WIDTH, WIDTH)}
    for loss in (lambda p, x: x.sum(), lambda p, x: jnp.float32(3)):
        segmented, segments = compiled(loss, params, X)
        _, _, gradients = run(segmented, segments, params, X)
        (gradient,) = gradients.values()
        np.testing.assert_array_equal(gradient, np.zeros((WIDTH, WIDTH)))


def test_a_loss_elementwise_in_its_parameters_has_their_gradients():
    check(lambda p, x: jnp.sum(p["w"] * 2.0), {"w": normal(WIDTH, WIDTH)}, X)
    check(lambda p, x: p["w"] * 2.0, {"w": jnp.float32(3)}, X)
    check(lambda p, x: p["w"], {"w": jnp.float32(3)}, X)


def test_an_activation_that_reaches_the_loss_through_integers_alone_gets_no_gradient():
    def loss(params, x):
        x = jnp.tanh(x @ params["a"])
        x = jnp.tanh(x @ params["b"])
        choice = jnp.argmax(x @ params["c"], axis=-1)
        return jnp.mean((params["table"][choice] @ params["d"]) ** 2)

    params = {n: normal(WIDTH, WIDTH) for n in ("a", "b", "c", "d", "table")}
    segmented, segments = check(loss, params, X)
    assert len(segments) >= 4
    by_path = {a.path: s for s in segmented.program.segments for a in s.params}
    assert not segmented.program.segments[0].has_backward
    assert by_path["a"] is by_path["c"] is segmented.program.segments[-1]
