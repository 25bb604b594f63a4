"""What is cheap to compute again floats; what is not, or is carried free, does not."""

import jax
import jax.numpy as jnp

from zinf.jaxpr import flatten, trace
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


def test_a_cast_and_a_transpose_of_a_parameter_float_and_its_matmul_is_anchored():
    def function(weight, x):
        half = weight.astype(jnp.bfloat16).T
        return x.astype(jnp.bfloat16) @ half

    order = order_of(function, WEIGHT, X)
    assert floating(order) == ["convert_element_type", "transpose"]
    assert anchored(order) == ["convert_element_type", "dot_general"]


def test_a_cast_of_all_parameters_at_the_top_is_read_where_it_is_needed():
    def function(weights, x):
        for weight in jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights):
            x = x @ weight
        return x

    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    order = order_of(function, [WEIGHT] * 3, x, num_params=3)
    assert anchored(order) == ["dot_general"] * 3
    for i, matmul in enumerate(order.anchored):
        positions, roots = order.closure(matmul.invars[1:])
        assert len(positions) == 1
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


def test_a_chain_of_keys_is_anchored():
    def function(weight, x, key):
        for _ in range(3):
            key, sub = jax.random.split(key)
            x = x @ weight * jax.random.bernoulli(sub, 0.5, x.shape)
        return x

    order = order_of(function, WEIGHT, X, KEY)
    assert anchored(order).count("random_split") == 3
    assert not floating(order)


def test_what_reads_an_activation_is_anchored_however_cheap():
    order = order_of(lambda w, x: (x @ w) * 2 + w[:4], WEIGHT, X)
    assert anchored(order)[:2] == ["dot_general", "mul"]
    assert "mul" not in floating(order)
    assert "slice" in floating(order)


def test_a_dear_operation_on_a_parameter_is_anchored():
    order = order_of(lambda w: jnp.sum(w @ w) + jnp.tanh(w).sum(), WEIGHT)
    assert {"dot_general", "tanh", "reduce_sum"} <= set(anchored(order))


def test_equations_with_effects_are_anchored():
    def function(weight):
        jax.debug.callback(lambda w: None, weight)
        return weight * 2

    order = order_of(function, WEIGHT)
    assert any("callback" in name for name in anchored(order))


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
