"""Equal pieces share a body, and pieces that differ in what they compute do not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.jaxpr import Piece, flatten, share, trace

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)


def piece(function, *specs, tags=None):
    graph = flatten(trace(function, *specs)[0])
    invars = (*graph.consts, *graph.invars)
    floats = frozenset(
        v for v in graph.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)
    )
    return Piece(invars, graph.outvars, graph.equations, tags, floats)


def is_shared(*pieces):
    return len({id(s.body) for s in share(pieces)}) == 1


def run(shared, *arguments):
    return shared.body(*arguments, *shared.hoisted)


def test_equal_pieces_share_one_body_and_give_their_own_results():
    pieces = [piece(lambda x: jnp.sin(x) + 1, VECTOR) for _ in range(3)]
    found = share(pieces)
    assert is_shared(*pieces)
    assert [s.hoisted for s in found] == [()] * 3
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(run(found[2], x)[0], jnp.sin(x) + 1)


def test_scalar_literals_that_differ_become_arguments_and_equal_ones_stay():
    def layer(k):
        return lambda x: (jnp.sin(x) * np.float32(k)) / 3.0 + np.float32(k == 2)

    pieces = [piece(layer(k), SCALAR) for k in (1, 1, 2)]
    found = share(pieces)
    assert is_shared(*pieces)
    assert [s.hoisted for s in found] == [(1, 0), (1, 0), (2, 1)]
    assert found[0].body.num_hoisted == 2
    for k, shared in zip((1, 1, 2), found, strict=True):
        wanted = layer(k)(jnp.float32(0.5))
        np.testing.assert_allclose(run(shared, jnp.float32(0.5))[0], wanted, rtol=1e-6)


def test_hoisted_values_keep_the_dtype_of_the_literal():
    pieces = [piece(lambda x, k=k: x + jnp.int32(k), SCALAR) for k in (1, 2)]
    assert is_shared(*pieces)
    for shared in share(pieces):
        (value,) = shared.hoisted
        (argument,) = shared.body.jaxpr.invars[1:]
        assert value.dtype == argument.aval.dtype


def test_literals_that_are_not_a_number_are_compared_by_their_bits():
    pieces = [piece(lambda x, k=k: x + np.float32(k), SCALAR) for k in (np.nan,) * 2]
    assert share(pieces)[0].body.num_hoisted == 0
    pieces = [piece(lambda x, k=k: x * np.float32(k), SCALAR) for k in (0.0, -0.0)]
    assert share(pieces)[0].body.num_hoisted == 1


def test_a_literal_output_is_a_constant_of_the_body():
    same = [piece(lambda x: (x, np.float32(1)), SCALAR) for _ in range(2)]
    assert is_shared(*same)
    other = piece(lambda x: (x, np.float32(2)), SCALAR)
    assert not is_shared(same[0], other)


def test_the_order_of_inputs_and_outputs_matters():
    one = piece(lambda x, y: (x - y, x), SCALAR, SCALAR)
    assert not is_shared(one, piece(lambda x, y: (y - x, x), SCALAR, SCALAR))
    assert not is_shared(one, piece(lambda x, y: (x - y, y), SCALAR, SCALAR))


def test_results_are_not_mistaken_for_inputs():
    def reading(k):
        def function(a, b, c, d):
            t = jnp.sin(a)
            return jnp.cos((a, b, c, d, t)[k]), t

        return function

    pieces = [piece(reading(k), *[SCALAR] * 4) for k in range(5)]
    assert len({id(s.body) for s in share(pieces)}) == 5


def test_shapes_dtypes_tags_primitives_and_their_parameters_tell_pieces_apart():
    def first(x):
        return jnp.sum(x, axis=0)

    square = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    half = jax.ShapeDtypeStruct((3, 3), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    base = piece(first, square, tags="a")
    assert is_shared(base, piece(first, square, tags="a"))
    others = [
        piece(first, square, tags="b"),
        piece(first, half, tags="a"),
        piece(first, wide, tags="a"),
        piece(lambda x: jnp.max(x, axis=0), square, tags="a"),
        piece(lambda x: jnp.sum(x, axis=1), square, tags="a"),
    ]
    for other in others:
        assert not is_shared(base, other)


def test_the_precision_of_a_matmul_tells_pieces_apart():
    square = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    pieces = [
        piece(lambda x, p=p: jnp.dot(x, x, precision=p), square)
        for p in ("default", "highest")
    ]
    assert not is_shared(*pieces)


# Custom rules. The rules are functions that are made anew for each layer.


def custom_vjp(scale):
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * scale,))
    return function


def custom_jvp(scale):
    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] * scale))
    return function


def alone(rule):
    return rule


def in_cond(rule):
    return lambda x: jax.lax.cond(x.sum() > 0, rule, lambda y: y, x)


def in_scan(rule):
    return lambda x: jax.lax.scan(lambda c, _: (rule(c), None), x, length=2)[0]


def in_remat(rule):
    return jax.checkpoint(lambda x: rule(x) * 2)


def in_jit_in_scan(rule):
    inner = jax.jit(lambda x: rule(x))
    return lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]


def in_cond_in_remat(rule):
    return jax.checkpoint(in_cond(rule))


def in_while(rule):
    return lambda x: jax.lax.while_loop(lambda y: y.sum() < 0, rule, x)


WRAPPERS = [alone, in_cond, in_scan, in_remat, in_jit_in_scan, in_cond_in_remat]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("custom", [custom_vjp, custom_jvp], ids=lambda f: f.__name__)
def test_custom_rules_share_when_they_do_the_same_and_only_then(custom, wrapper):
    one, same, other = (piece(wrapper(custom(k)), VECTOR) for k in (2.0, 2.0, 3.0))
    assert not is_shared(one, other)
    assert is_shared(one, same)


@pytest.mark.parametrize("custom", [custom_vjp, custom_jvp], ids=lambda f: f.__name__)
def test_rules_that_close_over_different_arrays_do_not_share(custom):
    tables = jnp.arange(3.0), jnp.arange(3.0), jnp.ones(3)
    for wrapper in (alone, in_remat, in_scan):
        one, same, other = (piece(wrapper(custom(t)), VECTOR) for t in tables)
        assert not is_shared(one, other)
        assert is_shared(one, same)


def test_rules_that_cannot_be_differentiated_are_never_shared():
    pieces = [piece(in_while(custom_vjp(2.0)), VECTOR) for _ in range(2)]
    assert not is_shared(*pieces)


def refusing(scale):
    """`sin(x) * t` with a rule that cannot differentiate by `t`, as diffrax has."""

    @jax.custom_vjp
    def function(x, t):
        return jnp.sin(x) * t

    def forward(x, t):
        if t.perturbed:
            raise RuntimeError("t cannot be differentiated")
        return function(x.value, t.value), (x.value, t.value)

    def backward(residuals, g):
        x, t = residuals
        return g * t * jnp.cos(x) * scale, jnp.zeros_like(t)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return jax.jit(function)


@pytest.mark.parametrize(
    "second",
    [lambda x: jnp.float32(2), jax.lax.stop_gradient, lambda x: jnp.round(x)],
    ids=["constant", "stop_gradient", "round"],
)
def test_a_rule_is_probed_only_by_inputs_that_have_tangents(second):
    rule = refusing(1.0)
    function = lambda x: rule(x, second(x[0]))  # noqa: E731
    x = jnp.arange(3.0) + 1
    expected = jax.grad(lambda x: function(x).sum())(x)
    pieces = [piece(function, VECTOR) for _ in range(2)]
    assert is_shared(*pieces)
    assert not is_shared(
        pieces[0], piece(lambda x: refusing(2.0)(x, second(x[0])), VECTOR)
    )
    # The trace that jax shares with the user's own derivative still works.
    body = share(pieces)[0]
    found = jax.grad(lambda x: run(body, x)[0].sum())(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rules_are_not_compared_where_nothing_is_differentiated():
    one, other = (
        replace(piece(custom_vjp(k), VECTOR), differentiated=frozenset())
        for k in (2.0, 3.0)
    )
    assert is_shared(one, other)


def closing_over(table):
    def rule(x):
        return jnp.sin(x) * table

    wrapped = jax.custom_jvp(rule)
    wrapped.defjvp(lambda x, t: (rule(x[0]), t[0]))
    return wrapped


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_code_with_different_constants_inside_does_not_compute_the_same(kind, wrapper):
    tables = [kind(np.full(3, k, np.float32)) for k in (1, 2)]
    pieces = [piece(wrapper(closing_over(t)), VECTOR) for t in tables]
    x = jnp.arange(3.0) + 1
    # Constants are inputs of a piece, or else part of its code.
    for p, table in zip(share(pieces), tables, strict=True):
        extra = len(p.body.jaxpr.invars) - 1 - p.body.num_hoisted
        wanted = wrapper(closing_over(table))(x)
        np.testing.assert_allclose(run(p, *[table] * extra, x)[0], wanted, rtol=1e-6)


def test_numbers_inside_a_loop_body_tell_pieces_apart():
    def loop(k):
        return lambda x: jax.lax.scan(lambda c, _: (c * k, None), x, length=2)[0]

    one, same, other = (piece(loop(k), VECTOR) for k in (1.0, 1.0, 1.0 + 2**-23))
    assert is_shared(one, same)
    assert not is_shared(one, other)
