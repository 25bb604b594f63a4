"""Flat programs show every equation, and compute what the function does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from zinf.core.jaxpr import flatten, trace
from zinf.core.jaxpr.compat import Literal, open_jaxpr


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SCALAR, VECTOR, MATRIX = spec(), spec(3), spec(3, 3)
NOISE, STACK = spec(4, 3), spec(4, 3, 3)


def names(graph):
    return [e.primitive.name for e in graph.equations]


def flat(function, *specs, stacked=(), **options):
    """The flat graph; `stacked` are numbers of the (array) arguments."""
    closed, _ = trace(function, *specs)
    invars = open_jaxpr(closed)[0].invars
    return flatten(closed, stacked=tuple(invars[i] for i in stacked), **options)


def check(graph, function, *specs):
    """Variables are defined once and before they are read; results are the same."""
    known = set(graph.invars) | set(graph.consts)
    for equation in graph.equations:
        read = [a for a in equation.invars if not isinstance(a, Literal)]
        assert known.issuperset(read)
        assert known.isdisjoint(equation.outvars)
        known.update(equation.outvars)
    assert known.issuperset(a for a in graph.outvars if not isinstance(a, Literal))
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in specs]
    wanted = jax.tree.leaves(function(*arguments))
    for x, y in zip(graph(*arguments), wanted, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


# Calls.

OUTER_TABLE, INNER_TABLE = np.arange(3.0, dtype="f4"), jnp.ones((3,)) * 5


@jax.jit
def twice(x):
    return jnp.sin(x) * 2


@jax.jit
def times_table(x):
    return x * INNER_TABLE


HOLDS_TABLE = jax.extend.core.jaxpr_as_fun(
    jax.make_jaxpr(lambda x: x * INNER_TABLE)(VECTOR)
)


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 7,))


@jax.custom_jvp
def with_jvp(x):
    return jnp.cos(x)


with_jvp.defjvp(lambda x, t: (jnp.cos(x[0]), t[0] * 5))


def control_flow(x):
    y = with_vjp(x) + with_jvp(x)
    y = jax.lax.cond(y > 0, jnp.exp, jnp.tanh, y)
    return jax.lax.while_loop(lambda z: z < 3, lambda z: z + 1, y)


# By name: the function, its argument, and the primitives that it is flattened to.
CALLS = {
    # A jaxpr shared by several calls gets variables of its own at each.
    "shared": (
        lambda x: (twice(twice(x)), twice(x + 1)),
        SCALAR,
        ["sin", "mul"] * 2 + ["add", "sin", "mul"],
    ),
    # Closed-over arrays become constants, also those of inner jaxprs.
    "constants": (lambda x: times_table(x) + OUTER_TABLE, VECTOR, ["mul", "add"]),
    "held constants": (
        lambda x: jax.jit(HOLDS_TABLE)(*jax.jit(HOLDS_TABLE)(x))[0],
        VECTOR,
        ["mul", "mul"],
    ),
    "an input, a literal, an output twice": (
        lambda x: (x, jnp.float32(3), y := jnp.sin(x), y),
        SCALAR,
        ["sin"],
    ),
    "what is no call": (
        control_flow,
        SCALAR,
        ["custom_vjp_call", "custom_jvp_call", "add", "gt"]
        + ["convert_element_type", "cond", "while"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_inlined(name):
    function, argument, wanted = CALLS[name]
    graph = flat(function, argument)
    assert names(graph) == wanted
    check(graph, function, argument)


def test_a_flat_program_has_the_derivatives_of_the_function():
    graph = flat(jax.jit(lambda x: with_vjp(x) * 2), SCALAR)
    assert jax.grad(lambda x: graph(x)[0])(jnp.float32(0.3)) == 14


@pytest.mark.parametrize("inline", [False, True])
def test_remat_is_inlined_when_it_is_told_to_be(inline):
    block = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
    seen = []

    def inline_remat(equation):
        seen.extend(equation.invars)
        return inline

    graph = flat(jax.jit(lambda x: block(x)), SCALAR, inline_remat=inline_remat)
    assert seen == list(graph.invars)
    assert (names(graph) == ["cos", "sin"]) is inline
    check(graph, block, SCALAR)


# Scans over the first argument, a stacked parameter.


def scanned(reverse):
    def function(layers, x, noise):
        def layer(carry, row):
            weight, shift, number = row
            y = jnp.tanh(weight @ carry + shift) * number
            return y, (y.sum(), weight[0])

        rows = layers, noise, jnp.arange(4.0)
        return jax.lax.scan(layer, x, rows, reverse=reverse)

    return function


def plain(layers, x):
    return jax.lax.scan(lambda c, w: (w @ c, c), x, layers)


def of_rows(weight, x, rows):
    return jax.lax.scan(lambda c, row: (weight @ c + row, None), x, rows)[0]


def cast(layers, x):
    layers, x = layers.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jax.lax.scan(lambda c, w: (w @ c, None), x, layers)[0]


def of_scans(groups, x):
    def outer(carry, group):
        return jax.lax.scan(lambda c, w: (jnp.tanh(w @ c), None), carry, group)[0], None

    return jax.lax.scan(outer, x, groups)[0]


# By name: the function, its arguments, the scans that stay, and the rows of the
# parameter that are read, in order.
SCANS = {
    "forward": (scanned(False), (STACK, VECTOR, NOISE), 0, [0, 1, 2, 3]),
    "reverse": (scanned(True), (STACK, VECTOR, NOISE), 0, [3, 2, 1, 0]),
    "of a cast": (cast, (STACK, VECTOR), 0, [0, 1, 2, 3]),
    "of no parameter": (of_rows, (MATRIX, VECTOR, NOISE), 1, []),
    "of an activation": (lambda w, x: plain(w * 2.0, x), (STACK, VECTOR), 1, []),
    "of scans": (of_scans, (spec(2, 2, 3, 3), VECTOR), 2, [0, 1]),
    "of one iteration": (plain, (spec(1, 3, 3), VECTOR), 0, [0]),
    # It stays, for its empty stacks.
    "of none": (plain, (spec(0, 3, 3), VECTOR), 1, []),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_over_a_stacked_parameter_is_unrolled(name):
    function, specs, num_left, rows = SCANS[name]
    graph = flat(function, *specs, stacked=[0])
    assert names(graph).count("scan") == num_left
    check(graph, function, *specs)
    readers = [e for e in graph.equations if graph.invars[0] in e.invars]
    slices = [e for e in readers if e.primitive.name == "slice"]
    assert [e.params["start_indices"][0] for e in slices] == rows
    if rows:
        assert readers == slices, "rows of the parameter are static"
    if function is cast:
        kind = "convert_element_type"
        casts = [e for e in graph.equations if e.primitive.name == kind]
        shapes = [e.outvars[0].aval.shape for e in casts]
        assert shapes.count((1, 3, 3)) == 4, "row by row"
    if len(specs) == 3 and rows:
        # Rows of what is no parameter are not static.
        others = [e for e in graph.equations if graph.invars[2] in e.invars]
        assert {e.primitive.name for e in others} == {"dynamic_slice"}


# Slices of a program.


def test_dead_code_is_dropped_and_effects_are_kept():
    def function(x):
        dead = jnp.exp(x) + np.arange(3.0, dtype="f4")
        jax.debug.callback(lambda v: None, jnp.cos(x))
        io_callback(lambda v: None, None, x, ordered=False)
        del dead
        return jnp.sin(x), jnp.tanh(x)

    graph = flat(function, VECTOR)
    assert "exp" not in names(graph)
    assert not graph.consts
    one = graph.needed_for(graph.outvars[:1])
    assert len(one.outvars) == 1
    assert one.invars == graph.invars
    assert "tanh" not in names(one)
    assert {"cos", "sin"} <= set(names(one))
    assert sum("callback" in n for n in names(one)) == 2


def test_used_invars_are_those_that_are_read_in_their_own_order():
    graph = flat(lambda a, b, c, d: (jnp.sin(d) * a, c), *[SCALAR] * 4)
    a, _, c, d = graph.invars
    assert graph.used_invars() == (a, c, d)
