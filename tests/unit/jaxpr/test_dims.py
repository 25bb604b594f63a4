"""The table of dims agrees with what jax computes, for each primitive in it."""

from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.core.jaxpr import inline_all, trace
from zinf.core.jaxpr.compat import Literal, build_jaxpr, evaluate, fresh
from zinf.core.jaxpr.dims import (
    NotByRow,
    factor_of,
    guessed_view,
    own_dims,
    resized_params,
    viewed,
)
from zinf.core.jaxpr.primitives import ELEMENTWISE, RULES, factors
from zinf_kernels.attention import attention

F, B = (jax.ShapeDtypeStruct((4, 6, 8), t) for t in ("f4", "bool"))
ROW, ROW_INT, ROW_BOOL = (jax.ShapeDtypeStruct((4,), t) for t in ("f4", "i4", "bool"))
PLACES = jax.ShapeDtypeStruct((4, 6, 2), "i4")
HEADS, FEWER = (jax.ShapeDtypeStruct((2, 8, n, 8), "f4") for n in (4, 2))
SEGMENTS = jax.ShapeDtypeStruct((2, 8), "i4")
ON_ONE = NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), P())
NAMES = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"} | {
    "not": "bitwise_not"
}
# Primitives of other versions of jax, and those that no function of `jax.lax` makes.
ELSEWHERE = {"one_minus_square", "add_any", "log2"}
attend = partial(attention, causal=True, implementation="blocks")
ELEMENTWISE_CASES = {
    "clamp": (lambda x: lax.clamp(x, x, x), ROW),
    "convert_element_type": (lambda x: x.astype("f2"), ROW),
    "copy": (jnp.copy, ROW),
    "integer_pow": (lambda x: x**3, ROW),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 4), ROW),
    "select_n": (lambda b, x: jnp.where(b, x, x * 2), ROW_BOOL, ROW),
    "real": (lambda x: lax.real(lax.complex(x, x)), ROW),
    "imag": (lambda x: lax.imag(lax.complex(x, x)), ROW),
    "conj": (lambda x: lax.conj(lax.complex(x, x)), ROW),
    "complex": (lax.complex, ROW, ROW),
    "round": (lax.round, ROW),
}
CASES = {
    "sharding_constraint": (lambda x: lax.with_sharding_constraint(x, ON_ONE), F),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x[:, None], (4, 2, 6, 8)), F),
    "transpose": (lambda x: x.transpose(2, 0, 1), F),
    "squeeze": (lambda x: x[:, :1].squeeze(1), F),
    "reshape": (
        lambda x: (
            x.reshape(24, 8).reshape(4, 3, 16),
            lax.reshape(x, (4, 48), (1, 0, 2)),
        ),
        F,
    ),
    "slice": (lambda x: x[:, ::2, 2:], F),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 1, 0), (4, 2, 8)), F),
    "pad": (lambda x: jnp.pad(x, [(0, 0), (1, 0), (0, 0)]), F),
    "rev": (lambda x: jnp.flip(x, 1), F),
    "concatenate": (lambda x: jnp.concatenate([x, x * 2], 1), F),
    "stack": (lambda x, y: jnp.stack([x, y], 1), F, F),
    "unstack": (jax.grad(lambda x: (jnp.stack([x, x * 2], 1) ** 2).sum()), F),
    "split": (lambda x: jnp.split(x, 2, 1), F),
    "sort": (lambda x, i: lax.sort((x, i), dimension=1), F, F),
    "top_k": (lambda x: lax.top_k(x, 2), F),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2, reduction_dimension=1), F),
    "cumsum": (lambda x: lax.cumsum(x, 1), F),
    "cumprod": (lambda x: lax.cumprod(x, 1), F),
    "cummax": (lambda x: lax.cummax(x, 1), F),
    "cummin": (lambda x: lax.cummin(x, 1), F),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), F),
    "reduce_sum": (lambda x: x.sum(1), F),
    "reduce_max": (lambda x: x.max((0, 2)), F),
    "reduce_min": (lambda x: x.min(1), F),
    "reduce_prod": (lambda x: x.prod(1), F),
    "reduce_and": (lambda b: b.all(1), B),
    "reduce_or": (lambda b: b.any(1), B),
    "argmax": (lambda x: x.argmax(1), F),
    "argmin": (lambda x: x.argmin(1), F),
    "stop_gradient": (lax.stop_gradient, F),
    "dot_general": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), F, F),
    "gather": (lambda x, i: (jnp.take_along_axis(x, i, 2), x[:, i[0, 0]]), F, PLACES),
    "scatter-add": (
        jax.grad(lambda x, i: (jnp.take_along_axis(x, i, 2) + x[i[0, 0]].sum()).sum()),
        F,
        PLACES,
    ),
    "attention": (
        lambda q, k, s: (attend(q, q, q, q_segments=s), attend(q, k, k)),
        HEADS,
        FEWER,
        SEGMENTS,
    ),
}


def equations(name, function, *shapes):
    """The equations of a primitive in a program."""
    graph = inline_all(trace(function, *shapes)[0])
    found = [e for e in graph.equations if e.primitive.name == name]
    assert found, f"{name} is not in {[e.primitive.name for e in graph.equations]}"
    return found


