"""Every loss is traced to a graph with named inputs, or refused with the reason."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from zinf.program import KEY
from zinf.segment import named_leaves, trace_loss

WEIGHT = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
RANDOM_KEY = jax.eval_shape(lambda: jax.random.key(0))


def source(loss, params=None, batch=X, *, max_remat_bytes=0, **options):
    params = {"w": WEIGHT} if params is None else params
    return trace_loss(loss, params, batch, max_remat_bytes=max_remat_bytes, **options)


def mean(params, x):
    return jnp.mean(x @ params["w"])


def test_inputs_are_named_by_key_path_in_the_order_of_the_pytrees():
    params = {"blocks": [{"w": WEIGHT}, {"w": WEIGHT}], "b": WEIGHT}
    batch = {"x": X, "pair": (X, X)}

    def loss(params, batch, key):
        noise = jax.random.normal(key, (2, 4))
        return jnp.sum((batch["x"] + noise) @ params["blocks"][1]["w"])

    found = source(loss, params, batch, key=RANDOM_KEY)
    assert list(found.params.values()) == ["b", "blocks/0/w", "blocks/1/w"]
    names = ["batch/pair/0", "batch/pair/1", "batch/x", KEY]
    assert list(found.batch.values()) == names
    assert found.graph.invars == (*found.params, *found.batch)


def test_a_batch_that_is_one_array_is_called_value():
    assert list(source(mean).batch.values()) == ["batch/value"]
    assert list(named_leaves(X)) == ["value"]


def test_auxiliary_outputs_follow_the_loss_in_flattened_order():
    def loss(params, x):
        y = x @ params["w"]
        return y.mean(), {"y": y, "none": None, "pair": (x, 3)}

    found = source(loss, has_aux=True)
    assert len(found.graph.outvars) == 1 + 3
    assert found.structure.num_leaves == 4
    assert source(mean).structure.num_leaves == 1


def test_two_leaves_with_one_key_path_are_refused_with_its_name():
    with pytest.raises(ValueError, match="same key path: a/b"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, x: x @ p["w"], r"one floating-point number.*float32\[2, 4\]"),
        (lambda p, x: jnp.sum(x).astype(int), "one floating-point number.*int32"),
        (lambda p, x: (jnp.mean(x), x), r"If it returns \(loss, aux\), pass has_aux"),
        (lambda p, x: None, "one floating-point number"),
        (lambda p, x: 0.5, "one floating-point number"),
    ],
    ids=["vector", "integer", "tuple", "none", "python number"],
)
def test_a_loss_that_is_no_floating_point_number_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        source(loss)


def test_an_ordered_callback_is_refused_with_its_primitive():
    def loss(params, x):
        io_callback(lambda v: None, None, x, ordered=True)
        return mean(params, x)

    with pytest.raises(NotImplementedError) as error:
        source(loss)
    assert "`io_callback`" in str(error.value)
    assert "as an auxiliary" in str(error.value)


def test_an_effect_inside_a_loop_is_refused_too():
    def loss(params, x):
        def step(carry, _):
            io_callback(lambda v: None, None, carry, ordered=True)
            return carry @ params["w"], None

        return jnp.mean(jax.lax.scan(step, x, length=2)[0])

    with pytest.raises(NotImplementedError, match="`scan`"):
        source(loss)


def test_a_debug_print_is_no_reason_to_refuse():
    def loss(params, x):
        jax.debug.print("{}", x.sum())
        return mean(params, x)

    primitives = [e.primitive.name for e in source(loss).graph.equations]
    assert any("debug" in name for name in primitives)


@pytest.mark.parametrize("limit_difference", [0, -1])
def test_remat_is_inlined_only_when_it_reads_more_than_a_segment_may(limit_difference):
    def loss(params, x):
        return jnp.mean(jax.checkpoint(lambda w, x: jnp.sin(x @ w))(params["w"], x))

    nbytes = 4 * 4 * 4
    found = source(loss, max_remat_bytes=nbytes + limit_difference)
    primitives = [e.primitive.name for e in found.graph.equations]
    assert ("sin" in primitives) is (limit_difference < 0)
