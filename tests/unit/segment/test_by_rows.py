"""A function of independent rows runs in blocks of them, with the same results."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.core.jaxpr import trace
from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.jaxpr.dims import NotByRow
from zinf.core.segment.by_rows import by_rows
from zinf_kernels.attention import attention as fused_attention

T, H, F, V = 24, 8, 32, 40


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return jnp.asarray(values, dtype)


PARAMS = {
    "up": normal(H, F),
    "down": normal(F, H),
    "b": normal(F),
    "table": normal(V, H),
}
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, V, T), jnp.int32)
MASK = jnp.asarray(np.arange(T) % 3 > 0, jnp.float32)


def mlp(p: Any, x: jax.Array, activation: Any = jax.nn.gelu) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    hidden = centred @ p["up"]
    hidden = activation(hidden + jnp.broadcast_to(p["b"], hidden.shape))
    return x + hidden @ p["down"]


@jax.custom_vjp
def square(x: jax.Array) -> jax.Array:
    return x * x


square.defvjp(lambda x: (square(x), x), lambda x, g: (2 * x * g,))


def cross_entropy(p: Any, x: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
    logits = x @ p["table"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * mask).sum() / mask.sum()


def top_experts(p: Any, x: jax.Array) -> jax.Array:
    gates, experts = jax.lax.top_k(x @ p["up"], 2)
    weights = jax.nn.softmax(gates)
    return jnp.einsum("tk,tkh->th", weights, p["down"][experts])


def with_positions(p: Any, x: jax.Array) -> jax.Array:
    angle = jnp.arange(T)[:, None] / jnp.arange(1, H + 1)[None]
    return mlp(p, x * jnp.cos(angle))


def sorted_features(p: Any, x: jax.Array) -> jax.Array:
    return jnp.cumsum(jnp.sort(x), -1) @ p["up"]


def heads(p: Any, x: jax.Array) -> jax.Array:
    q = (x @ p["up"]).reshape(T, 4, 8).transpose(1, 0, 2)
    return jnp.concatenate([q, q * 2], -1).swapaxes(0, 1).reshape(T, -1)[:, 3:]


def attention(p: Any, x: jax.Array) -> jax.Array:
    scores = x @ jnp.swapaxes(x, -1, -2)
    return jax.nn.softmax(scores) @ mlp(p, x)


def attention_block(p: Any, x: jax.Array) -> jax.Array:
    q = (x @ p["up"]).reshape(1, T, 4, 8)
    mixed = fused_attention(q, q[:, :, :2], q[:, :, 2:], causal=True, **BLOCKS)
    return mlp(p, x + mixed.reshape(T, F) @ p["down"])


def running_mean(p: Any, x: jax.Array) -> jax.Array:
    def step(mean: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = 0.9 * mean + 0.1 * row
        return mean, mean

    return mlp(p, x + jax.lax.scan(step, jnp.zeros(H), mlp(p, x))[1])


def shifted_loss(p: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return cross_entropy(p, x, tokens[1:], MASK)


def next_labels(p: Any, x: jax.Array, labels: jax.Array) -> Any:
    following = jnp.concatenate([labels[1:], jnp.full_like(labels[:1], -1)])
    counts = following >= 0
    return cross_entropy(p, x, jnp.where(counts, following, 0), counts)


BLOCKS = {"implementation": "blocks"}
X = normal(T, H)
BATCH = normal(4, 6, H)
# By name: the function, and what it is given beside the parameters.
BY_ROW = {
    "mlp with a rule": (lambda p, x: mlp(p, x, square), (X,)),
    "mlp, recomputed": (lambda p, x: jax.checkpoint(mlp)(p, x), (X,)),
    "flattened": (lambda p, x: mlp(p, x.reshape(24, H)).reshape(4, 6, H), (BATCH,)),
    "masked loss": (cross_entropy, (X, LABELS, MASK)),
    "embedding": (lambda p, i: p["table"][i] * 2, (LABELS,)),
    "experts": (top_experts, (X,)),
    "positions": (with_positions, (X,)),
    "sort": (sorted_features, (X,)),
    "heads": (heads, (X,)),
    "samples of attention": (attention, (BATCH,)),
    "attention and mlp": (attention_block, (X,)),
    "a loop between two": (running_mean, (X,)),
    "labels of a longer row": (shifted_loss, (X, jnp.append(LABELS, 1))),
    "labels moved by one": (next_labels, (X, LABELS)),
    "several results": (lambda p, x: (x.sum(0), mlp(p, x), p["b"] * 2, x), (X,)),
    "sums of sums": (lambda p, x: mlp(p, x / jnp.sqrt((x * x).sum())), (X,)),
}


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def in_blocks(
    function: Any, params: Any, rest: Any, num_blocks: int = 4, parts: int = 1
) -> Any:
    rows: list[dict[int, int]] = [{}] * len(jax.tree.leaves(params))
    for leaf in jax.tree.leaves(rest):
        rows.append({d: parts for d, size in enumerate(leaf.shape) if size > 1})
    return by_rows(function, specs((params, *rest)), rows, num_blocks)


def assert_close(found: Any, expected: Any) -> None:
    """To 1e-5 of the largest: sums over rows are in another order."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = float(jnp.abs(y).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale)


