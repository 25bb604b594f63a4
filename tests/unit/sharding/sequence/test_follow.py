"""Dims of a batch are followed through equations, also where that is a guess."""

import jax
import jax.numpy as jnp
import pytest

from zinf.core.jaxpr import inline_all, trace
from zinf.core.sharding.axes.sequence.follow import Mark, results

B, T, D = 4, 6, 10
BOTH = {Mark.EXAMPLES: 0, Mark.POSITIONS: 1}


def marks_of(function, *shapes):
    """The marks of the result, if dims 0 and 1 of the first argument are marked."""
    closed, _ = trace(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    graph = inline_all(closed)
    known = {graph.invars[0]: BOTH}
    for equation in graph.equations:
        found = results(equation, known)
        known.update(dict.fromkeys(equation.outvars, found) if found else {})
    return known.get(graph.outvars[0], {})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(B * T, D)[:, :5].reshape(B, T, 5),
        lambda x: (x.reshape(B * T, D) @ jnp.ones((D, 3))).reshape(B, T, 3),
        lambda x: jnp.cumsum(x, 1),
        lambda x: jax.nn.softmax(x, 1),
        lambda x: jnp.concatenate([x[:, :1] * 0, x[:, :-1]], 1),
        lambda x: jnp.pad(x, [(0, 0), (2, 0), (0, 0)])[:, 1:],
        lambda x: x.reshape(B, T, 2, D // 2).swapaxes(1, 2).swapaxes(1, 2),
        lambda x: jnp.flip(x, 1),
    ],
    ids=["merge", "product", "cumsum", "softmax", "shift", "pad", "heads", "flip"],
)
def test_examples_and_positions_are_followed(function):
    assert marks_of(function, (B, T, D)) == BOTH


def test_a_dim_that_is_summed_is_lost_and_others_move():
    assert marks_of(lambda x: x.sum(0), (B, T, D)) == {Mark.POSITIONS: 0}
    assert marks_of(lambda x: x.sum(1), (B, T, D)) == {Mark.EXAMPLES: 0}


def test_a_square_product_over_positions_is_no_guess():
    weights = lambda x, w: jnp.einsum("btd,ts->bsd", x, w)  # noqa: E731
    assert marks_of(weights, (B, T, T), (T, T)) == {Mark.EXAMPLES: 0}


def test_merged_dims_stay_merged_until_they_are_split():
    merged = {Mark.MERGED: 0}
    assert marks_of(lambda x: x.reshape(B * T, D) * 2, (B, T, D)) == merged
