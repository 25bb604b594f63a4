"""Gradients of lookups as rows: which they are, and that they add up to the bit."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr import flatten
from zinf.core.segment.row_sums import add_rows, find_lookups, leave_as_rows

WORDS, WIDTH = 50, 3


# Tables are looked up by these, and the gradient of the first two is rows.
take, indexed = partial(jnp.take, axis=0), operator.getitem
OTHERS = {
    "clipped": partial(jnp.take, axis=0, mode="clip"),
    "of columns": lambda table, tokens: jnp.take(table, tokens % WIDTH, axis=1),
    "twice": lambda table, tokens: table[tokens] + table[tokens + 1],
    "whole": lambda table, tokens: table * tokens.sum(),
}


def gradient_of(look_up, shape, dtype=jnp.float32):
    """`(tokens, cotangents) -> gradient` as a graph, and its arguments."""

    def gradient(tokens, cotangents):
        table = jnp.zeros((WORDS, WIDTH), cotangents.dtype)
        return list(jax.vjp(lambda t: look_up(t, tokens), table)[1](cotangents))

    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 7, shape), jnp.int32)
    out = jax.eval_shape(look_up, jnp.zeros((WORDS, WIDTH)), tokens)
    cotangents = jnp.asarray(random.normal(size=out.shape), dtype)
    graph = flatten(jax.make_jaxpr(gradient)(tokens, cotangents))
    return graph, tokens, cotangents


@pytest.mark.parametrize(
    ("look_up", "shape", "dtype"),
    [(take, (1,), "f4"), (take, (2, 5), jnp.bfloat16), (indexed, (6,), "f4")],
)
def test_rows_are_added_to_the_bit_as_the_whole_gradient_is(look_up, shape, dtype):
    graph, tokens, cotangents = gradient_of(look_up, shape, dtype)
    lookups = find_lookups(graph, 1)
    assert list(lookups) == [0]
    rows, numbers = leave_as_rows(graph, lookups)(tokens, cotangents)
    assert rows.size == np.prod(shape, dtype=int) * WIDTH
    (whole,) = graph(tokens, cotangents)
    total = jnp.asarray(np.random.default_rng(1).normal(size=whole.shape), jnp.float32)
    wanted = total + whole.astype(jnp.float32)
    found = add_rows(total, rows, numbers)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert total.is_deleted(), "in its place"


def test_rows_beyond_the_table_add_to_nothing() -> None:
    rows = jnp.ones((6, WIDTH))
    numbers = jnp.asarray([[-1], [WORDS], [2], [-WORDS], [2], [WORDS + 9]])
    found = add_rows(jnp.zeros((WORDS, WIDTH)), rows, numbers)
    assert float(found.sum()) == 2 * WIDTH == float(found[2].sum())


@pytest.mark.parametrize("name", OTHERS)
def test_other_gradients_are_left_as_they_are(name: str) -> None:
    assert find_lookups(gradient_of(OTHERS[name], (6,))[0], 1) == {}


def test_as_many_rows_as_the_table_has_are_no_saving() -> None:
    assert find_lookups(gradient_of(take, (WORDS // 2,))[0], 1)
    assert not find_lookups(gradient_of(take, (WORDS // 2 + 1,))[0], 1)
