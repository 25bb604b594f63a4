"""Flat programs show every equation, and compute what the function does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from zinf.jaxpr import Graph, abstract, flatten, trace
from zinf.jaxpr.compat import Literal, open_jaxpr

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)
STACK = jax.ShapeDtypeStruct((4, 3, 3), jnp.float32)


def values_of(*specs):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s.shape).astype(s.dtype)) for s in specs]


def names(graph):
    return [e.primitive.name for e in graph.equations]


def flat(function, *specs, stacked=(), **options):
    """The flat graph; `stacked` are numbers of the (array) arguments."""
    closed, _ = trace(function, *specs)
    invars = open_jaxpr(closed)[0].invars
    return flatten(closed, stacked=tuple(invars[i] for i in stacked), **options)


def check_equals(graph, function, *specs):
    arguments = values_of(*specs)
    wanted = jax.tree.leaves(function(*arguments))
    for x, y in zip(graph(*arguments), wanted, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def defined(graph):
    return [v for e in graph.equations for v in e.outvars]


def check_well_formed(graph):
    """Every variable is defined once, and before it is read."""
    known = set(graph.invars) | set(graph.consts)
    for equation in graph.equations:
        read = [a for a in equation.invars if not isinstance(a, Literal)]
        assert known.issuperset(read)
        assert known.isdisjoint(equation.outvars)
        known.update(equation.outvars)
    assert known.issuperset(a for a in graph.outvars if not isinstance(a, Literal))


def test_nested_jits_are_inlined():
    @jax.jit
    def inner(x):
        return jnp.sin(x) * 2

    @jax.jit
    def outer(x):
        return inner(x) + 1

    graph = flat(outer, SCALAR)
    assert names(graph) == ["sin", "mul", "add"]
    check_equals(graph, outer, SCALAR)


def test_a_jaxpr_shared_by_two_calls_gets_variables_of_its_own_at_each():
    @jax.jit
    def inner(x):
        return jnp.sin(x) * 2

    def function(x):
        return inner(inner(x)), inner(x + 1)

    graph = flat(function, SCALAR)
    assert names(graph).count("sin") == 3
    assert len(set(defined(graph))) == len(defined(graph))
    check_well_formed(graph)
    check_equals(graph, function, SCALAR)


def test_closed_over_arrays_become_constants_also_those_of_inner_jaxprs():
    outer_table, inner_table = np.arange(3.0, dtype="f4"), jnp.ones((3,)) * 5

    @jax.jit
    def inner(x):
        return x * inner_table

    def function(x):
        return inner(x) + outer_table

    graph = flat(function, VECTOR)
    check_well_formed(graph)
    check_equals(graph, function, VECTOR)


def test_constants_that_a_closed_inner_jaxpr_holds_are_renamed_at_each_use():
    table = jnp.arange(3.0)
    body = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(lambda x: x * table)(VECTOR))

    def function(x):
        return jax.jit(body)(*jax.jit(body)(x))[0]

    graph = flat(function, VECTOR)
    assert names(graph) == ["mul", "mul"]
    check_well_formed(graph)
    for value in graph.consts.values():
        np.testing.assert_array_equal(value, table)
    check_equals(graph, function, VECTOR)


def test_an_output_may_be_an_input_a_literal_or_repeated():
    def function(x):
        y = jnp.sin(x)
        return x, jnp.float32(3), y, y

    graph = flat(function, SCALAR)
    assert graph.outvars[0] is graph.invars[0]
    assert isinstance(graph.outvars[1], Literal)
    assert graph.outvars[2] is graph.outvars[3]
    check_equals(graph, function, SCALAR)


# Scans.


def scanned(reverse):
    def function(layers, x, noise):
        def layer(carry, row):
            weight, shift, number = row
            y = jnp.tanh(weight @ carry + shift) * number
            return y, (y.sum(), weight[0])

        rows = layers, noise, jnp.arange(4.0)
        return jax.lax.scan(layer, x, rows, reverse=reverse)

    return function


NOISE = jax.ShapeDtypeStruct((4, 3), jnp.float32)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_scan_over_a_stacked_parameter_is_unrolled(reverse):
    function = scanned(reverse)
    graph = flat(function, STACK, VECTOR, NOISE, stacked=[0])
    assert "scan" not in names(graph)
    assert names(graph).count("tanh") == 4
    check_well_formed(graph)
    check_equals(graph, function, STACK, VECTOR, NOISE)


def test_rows_of_a_stacked_parameter_are_static_and_other_rows_are_not():
    graph = flat(scanned(False), STACK, VECTOR, NOISE, stacked=[0])
    stacked, _, noise = graph.invars
    readers = {"param": [], "noise": []}
    for equation in graph.equations:
        if stacked in equation.invars:
            readers["param"].append(equation)
        if noise in equation.invars:
            readers["noise"].append(equation)
    starts = [e.params["start_indices"][0] for e in readers["param"]]
    assert {e.primitive.name for e in readers["param"]} == {"slice"}
    assert starts == [0, 1, 2, 3]
    assert {e.primitive.name for e in readers["noise"]} == {"dynamic_slice"}


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_iterations_of_an_unrolled_scan_are_in_the_order_of_the_scan(reverse):
    graph = flat(scanned(reverse), STACK, VECTOR, NOISE, stacked=[0])
    stacked = graph.invars[0]
    order = [
        e.params["start_indices"][0] for e in graph.equations if stacked in e.invars
    ]
    assert order == ([3, 2, 1, 0] if reverse else [0, 1, 2, 3])


def test_a_cast_between_the_parameter_and_the_scan_is_made_row_by_row():
    def function(layers, x):
        def layer(carry, weight):
            return weight @ carry, None

        return jax.lax.scan(layer, x, layers.astype(jnp.bfloat16))[0]

    x = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    graph = flat(function, STACK, x, stacked=[0])
    assert "scan" not in names(graph)
    casts = [e for e in graph.equations if e.primitive.name == "convert_element_type"]
    assert [e.outvars[0].aval.shape for e in casts] == [(1, 3, 3)] * 4
    arguments = [*values_of(STACK), values_of(VECTOR)[0].astype(jnp.bfloat16)]
    np.testing.assert_array_equal(graph(*arguments)[0], function(*arguments))


def test_a_scan_that_reads_no_rows_of_a_parameter_stays():
    def function(weight, x, rows):
        def layer(carry, row):
            return weight @ carry + row, None

        return jax.lax.scan(layer, x, rows)[0]

    weight = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    graph = flat(function, weight, VECTOR, NOISE, stacked=[0])
    assert names(graph).count("scan") == 1
    check_equals(graph, function, weight, VECTOR, NOISE)


def test_a_scan_over_an_activation_stays_though_it_depends_on_a_parameter():
    def function(layers, x):
        rows = layers * 2.0
        return jax.lax.scan(lambda c, w: (w @ c, None), x, rows)[0]

    graph = flat(function, STACK, VECTOR, stacked=[0])
    assert "scan" in names(graph)


def test_of_nested_scans_over_a_stacked_parameter_the_outer_is_unrolled():
    spec = jax.ShapeDtypeStruct((2, 2, 3, 3), jnp.float32)

    def function(layers, x):
        def outer(carry, group):
            carry, _ = jax.lax.scan(lambda c, w: (jnp.tanh(w @ c), None), carry, group)
            return carry, None

        return jax.lax.scan(outer, x, layers)[0]

    graph = flat(function, spec, VECTOR, stacked=[0])
    assert names(graph).count("scan") == 2
    check_well_formed(graph)
    check_equals(graph, function, spec, VECTOR)


def test_a_scan_of_one_iteration_and_one_of_none_are_what_they_are():
    for length in (1, 0):
        spec = jax.ShapeDtypeStruct((length, 3, 3), jnp.float32)

        def function(layers, x):
            return jax.lax.scan(lambda c, w: (w @ c, None), x, layers)[0]

        graph = flat(function, spec, VECTOR, stacked=[0])
        check_equals(graph, function, spec, VECTOR)


def test_a_scan_of_no_iteration_still_gives_its_empty_stacks():
    spec = jax.ShapeDtypeStruct((0, 3, 3), jnp.float32)

    def function(layers, x):
        return jax.lax.scan(lambda c, w: (w @ c, c), x, layers)

    graph = flat(function, spec, VECTOR, stacked=[0])
    assert [a.aval.shape for a in graph.outvars] == [(3,), (0, 3)]


# What is not a call stays.


def test_custom_rules_branches_and_loops_stay():
    @jax.custom_vjp
    def with_vjp(x):
        return jnp.sin(x)

    with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 7,))

    @jax.custom_jvp
    def with_jvp(x):
        return jnp.cos(x)

    with_jvp.defjvp(lambda x, t: (jnp.cos(x[0]), t[0] * 5))

    def function(x):
        y = with_vjp(x) + with_jvp(x)
        y = jax.lax.cond(y > 0, jnp.exp, jnp.tanh, y)
        return jax.lax.while_loop(lambda z: z < 3, lambda z: z + 1, y)

    graph = flat(function, SCALAR)
    found = names(graph)
    kinds = "custom_vjp", "custom_jvp", "cond", "while"
    assert all(any(n.startswith(kind) for n in found) for kind in kinds)
    check_equals(graph, function, SCALAR)


def test_a_flat_program_has_the_derivatives_of_the_function():
    @jax.custom_vjp
    def with_vjp(x):
        return jnp.sin(x)

    with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 7,))
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
    check_equals(graph, block, SCALAR)


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
    def function(a, b, c, d):
        return jnp.sin(d) * a, c

    graph = flat(function, *[SCALAR] * 4)
    a, _, c, d = graph.invars
    assert graph.used_invars() == (a, c, d)
    assert isinstance(graph.needed_for(graph.outvars), Graph)


def test_abstract_keeps_shape_and_dtype():
    spec = abstract(jnp.zeros((2, 3), jnp.bfloat16))
    assert (spec.shape, spec.dtype) == ((2, 3), jnp.bfloat16)
