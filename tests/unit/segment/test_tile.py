"""Leaves that are too large are read by tile, with the results of the whole."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.marks import slow
from zinf.core.jaxpr import flatten, trace
from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.problem.cross_entropy import cross_entropy
from zinf.core.program import ArrayId, Role
from zinf.core.segment.tile import tile_leaves
from zinf.core.segment.tile_loss import IN_LOSS

F32, BF16 = jnp.float32, jnp.bfloat16
WHOLE = ArrayId(Role.PARAM, "w")
IDS = np.array([[0, 5, 22], [7, 7, 11]], np.int32)


def tiled(function, weight, *rest, max_bytes, tileable=("w",)):
    closed, _ = trace(function, weight, *rest)
    leaf = open_jaxpr(closed)[0].invars[0]
    arrays = {leaf: WHOLE}
    return tile_leaves(flatten(closed), arrays, tileable=tileable, max_bytes=max_bytes)


def as_function(found):
    """The tiled program as a function of the whole weight."""

    def function(weight, *rest):
        tiles = [weight[slice(*a.rows)] for a in found.arrays.values()]
        return found.graph(*rest, *tiles)[0]

    return function


def normal(*shape, seed=2, dtype=F32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def weight_of(*shape, dtype=F32):
    return normal(*shape, seed=1, dtype=dtype)


def assert_alike(found, function, weight, *rest, tolerance=1e-5):
    """Results and derivatives by tile are those of the whole, and finite."""

    def results(f, weight, *rest):
        y, vjp = jax.vjp(lambda w: f(w, *rest), weight)
        return y, *vjp(jnp.cos(y.astype(F32)).astype(y.dtype))

    if weight.dtype == F32:  # XLA leaves out roundings to bfloat16 within a fusion.
        results = jax.jit(results, static_argnums=0)
    pairs = zip(
        results(as_function(found), weight, *rest),
        results(function, weight, *rest),
        strict=True,
    )
    for y, expected in pairs:
        assert y.dtype == expected.dtype
        y, expected = np.asarray(y, "f4"), np.asarray(expected, "f4")
        assert np.isfinite(y).all()
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance * scale)


# What reads a weight of 23 rows: by name, the function, the weight's shape, the rest.
X23, X29 = normal(5, 23), normal(5, 29)
READERS = {
    "contracted": (lambda w, x: x @ w, (23, 29), [X23]),
    "on the left": (lambda w, x: w.T @ x, (23, 29), [X23.T]),
    "transposed": (lambda w, x: x @ w.T, (23, 29), [X29]),
    "rows on the left": (lambda w, x: w @ x, (23, 29), [X29.T]),
    "per expert": (partial(jnp.einsum, "ehf,eth->etf"), (23, 4, 3), [normal(23, 5, 4)]),
    "heads": (partial(jnp.einsum, "dhk,td->thk"), (23, 4, 3), [X23]),
    "reshaped": (lambda w, x: x @ w.reshape(23, 12), (23, 4, 3), [X23]),
    "scaled": (lambda w, x: x @ (w * 0.5).astype(F32), (23, 29), [X23]),
    "masked": (lambda w, x, m: x @ (w * m), (23, 4), [X23, normal(23, 4)]),
    "columns": (lambda w, x: x @ w[:, 1:3], (23, 4), [X23]),
    "looked up": (lambda w, i: w[i], (23, 4), [IDS]),
    "clipped": (lambda w, i: jnp.take(w, i + 9, 0, mode="clip"), (23, 4), [IDS]),
    "looked up from the end": (lambda w, i: w[i - 23], (23, 4), [IDS]),
    "tied": (lambda w, i: w[i] @ w.T, (23, 4), [IDS]),
    "narrow": (lambda w, x: x @ w, (23, 29), [X23.astype(BF16)]),
}
# Three tiles, of 8, 8 and 7 rows: a first, one in between, and a shorter last. Two
# halves, or rows one by one where sums of many parts matter, for what sums and what
# looks up; compiling more tiles takes long.
CASES = [(name, 8) for name in READERS] + [("contracted", 23), ("looked up", 1)]
FAST = {"contracted", "transposed", "per expert", "heads", "masked", "tied", "narrow"}


@pytest.mark.parametrize(
    ("name", "num_rows"), [c if c[0] in FAST else slow(c) for c in CASES]
)
def test_a_weight_read_by_tile_gives_what_it_gives_as_a_whole(name, num_rows):
    function, shape, rest = READERS[name]
    dtype = BF16 if name == "narrow" else F32
    weight = weight_of(*shape, dtype=dtype)
    row_bytes = weight.nbytes // shape[0]
    # One less than the whole, so that 23 rows a tile are 12 and 11.
    limit = min(num_rows * row_bytes, weight.nbytes - 1)
    found = tiled(function, weight, *rest, max_bytes=limit)
    assert not found.refused
    sizes = [b - a for a, b in (array.rows for array in found.arrays.values())]
    assert sum(sizes) == shape[0] and max(sizes) * row_bytes <= limit
    # Sums in another order: of up to 29 products, each rounded to 2^-24; a narrow sum
    # is rounded once, to 2^-9, either way.
    tolerance = 2**-7 if dtype == BF16 else 1e-5
    assert_alike(found, function, weight, *rest, tolerance=tolerance)


def test_an_index_out_of_range_gives_what_jax_says():
    def function(w, i):
        return w.at[i].get(mode="fill", fill_value=7)

    weight, ids = weight_of(23, 4), np.array([22, 23, 99, 0], np.int32)
    found = tiled(function, weight, ids, max_bytes=64)
    y = as_function(found)(weight, ids)
    np.testing.assert_array_equal(y, function(weight, ids))
    assert (y[1:3] == 7).all()


def test_sums_of_narrow_products_are_rounded_once():
    # 1 and then 64 times 2^-9: each is lost when added to a bfloat16 of 1.
    weight = jnp.concatenate([jnp.ones((1, 1)), jnp.full((64, 1), 2**-9)]).astype(BF16)
    x = jnp.ones((1, 65), BF16)
    found = tiled(lambda w, x: x @ w, weight, x, max_bytes=2)
    assert len(found.arrays) == 65
    assert float(as_function(found)(weight, x)[0, 0]) == 1 + 64 * 2**-9


REFUSED = {
    "`reduce_sum` needs it as a whole": lambda w, x: x @ w / jnp.sum(w),
    "`cumsum` needs it as a whole": lambda w, x: x @ jnp.cumsum(w, 0),
    "only some of its rows are read": lambda w, x: x[:, :8] @ w[:8],
    "`dot_general` reads two such weights": lambda w, x: x @ (w @ w),
    "it is an output of the loss": lambda w, x: w + 1,
    "it is reshaped from [24, 24] to [16, 36], across tiles": lambda w, x: (
        (x @ w) @ jnp.concatenate([w.reshape(16, 36), w.reshape(16, 36)[:8]])
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_weight_that_has_to_be_whole_says_why_and_stays_so(reason):
    found = tiled(REFUSED[reason], weight_of(24, 24), normal(2, 24), max_bytes=480)
    assert found.refused == {"w": reason}
    assert not found.tilings and list(found.arrays.values()) == [WHOLE]


def test_a_leaf_whose_rows_have_no_update_of_their_own_is_not_tiled():
    function, shape, rest = READERS["contracted"]
    found = tiled(function, weight_of(*shape), *rest, max_bytes=480, tileable=())
    assert "cannot be updated" in found.refused["w"]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 300))
def test_tiles_are_within_the_limit_and_alike_if_that_costs_little(rows, width, limit):
    weight = weight_of(rows, width)
    found = tiled(lambda w, x: x @ w, weight, normal(2, rows), max_bytes=limit)
    if weight.nbytes <= limit:
        assert not found.tilings
        return
    (tiling,) = found.tilings
    assert tiling.edges[0] == 0 and tiling.edges[-1] == rows
    sizes = [b - a for a, b in tiling.tiles]
    assert max(sizes) * width * 4 <= max(limit, width * 4)
    assert set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
    fewest = -(-rows // max(1, limit // (width * 4)))
    assert len(sizes) < 2 * fewest


LABELS = np.array([[22, 0, 7, 8, -1], [16, 15, 3, 3, 9]], np.int32)
# The logits of 23 words in the loss: by name, and whether a tile is all that exists.
LOSSES = {
    "in rows": (lambda w, x: cross_entropy(x @ w.T, LABELS), True),
    "capped": (lambda w, x: cross_entropy(3 * jnp.tanh(x @ w.T / 3), LABELS), True),
    "with a bias": (
        lambda w, x: cross_entropy(
            x @ w.T + jnp.linspace(-1, 1, 23)[None, None], LABELS
        ),
        True,
    ),
    "tied": (lambda w, x: cross_entropy((w[LABELS] + x) @ w.T, LABELS), True),
    "read twice": (
        lambda w, x: cross_entropy(y := x @ w.T, LABELS) + jnp.max(y, -1),
        False,
    ),
    "of another rule": (lambda w, x: other_rule(x @ w.T, LABELS), False),
}


@jax.custom_jvp
def other_rule(logits, labels):
    """The code of `cross_entropy`, and another derivative."""
    labels = jnp.expand_dims(labels, -1)
    at_label = jnp.take_along_axis(logits, labels, axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - at_label


@other_rule.defjvp
def _(primals, tangents):
    return other_rule(*primals), 2 * jnp.sum(tangents[0], -1)


FAST_LOSSES = {"capped", "tied", "read twice", "of another rule"}


@pytest.mark.parametrize("name", [n if n in FAST_LOSSES else slow(n) for n in LOSSES])
def test_a_loss_by_tile_is_that_of_all_logits(name):
    function, is_by_tile = LOSSES[name]
    weight, x = weight_of(23, 4), 3 * normal(2, 5, 4)
    found = tiled(function, weight, x, max_bytes=8 * 16)
    (tiling,) = found.tilings
    assert (IN_LOSS in tiling.uses) == is_by_tile
    shapes = {v.aval.shape for e in found.graph.equations for v in e.outvars}
    assert ((2, 5, 23) not in shapes) == is_by_tile

    assert_alike(found, function, weight, x)


@pytest.mark.parametrize("label", [23, -24])
def test_a_label_beyond_the_words_gives_nan_by_tile_too(label):
    labels = np.full((2, 5), label, np.int32)
    weight, x = weight_of(23, 4), normal(2, 5, 4)
    found = tiled(lambda w, x: cross_entropy(x @ w.T, labels), weight, x, max_bytes=128)
    assert IN_LOSS in found.tilings[0].uses
    assert np.isnan(as_function(found)(weight, x)).all()


def test_a_loss_by_tile_has_numbers_for_logits_without_a_finite_one():
    """As `jax.nn.logsumexp`: words that a mask leaves out, in some tiles or in all."""
    mask = np.where(np.arange(23) < 9, -np.inf, 0).astype("f4")

    def function(w, x):
        return cross_entropy(x @ w.T + mask[None, None], np.full((2, 5), 12, np.int32))

    found = tiled(function, weight_of(23, 4), normal(2, 5, 4), max_bytes=128)
    assert IN_LOSS in found.tilings[0].uses
    assert_alike(found, function, weight_of(23, 4), normal(2, 5, 4))
