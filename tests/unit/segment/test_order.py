"""What is cheap to compute again floats; what is not, or is carried free, does not."""

import chex
import jax
import jax.numpy as jnp

from zinf.jaxpr import flatten, trace
from zinf.segment.index import index_by_literals
from zinf.segment.order import MAX_FLOATING_DEPTH, SMALL_BYTES, order_equations

WEIGHT = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def order_of(function, *specs, num_params=1):
    graph = flatten(trace(function, *specs)[0])
    return order_equations(graph, graph.invars[:num_params])


def anchored(order):
    return [e.primitive.name for e in order.anchored]


def floating(order):
    equations = order.graph.equations
    positions = dict.fromkeys(order.floating.values())
    return [equations[p].primitive.name for p in positions]


def test_casts_of_parameters_float_and_are_read_where_they_are_needed():
    def function(weights, x):
        for weight in jax.tree.map(lambda w: w.astype(jnp.bfloat16).T, weights):
            x = x @ weight
        return x

    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    order = order_of(function, [WEIGHT] * 3, x, num_params=3)
    assert sorted(floating(order)) == ["convert_element_type"] * 3 + ["transpose"] * 3
    assert anchored(order) == ["dot_general"] * 3
    for i, matmul in enumerate(order.anchored):
        positions, roots = order.closure(matmul.invars[1:])
        assert len(positions) == 2
        assert roots == [order.graph.invars[i]]


def test_a_large_mask_floats_and_a_small_one_is_carried():
    def function(weight, x):
        length = x.shape[0]
        mask = jnp.tril(jnp.ones((length, length), bool))
        return jnp.where(mask, x @ weight @ x.T, -1e9)

    large = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    assert 512 * 512 > SMALL_BYTES
    order = order_of(function, WEIGHT, large)
    assert "iota" in floating(order) and "iota" not in anchored(order)
    small = order_of(function, WEIGHT, X)
    assert "iota" in anchored(small) and "iota" not in floating(small)


def test_what_is_dear_or_reads_an_activation_or_has_an_effect_is_anchored():
    def keys(weight, x, key):
        for _ in range(3):
            key, sub = jax.random.split(key)
            x = x @ weight * jax.random.bernoulli(sub, 0.5, x.shape)
        return x

    order = order_of(keys, WEIGHT, X, KEY)
    assert anchored(order).count("random_split") == 3
    assert not floating(order)
    order = order_of(lambda w, x: (x @ w) * 2 + w[:4], WEIGHT, X)
    assert anchored(order)[:2] == ["dot_general", "mul"]
    assert floating(order) == ["slice"]
    order = order_of(lambda w: jnp.sum(w @ w) + jnp.tanh(w).sum(), WEIGHT)
    assert {"dot_general", "tanh", "reduce_sum"} <= set(anchored(order))

    def with_effect(weight):
        jax.debug.callback(lambda w: None, weight)
        return weight * 2

    assert any("callback" in name for name in anchored(order_of(with_effect, WEIGHT)))


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
    assert slices(lambda w: w[3], w) == ["slice"]
    assert slices(lambda w: w.reshape(2, 4)[1], w) == ["slice"]
    assert slices(lambda w, table: table[::2], w, table) == ["slice"]
    count = SMALL_BYTES // 8
    for extra, name in ((0, "dynamic_slice"), (1, "slice")):
        large = jax.random.split(jax.random.key(0), count + extra)
        assert slices(lambda w, large: large[3], w, large) == [name]
