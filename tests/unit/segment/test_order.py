"""What is cheap to compute again floats; what is not, or is carried free, does not."""

import chex
import jax
import jax.numpy as jnp

from tests.golden import Golden
from zinf.core.jaxpr import flatten, trace
from zinf.core.segment.index import index_by_literals
from zinf.core.segment.order import MAX_FLOATING_DEPTH, SMALL_BYTES, order_equations


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WEIGHT, X = spec(8, 8), spec(4, 8)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def order_of(function, *specs, num_params=1):
    graph = flatten(trace(function, *specs)[0])
    return order_equations(graph, graph.invars[:num_params])


def described(order):
    """Names of the anchored equations, and of those that float."""
    positions = sorted({*order.floating.values()})
    floating = [order.graph.equations[p] for p in positions]
    return tuple(
        " ".join(e.primitive.name for e in some) for some in (order.anchored, floating)
    )


def masked(weight, x):
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return jnp.where(mask, x @ weight @ x.T, 0)


def with_effect(weight):
    jax.debug.callback(lambda w: None, weight)
    return weight * 2


def folded(weight, key):
    bits = jax.random.bits(jax.random.fold_in(key, 1), (256, 256))
    return weight.sum() * jax.lax.bitcast_convert_type(bits, jnp.float32)


# A square of one byte an element: as large as a mask may be that is carried.
LARGEST = int(SMALL_BYTES**0.5)
# By name: the function, and the arguments after the parameter.
FUNCTIONS = {
    "a cast of a parameter": (lambda w, x: x @ w.astype(jnp.bfloat16).T, [X]),
    "words of a parameter": (
        lambda w, x: jax.lax.bitcast_convert_type(w, jnp.int32).T,
        [X],
    ),
    "a small mask": (masked, [spec(LARGEST, 8)]),
    "a large mask": (masked, [spec(LARGEST + 1, 8)]),
    "a random key": (folded, [KEY]),
    "of an activation": (lambda w, x: (x @ w) * 2 + w[:4], [X]),
    "what is dear": (lambda w: jnp.sum(w @ w) + jnp.tanh(w).sum(), []),
    "an effect": (with_effect, []),
}


def test_what_is_cheap_floats_and_the_rest_is_anchored(golden: Golden) -> None:
    lines = []
    for name, (function, rest) in FUNCTIONS.items():
        anchored, floating = described(order_of(function, WEIGHT, *rest))
        lines.append(f"{name}\n    anchored: {anchored}\n    floating: {floating}")
    golden.check("order.txt", "\n".join(lines))


def test_a_chain_floats_no_further_than_its_limit():
    def function(weight):
        for _ in range(MAX_FLOATING_DEPTH + 10):
            weight = weight * 1.5
        return weight

    order = order_of(function, WEIGHT)
    assert len(order.floating) == MAX_FLOATING_DEPTH
    assert len(order.anchored) == 10


def test_the_closure_lists_equations_in_program_order_and_each_once():
    def function(weight, x):
        half = weight * 2
        return x @ (half.T + half)

    order = order_of(function, WEIGHT, X)
    (matmul,) = order.anchored
    positions, roots = order.closure([*matmul.invars, *matmul.invars])
    assert positions == sorted(set(positions)) and len(positions) == 3
    assert set(roots) == set(order.graph.invars)


def slices(function, *arguments):
    """Those of the graph in which places in small tables are literals."""
    graph = flatten(trace(function, *arguments)[0])
    found = index_by_literals(graph, graph.invars[:1])
    chex.assert_trees_all_equal(found(*arguments), graph(*arguments), strict=True)
    return [e.primitive.name for e in found.equations if "slice" in e.primitive.name]


def test_places_in_a_small_table_become_literals():
    keys = jax.random.split(jax.random.key(0), (3, 4))
    function = lambda w, keys: (keys[1], keys[:, 2], keys[1:, :3])  # noqa: E731
    assert slices(function, 1.0, keys) == ["dynamic_slice"] * 3
    # Parameters, strides and large values keep their slices.
    table, w = (jax.random.split(jax.random.key(i), 8) for i in range(2))
    assert slices(lambda w: w.reshape(2, 4)[1], w) == ["slice"]
    assert slices(lambda w, table: table[::2], w, table) == ["slice"]
    count = SMALL_BYTES // 8
    for extra, name in ((0, "dynamic_slice"), (1, "slice")):
        large = jax.random.split(jax.random.key(0), count + extra)
        assert slices(lambda w, large: large[3], w, large) == [name]