# Rows that two devices have half of, in an order of their own.
IN_PARTS = ("flattened", "labels moved by one", "positions", "attention and mlp")


@pytest.mark.parametrize(
    ("name", "parts"), [(n, 1) for n in BY_ROW] + [(n, 2) for n in IN_PARTS]
)
def test_blocks_of_rows_give_the_results_and_derivatives_of_all_rows(name, parts):
    function, rest = BY_ROW[name]
    cotangents = jax.tree.map(jnp.cos, function(PARAMS, *rest))
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in rest]

    def both(params: Any, cotangents: Any, *rest: Any) -> Any:
        def of_floats(params: Any, *floats: Any) -> Any:
            given = iter(floats)
            pairs = zip(rest, is_float, strict=True)
            return function(params, *(next(given) if f else x for x, f in pairs))

        floats = [x for x, f in zip(rest, is_float, strict=True) if f]
        results, vjp = jax.vjp(of_floats, params, *floats)
        return results, vjp(cotangents)

    arguments = cotangents, *rest
    run = in_blocks(both, PARAMS, arguments, parts=parts)
    expected = jax.jit(both)(PARAMS, *arguments)
    assert_close(jax.jit(run)(PARAMS, *arguments), expected)


NEED_ALL = {
    "normalised over rows": (lambda p, x: x / x.max(0)[None], "`reduce_max` over rows"),
    "attention": (lambda p, x: jax.nn.softmax(x @ x.T), "rows with other rows"),
    "shifted": (lambda p, x: x[1:], "`slice` of some rows"),
    "cumulative": (lambda p, x: jnp.cumsum(x, 0), "`cumsum` along rows"),
}


@pytest.mark.parametrize("name", NEED_ALL)
def test_what_needs_all_rows_says_why(name):
    function, reason = NEED_ALL[name]
    rows = [*[{}] * len(PARAMS), {0: 1}]
    with pytest.raises(NotByRow, match=f"along dim 0: .*{reason}"):
        by_rows(function, specs((PARAMS, X)), rows, 4)


@pytest.mark.parametrize(
    ("num_rows", "num_blocks", "length"), [(24, 4, 4), (24, 5, 6), (23, 4, 23)]
)
def test_blocks_are_as_many_as_asked_for_or_the_next_divisor(
    num_rows, num_blocks, length
):
    x = normal(num_rows, H)
    run = in_blocks(mlp, PARAMS, (x,), num_blocks)
    equations = open_jaxpr(trace(run, PARAMS, x)[0])[0].eqns
    assert [e.params["length"] for e in equations if "length" in e.params] == [length]


def test_gradients_of_narrow_parameters_are_added_up_in_float32():
    params = {"w": jnp.ones((H, 1), jnp.bfloat16)}
    rest = (jnp.full((512, H), 2**-8, jnp.bfloat16),)

    def gradient(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda p: (x @ p["w"]).astype(jnp.float32).sum())(params)

    run = in_blocks(gradient, params, rest, num_blocks=512)
    # 512 times 2^-8, which bfloat16 stops adding at 1.
    assert float(run(params, *rest)["w"][0, 0]) == 2.0


@pytest.mark.parametrize("name", ["labels of a longer row", "labels moved by one"])
def test_the_gradient_of_logits_is_held_a_block_at_a_time(name):
    """Also the part of it that depends on labels alone."""
    loss, rest = BY_ROW[name]
    run = in_blocks(jax.grad(loss, argnums=(0, 1)), PARAMS, rest)
    text = jax.jit(run).lower(PARAMS, *rest).compile().as_text()
    assert f"{T // 4},{V}" in text and f"[{T},{V}" not in text


def test_rows_of_zeros_are_summed_once_per_block_into_lookups():
    def gradient(params: Any, ids: jax.Array) -> Any:
        return jax.grad(lambda p: p["table"][ids].sum())(params)["table"]

    run = in_blocks(gradient, PARAMS, (LABELS,))
    counts = np.bincount(np.asarray(LABELS), minlength=V).astype("f4")
    np.testing.assert_array_equal(run(PARAMS, LABELS), np.tile(counts[:, None], H))
