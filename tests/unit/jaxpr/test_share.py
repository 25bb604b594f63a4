"""Equal pieces share a body, and pieces that differ in what they compute do not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr import Graph, Piece, flatten, share, trace
from zinf.core.jaxpr.slice import Slicer, merge_equal

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((3, 3), jnp.float32)


def graph_of(function, *specs):
    return flatten(trace(function, *specs)[0])


def piece(function, *specs, tags=None):
    graph = graph_of(function, *specs)
    invars = (*graph.consts, *graph.invars)
    floats = frozenset(
        v for v in graph.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)
    )
    return Piece(invars, graph.outvars, graph.equations, tags, floats)


def is_shared(*pieces):
    return len({id(s.body) for s in share(pieces)}) == 1


def run(shared, *arguments):
    return shared.body(*arguments, *shared.hoisted)


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
    pieces = [piece(lambda x, k=k: x + jnp.int32(k), SCALAR) for k in (1, 2)]
    assert is_shared(*pieces)
    for shared in share(pieces):
        (value,) = shared.hoisted
        assert value.dtype == shared.body.jaxpr.invars[1].aval.dtype


def test_literals_are_compared_by_their_bits():
    for values, num_hoisted in (((np.nan, np.nan), 0), ((0.0, -0.0), 1)):
        pieces = [piece(lambda x, k=k: x + np.float32(k), SCALAR) for k in values]
        assert share(pieces)[0].body.num_hoisted == num_hoisted


def reading(k):
    def function(a, b, c, d):
        t = jnp.sin(a)
        return jnp.cos((a, b, c, d, t)[k]), t

    return piece(function, *[SCALAR] * 4)


def in_loop(k):
    loop = lambda x: jax.lax.scan(lambda c, _: (c * k, None), x, length=2)[0]  # noqa: E731
    return piece(loop, VECTOR)


def summed(x):
    return jnp.sum(x, axis=0)


def product(precision):
    return piece(lambda x: jnp.dot(x, x, precision=precision), SQUARE)


# By name: two pieces that share, and others of which no two do, nor with the first.
APART = {
    "literal outputs": [
        piece(lambda x, k=k: (x, np.float32(k)), SCALAR) for k in (1, 1, 2)
    ],
    "order": [
        *[piece(lambda x, y: (x - y, x), SCALAR, SCALAR) for _ in range(2)],
        piece(lambda x, y: (y - x, x), SCALAR, SCALAR),
        piece(lambda x, y: (x - y, y), SCALAR, SCALAR),
    ],
    "results and inputs": [reading(0), *map(reading, range(5))],
    "precision": [product(p) for p in ("default", "default", "highest")],
    "numbers in a loop": [in_loop(k) for k in (1.0, 1.0, 1.0 + 2**-23)],
    "tags, dtypes, shapes, primitives, parameters": [
        *[piece(summed, SQUARE, tags="a") for _ in range(2)],
        piece(summed, SQUARE, tags="b"),
        piece(summed, jax.ShapeDtypeStruct((3, 3), jnp.bfloat16), tags="a"),
        piece(summed, jax.ShapeDtypeStruct((3, 4), jnp.float32), tags="a"),
        piece(lambda x: jnp.max(x, axis=0), SQUARE, tags="a"),
        piece(lambda x: jnp.sum(x, axis=1), SQUARE, tags="a"),
    ],
}


@pytest.mark.parametrize("name", APART)
def test_pieces_share_only_if_they_do_the_same(name):
    first, same, *others = APART[name]
    assert is_shared(first, same)
    bodies = {id(s.body) for s in share([first, *others])}
    assert len(bodies) == 1 + len(others)


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


def in_cond(rule):
    return lambda x: jax.lax.cond(x.sum() > 0, rule, lambda y: y, x)


def in_scan(rule):
    return lambda x: jax.lax.scan(lambda c, _: (rule(c), None), x, length=2)[0]


def in_remat(rule):
    return jax.checkpoint(lambda x: rule(x) * 2)


def in_while(rule):
    return lambda x: jax.lax.while_loop(lambda y: y.sum() < 0, rule, x)


def in_jit_in_scan(rule):
    return in_scan(jax.jit(lambda x: rule(x)))


WRAPPERS = [in_cond, in_remat, in_jit_in_scan]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("custom", [custom_vjp, custom_jvp], ids=lambda f: f.__name__)
def test_custom_rules_share_when_they_do_the_same_and_only_then(custom, wrapper):
    tables = jnp.arange(3.0), jnp.arange(3.0), jnp.ones(3)
    for scales in ((2.0, 2.0, 3.0), tables):
        one, same, other = (piece(wrapper(custom(k)), VECTOR) for k in scales)
        assert not is_shared(one, other)
        assert is_shared(one, same)


def test_rules_are_shared_where_nothing_is_differentiated_and_not_where_nothing_can():
    pieces = [piece(in_while(custom_vjp(2.0)), VECTOR) for _ in range(2)]
    assert not is_shared(*pieces)
    pieces = [piece(custom_vjp(k), VECTOR) for k in (2.0, 3.0)]
    assert is_shared(*(replace(p, differentiated=frozenset()) for p in pieces))


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
    "second", [jax.lax.stop_gradient, jnp.round], ids=["stop_gradient", "round"]
)
def test_a_rule_is_probed_only_by_inputs_that_have_tangents(second):
    rule = refusing(1.0)
    function = lambda x: rule(x, second(x[0]))  # noqa: E731
    x = jnp.arange(3.0) + 1
    expected = jax.grad(lambda x: function(x).sum())(x)
    pieces = [piece(function, VECTOR) for _ in range(2)]
    assert is_shared(*pieces)
    other = piece(lambda x: refusing(2.0)(x, second(x[0])), VECTOR)
    assert not is_shared(pieces[0], other)
    # The trace that jax shares with the user's own derivative still works.
    body = share(pieces)[0]
    found = jax.grad(lambda x: run(body, x)[0].sum())(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


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


# Slices hold what is behind an output.


def primitives(equations):
    return [e.primitive.name for e in equations]


def test_a_slice_is_the_program_of_its_outputs():
    def function(a, b, c):
        d = jnp.sin(a) * b
        return jnp.cos(d), jnp.exp(c) + d

    graph = graph_of(function, *[SCALAR] * 3)
    slicer = Slicer(graph)
    for n, wanted in enumerate([["sin", "mul", "cos"], ["exp", "sin", "mul", "add"]]):
        found = slicer.behind([graph.outvars[n]])
        assert sorted(primitives(found.equations)) == sorted(wanted)
        program = Graph(found.inputs, (graph.outvars[n],), found.equations, {})
        values = dict(zip(graph.invars, (0.1, 0.2, 0.3), strict=True))
        (result,) = program(*(values[v] for v in found.inputs))
        np.testing.assert_allclose(result, function(0.1, 0.2, 0.3)[n], rtol=1e-6)
    (product,) = graph.equations[1].outvars
    found = slicer.behind(graph.outvars[:1], stop={product})
    assert primitives(found.equations) == ["cos"]
    assert found.inputs == (product,)


def test_slices_with_equal_code_list_corresponding_inputs_at_the_same_place():
    graph = graph_of(lambda a, b, c: (jnp.sin(a) / b, jnp.sin(c) / a), *[SCALAR] * 3)
    found = [Slicer(graph).behind([v]) for v in graph.outvars]
    pairs = zip(found, graph.outvars, strict=True)
    assert is_shared(*(Piece(s.inputs, (v,), s.equations) for s, v in pairs))
    a, b, c = graph.invars
    assert [s.inputs for s in found] == [(a, b), (c, a)]


def test_equal_equations_are_computed_once_unless_they_are_kept():
    def function(a):
        return jnp.sin(a) + 2.0, jnp.sin(a) + 2.0, jnp.sin(a) + 3.0

    graph = graph_of(function, SCALAR)
    merged = merge_equal(graph, set())
    assert primitives(merged.equations) == ["sin", "add", "add"]
    assert merged(0.5) == graph(0.5)
    kept = merge_equal(graph, set(graph.outvars))
    assert primitives(kept.equations) == ["sin", "add", "add", "add"]
