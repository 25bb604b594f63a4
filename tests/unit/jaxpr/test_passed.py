"""Inputs that a program returns are told from values that it computes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zinf.core.jaxpr import passed

ROWS, ROW = jnp.ones((4, 3)), jnp.ones(3)


def scanned(a, rows):
    """Carries one input unchanged and changes another; stacks what it reads."""

    def body(carry, row):
        kept, summed = carry
        return (kept, summed + row), (row, row * 2, kept)

    (kept, summed), (read, doubled, repeated) = lax.scan(body, (a, a), rows)
    return kept, summed, read, doubled, repeated


def repeated(a, rows):
    """Each row of a scan is stacked again by a scan inside."""

    def body(carry, row):
        return carry, lax.scan(lambda c, _: (c, (row, c)), row, rows)[1]

    return lax.scan(body, a, rows)[1]


def swapped(a, b):
    return lax.fori_loop(0, 2, lambda _, pair: (pair[1], pair[0]), (a, b))


def looped(a, b):
    """A loop with constants of its condition and of its body."""
    limit, extra = a[0], b * 2

    def body(state):
        return state[0] + extra.sum(), state[1]

    return lax.while_loop(lambda state: state[0] < limit, body, (a[1], b))


def branched(a, b):
    return lax.cond(a[0] > 0, lambda a, b: (a, b, b), lambda a, b: (a, a, b + 0), a, b)


CASES = {
    "itself and a copy": (lambda a, b: (b, a, a + 0), (1, 0, None)),
    "calls": (lambda a, b: jax.jit(jax.checkpoint(lambda x, y: (y, x)))(a, b), (1, 0)),
    "a constant": (lambda a, b: (a, 1.0), (0, None)),
    "a branch": (branched, (0, None, None)),
    "a loop": (looped, (None, 1)),
    "a loop that swaps": (swapped, (None, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_followed_to_inputs(name):
    function, expected = CASES[name]
    assert passed(jax.make_jaxpr(function)(ROW, ROW)) == list(expected)


def test_a_scan_carries_and_stacks_what_it_reads():
    closed = jax.make_jaxpr(scanned)(ROW, ROWS)
    assert passed(closed) == [0, None, 1, None, None]


def test_a_row_that_an_inner_scan_stacks_is_no_row_of_the_outer_one():
    assert passed(jax.make_jaxpr(repeated)(ROW, ROWS)) == [None, None]
