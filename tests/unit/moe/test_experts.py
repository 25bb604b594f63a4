"""The loop over blocks of experts against all experts on all tokens."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.moe import experts
from zinf.moe.experts import default_block

EXPERTS, TOKENS, DIM, HIDDEN, K = 5, 48, 8, 12, 2
# Sums in float32 in another order than an einsum's.
ROUNDING = 1e-5


def gated_mlp(weights: dict, rows: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(rows @ weights["gate"]) * (rows @ weights["up"])
    return hidden @ weights["down"] + weights["bias"][None]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


WEIGHTS = {
    "gate": normal(0, EXPERTS, DIM, HIDDEN),
    "up": normal(1, EXPERTS, DIM, HIDDEN),
    "down": normal(2, EXPERTS, HIDDEN, DIM),
    "bias": normal(3, EXPERTS, DIM),
}
X = normal(4, TOKENS, DIM)
GATE = jax.nn.softmax(normal(5, TOKENS, K))


def dense(weights: dict, x: jax.Array, choice: jax.Array, gate: jax.Array):
    results = jax.vmap(functools.partial(gated_mlp, rows=x))(weights)
    chosen = jax.nn.one_hot(choice, EXPERTS)  # A negative choice is a row of zeros.
    return jnp.einsum("etd,tke,tk->td", results, chosen, gate)


def choices(name: str) -> jax.Array:
    choice = np.argsort(np.asarray(normal(6, TOKENS, EXPERTS)), axis=1)[:, :K]
    if name == "one expert for all":
        choice[:, 0], choice[:, 1] = 3, 1
    if name == "dropped":
        choice[::3, 0] = -1
        choice[::6] = -1
    if name == "all dropped":
        choice[:] = -1
    return jnp.asarray(choice, jnp.int32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["mixed", "one expert for all", "dropped", "all dropped"]
)
@pytest.mark.parametrize("block", [None, 1, 7])
def test_values_and_gradients_are_those_of_all_experts(name: str, block: int) -> None:
    choice, cotangent = choices(name), normal(7, TOKENS, DIM)

    def both(function):
        value, vjp = jax.vjp(
            lambda w, x, g: function(w, x, choice, g), WEIGHTS, X, GATE
        )
        return value, vjp(cotangent)

    found = jax.jit(lambda: both(functools.partial(experts, gated_mlp, block=block)))()
    chex.assert_trees_all_close(found, both(dense), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_the_block_changes_no_result_beyond_rounding() -> None:
    choice = choices("mixed")
    results = [
        experts(gated_mlp, WEIGHTS, X, choice, GATE, block=block) for block in (8, 16)
    ]
    chex.assert_trees_all_close(*results, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_bfloat16_keeps_its_dtypes_and_sums_in_float32() -> None:
    cast = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
    choice = choices("mixed")

    def total(weights, x, gate):
        result = experts(gated_mlp, weights, x, choice, gate)
        assert result.dtype == jnp.bfloat16
        return jnp.sum(result.astype(jnp.float32) ** 2)

    gradients = jax.grad(total, argnums=(0, 1, 2))(cast(WEIGHTS), cast(X), GATE)
    wanted = jax.grad(lambda w, x, g: jnp.sum(dense(w, x, choice, g) ** 2), (0, 1, 2))(
        WEIGHTS, X, GATE
    )
    assert {a.dtype for a in jax.tree.leaves(gradients[:2])} == {jnp.dtype("bfloat16")}
    for found, exact in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        # Two roundings to 8 bits in each of three products: a few percent of the
        # largest entry.
        scale = float(jnp.abs(exact).max())
        assert float(jnp.abs(found - exact).max()) < 0.06 * scale


def test_only_one_block_is_held() -> None:
    many = 4096
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), WEIGHTS)
    x = jax.ShapeDtypeStruct((many, DIM), jnp.float32)
    choice = jax.ShapeDtypeStruct((many, K), jnp.int32)
    gate = jax.ShapeDtypeStruct((many, K), jnp.float32)

    def gradients(function, weights, x, choice, gate):
        return jax.grad(
            lambda w, x, g: jnp.sum(function(w, x, choice, g) ** 2), (0, 1, 2)
        )(weights, x, gate)

    def temporary(function) -> int:
        lowered = jax.jit(functools.partial(gradients, function)).lower(
            weights, x, choice, gate
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    of_blocks = temporary(functools.partial(experts, gated_mlp, block=64))
    # All experts on all tokens: EXPERTS results of x's size and hidden values at least.
    assert of_blocks * EXPERTS < temporary(dense)


@pytest.mark.parametrize(
    ("routes", "num_experts", "block"),
    [(4096, 8, 128), (64, 8, 8), (80, 8, 16), (3, 8, 8)],
)
def test_a_block_is_no_larger_than_an_expert_s_share(routes, num_experts, block):
    assert default_block(routes, num_experts) == block


def change_width(weights: dict, rows: jax.Array) -> jax.Array:
    return rows @ weights["up"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stacked_weights": {}}, "has no array"),
        (
            {"stacked_weights": {**WEIGHTS, "bias": jnp.zeros((4, DIM))}},
            "found bias 4, down 5",
        ),
        ({"x": X[None]}, r"x is \(1, 48, 8\)"),
        ({"choice": choices("mixed")[:, :1]}, r"choice \(48, 1\) and gate \(48, 2\)"),
        ({"x": X[:7]}, "for 48 tokens but x has 7"),
        ({"choice": choices("mixed").astype(jnp.uint8)}, "signed integer"),
        ({"function": change_width}, r"rows of shape \(1, 8\)"),
        ({"block": 0}, "block is 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: dict, message: str) -> None:
    usual = {
        "function": gated_mlp,
        "stacked_weights": WEIGHTS,
        "x": X,
        "choice": choices("mixed"),
        "gate": GATE,
    }
    with pytest.raises(ValueError, match=message):
        experts(**{**usual, **arguments})
