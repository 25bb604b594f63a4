"""The loop over blocks of experts against all experts on all tokens."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr.chosen import on_demand
from zinf.moe import experts
from zinf.moe.experts import default_block

EXPERTS, TOKENS, DIM, HIDDEN, K = 5, 48, 8, 12, 2
# Sums in float32 in another order than an einsum's.
ROUNDING = 1e-5


def gated_mlp(weights: dict, rows: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(rows @ weights["gate"]) * (rows @ weights["up"])
    return hidden @ weights["down"] + weights["bias"][None]


random = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape, np.float32))


WEIGHTS = {
    "gate": normal(EXPERTS, DIM, HIDDEN),
    "up": normal(EXPERTS, DIM, HIDDEN),
    "down": normal(EXPERTS, HIDDEN, DIM),
    "bias": normal(EXPERTS, DIM),
}
X, COTANGENT = normal(TOKENS, DIM), normal(TOKENS, DIM)
GATE = abs(normal(TOKENS, K))


def dense(weights: dict, x: jax.Array, choice: jax.Array, gate: jax.Array):
    results = jax.vmap(functools.partial(gated_mlp, rows=x))(weights)
    chosen = jax.nn.one_hot(choice, EXPERTS)  # A negative choice is a row of zeros.
    return jnp.einsum("etd,tke,tk->td", results, chosen, gate)


def choices(name: str) -> jax.Array:
    choice = np.argsort(np.asarray(normal(TOKENS, EXPERTS)), axis=1)[:, :K]
    if name == "one expert for all":
        choice[:, 0], choice[:, 1] = 3, 1
    if name == "dropped":
        choice[::3, 0] = -1
        choice[::6] = -1
    if name == "all dropped":
        choice[:] = -1
    return jnp.asarray(choice, jnp.int32)


def both(function):
    """The value and the gradients of a sum over experts."""

    @jax.jit
    def run(choice, *given):
        value, pull = jax.vjp(lambda w, x, g: function(w, x, choice, g), *given)
        return value, pull(COTANGENT.astype(value.dtype))

    return run


ALL_EXPERTS = both(dense)


@pytest.mark.parametrize("name", ["mixed", "dropped"])
def test_as_one_equation_they_have_the_same_gradients_to_the_bit(name):
    """Then a program may read the chosen ones alone. One token chooses few of them."""
    given = choices(name)[:1], WEIGHTS, X[:1], GATE[:1]

    def pulled(function):
        value, pull = jax.vjp(lambda w, x, g: function(w, x, given[0], g), *given[1:])
        return value, pull(COTANGENT[:1])

    def in_trace(mark):
        run = mark(lambda *_: pulled(functools.partial(experts, gated_mlp)))
        return str(jax.make_jaxpr(run)()), jax.jit(run)()

    names, found = in_trace(on_demand)
    assert "chosen_experts" in names
    chex.assert_trees_all_equal(found, in_trace(lambda run: run)[1])


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("mixed", None),
        ("one expert for all", 7),
        ("dropped", 1),
        ("all dropped", None),
    ],
)
def test_values_and_gradients_are_those_of_all_experts(name: str, block: int) -> None:
    choice = choices(name)
    in_blocks = functools.partial(experts, gated_mlp, block=block)
    found = both(in_blocks)(choice, WEIGHTS, X, GATE)
    wanted = ALL_EXPERTS(choice, WEIGHTS, X, GATE)
    chex.assert_trees_all_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_bfloat16_keeps_its_dtypes_and_sums_in_float32() -> None:
    cast = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
    choice = choices("mixed")
    in_blocks = functools.partial(experts, gated_mlp)
    found = both(in_blocks)(choice, cast(WEIGHTS), cast(X), GATE)
    wanted = ALL_EXPERTS(choice, WEIGHTS, X, GATE)
    value, (weights, x, _) = found
    dtypes = {a.dtype for a in jax.tree.leaves((value, weights, x))}
    assert dtypes == {jnp.dtype("bfloat16")}
    for one, exact in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        # Two roundings to 8 bits in each of three products: a few percent of the
        # largest entry.
        scale = float(jnp.abs(exact).max())
        assert float(jnp.abs(one.astype(jnp.float32) - exact).max()) < 0.06 * scale


def test_only_one_block_is_held() -> None:
    many = 4096
    x = jax.ShapeDtypeStruct((many, DIM), jnp.float32)
    choice = jax.ShapeDtypeStruct((many, K), jnp.int32)
    gate = jax.ShapeDtypeStruct((many, K), jnp.float32)

    def total(w, x, g, choice):
        return jnp.sum(experts(gated_mlp, w, x, choice, g, block=64) ** 2)

    lowered = jax.jit(jax.grad(total, (0, 1, 2))).lower(WEIGHTS, x, gate, choice)
    held = lowered.compile().memory_analysis().temp_size_in_bytes
    # All experts on all tokens: results, and three hidden values, of each expert.
    assert held * EXPERTS < 4 * EXPERTS * many * (DIM + 3 * HIDDEN)


@pytest.mark.parametrize(
    ("routes", "num_experts", "block"),
    [(4096, 8, 128), (64, 8, 8), (80, 8, 16), (3, 8, 8)],
)
def test_a_block_is_no_larger_than_an_expert_s_share(routes, num_experts, block):
    assert default_block(routes, num_experts) == block


CHOICE = choices("mixed")
WRONG = [
    {"stacked_weights": {}},
    {"stacked_weights": {**WEIGHTS, "bias": jnp.zeros((4, DIM))}},
    {"x": X[None]},
    {"choice": CHOICE[:, :1]},
    {"x": X[:7]},
    {"choice": CHOICE.astype(jnp.uint8)},
    {"function": lambda weights, rows: rows @ weights["up"]},
    {"block": 0},
    {"splits": 0},
    {"splits": 2},
]


def test_what_does_not_fit_is_refused_by_name(golden) -> None:
    good = {"stacked_weights": WEIGHTS, "x": X, "choice": CHOICE, "gate": GATE}
    sentences = []
    for change in WRONG:
        with pytest.raises(ValueError) as raised:
            experts(**{"function": gated_mlp, **good, **change})
        sentences.append(f"{', '.join(change)}: {raised.value}")
    golden.check("experts.txt", "\n".join(sentences))