def values_of(equation):
    random = np.random.default_rng(0)

    def value(atom):
        if isinstance(atom, Literal):
            return atom.val
        shape, dtype = atom.aval.shape, atom.aval.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(random.uniform(0.1, 0.9, shape), dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jnp.asarray(random.normal(size=shape) * (1 + 2j), dtype)
        return jnp.asarray(random.integers(0, 2, shape), dtype)

    values = [value(a) for a in equation.invars]
    if equation.primitive.name == "scatter-add":
        values[0] = jnp.zeros_like(values[0])  # Each block would add it to the sum.
    return values


def run(equation, values, shapes, params):
    given = [
        (a.aval, jnp.shape(x)) for a, x in zip(equation.invars, values, strict=True)
    ]
    invars = [fresh(aval.update(shape=shape)) for aval, shape in given]
    pairs = zip(equation.outvars, shapes, strict=True)
    outvars = [fresh(v.aval.update(shape=tuple(shape))) for v, shape in pairs]
    changed = equation.replace(invars=invars, outvars=outvars, params=params)
    return evaluate(build_jaxpr(invars, outvars, [changed]), values)


def block(value, dim, k):
    return value if dim is None else jnp.split(jnp.asarray(value), 2, dim)[k]


def check(equation):
    """Two blocks along each factor are blocks of the results, or add up to them.

    Returns:
        The dims of operands that are in a factor, as (operand, dim).
    """
    values = values_of(equation)
    shapes = [v.aval.shape for v in equation.outvars]
    wholes = run(equation, values, shapes, equation.params)
    followed = set()
    for factor in factors(equation):
        followed |= {*factor.operands.items()}
        if factor.why_whole:
            with pytest.raises(NotByRow, match=equation.primitive.name):
                factor_of(equation, factor.operands)
            continue
        sizes = [equation.invars[n].aval.shape[d] for n, d in factor.operands.items()]
        to = factor.result
        sizes += [] if to is None else [shape[to] for shape in shapes]
        if any(size % 2 for size in sizes):
            continue
        params, parts = equation.params, [list(shape) for shape in shapes]
        for part in parts if to is not None else ():
            part[to] //= 2
        if to is not None:
            params = resized_params(equation, to, parts[0][to])
        blocks = []
        for k in range(2):
            own = [block(x, factor.operands.get(n), k) for n, x in enumerate(values)]
            blocks.append(run(equation, own, parts, params))
        for whole, pair in zip(wholes, zip(*blocks, strict=True), strict=True):
            joined = sum(pair) if to is None else jnp.concatenate(pair, to)
            np.testing.assert_allclose(joined, whole, rtol=1e-5, atol=1e-6)
    return followed


@pytest.mark.parametrize("name", CASES)
def test_blocks_along_each_factor_give_blocks_of_results(name):
    for equation in equations(name, *CASES[name]):
        first = {(0, dim) for dim in range(equation.invars[0].aval.ndim)}
        assert check(equation) >= first


def elementwise(name):
    """An equation of an elementwise primitive, on floats if it takes those."""
    if name in ELEMENTWISE_CASES:
        return equations(name, *ELEMENTWISE_CASES[name])[-1]
    function = getattr(lax, NAMES.get(name, name))
    for kind in (ROW, ROW_INT):
        for count in (1, 2):
            with suppress(TypeError):
                return equations(name, function, *[kind] * count)[-1]
    raise AssertionError(f"`{name}` takes one or two arrays")


def test_elementwise_primitives_compute_blocks_of_results_from_blocks():
    found = [elementwise(name) for name in sorted(ELEMENTWISE - ELSEWHERE)]
    assert all(factors(e) for e in found)

    # All in one program: each alone would be compiled.
    @jax.jit
    def results(each):
        pairs = zip(found, each, strict=True)
        return [run(e, v, [v[0].shape], e.params)[0] for e, v in pairs]

    values = [values_of(e) for e in found]
    wholes = results(values)
    halves = [results([[block(x, 0, k) for x in v] for v in values]) for k in (0, 1)]
    for whole, pair in zip(wholes, zip(*halves, strict=True), strict=True):
        np.testing.assert_allclose(jnp.concatenate(pair), whole, rtol=1e-6)


def test_every_rule_has_a_case():
    assert RULES.keys() == ELEMENTWISE | CASES.keys()


def test_what_is_unknown_is_refused_by_name():
    convolve = lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME")  # noqa: E731
    kernel = jax.ShapeDtypeStruct((3, 6, 2), "f4")
    (equation,) = equations("conv_general_dilated", convolve, F, kernel)
    with pytest.raises(NotByRow, match="`conv_general_dilated`"):
        factor_of(equation, {0: 0})
    (equation,) = equations("add", jnp.add, F, F)
    with pytest.raises(NotByRow, match="`add` mixes rows with others"):
        factor_of(equation, {0: 0, 1: 1})


@pytest.mark.parametrize(
    ("view", "strict", "lenient"),
    [
        (lambda x: x.reshape(4, 2, 3, 8), None, ((),) * 4),
        (lambda x: x.reshape(24, 1, 8), ((0, 1), (), (2,)), None),
        (lambda x: x.swapaxes(0, 1), ((1,), (0,), (2,)), None),
        (lambda x: x.astype("f2"), ((0,), (1,), (2,)), None),
        (lambda x: x[None], ((), (0,), (1,), (2,)), None),
        (lambda x: jnp.broadcast_to(x, (2, 4, 6, 8)), None, ((), (0,), (1,), (2,))),
        (lambda x: x[1:2], None, ((), (1,), (2,))),
        (lambda x: x + 1, None, None),
    ],
)
def test_dims_of_an_array_are_followed_through_views(view, strict, lenient):
    (equation,) = inline_all(trace(view, F)[0]).equations
    given = own_dims(F.shape), F.shape
    assert viewed(equation, *given) == strict
    assert guessed_view(equation, *given) == (strict or lenient)
