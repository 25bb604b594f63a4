"""Every loss is traced to a graph with named inputs, or refused with the reason."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from tests.unit.refusals import refusals
from zinf.core.program import KEY
from zinf.core.segment import named_leaves, trace_loss

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
    assert list(source(mean).batch.values()) == ["batch/value"]


def test_auxiliary_outputs_follow_the_loss_in_flattened_order():
    def loss(params, x):
        y = x @ params["w"]
        return y.mean(), {"y": y, "none": None, "pair": (x, 3)}

    found = source(loss, has_aux=True)
    assert len(found.graph.outvars) == 1 + 3
    assert found.structure.num_leaves == 4
    assert source(mean).structure.num_leaves == 1


def ordered(x):
    io_callback(lambda v: None, None, x, ordered=True)
    return x


def looped(p, x):
    step = lambda x, _: (ordered(x) @ p["w"], None)  # noqa: E731
    return jnp.mean(jax.lax.scan(step, x, length=2)[0])


REFUSED = {
    "a vector": lambda: source(lambda p, x: x @ p["w"]),
    "an integer": lambda: source(lambda p, x: jnp.sum(x).astype(int)),
    "a tuple": lambda: source(lambda p, x: (jnp.mean(x), x)),
    "none": lambda: source(lambda p, x: None),
    "a number of Python": lambda: source(lambda p, x: 0.5),
    "an ordered callback": lambda: source(lambda p, x: mean(p, ordered(x))),
    "an ordered callback in a loop": lambda: source(looped),
    "one key path twice": lambda: named_leaves({"a": {"b": 1}, "a/b": 2}),
}


def test_each_refusal_says_why(golden):
    golden.check("refused_losses.txt", refusals(REFUSED))


@pytest.mark.parametrize("limit_difference", [0, -1])
def test_remat_is_inlined_only_when_it_reads_more_than_a_segment_may(limit_difference):
    def loss(params, x):
        jax.debug.print("{}", x.sum())  # no reason to refuse
        return jnp.mean(jax.checkpoint(lambda w, x: jnp.sin(x @ w))(params["w"], x))

    found = source(loss, max_remat_bytes=4 * 4 * 4 + limit_difference)
    names = [e.primitive.name for e in found.graph.equations]
    assert ("sin" in names) is (limit_difference < 0)
    assert any("debug" in name for name in names)
