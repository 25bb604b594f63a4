"""DeepSeek's router, its bias, and expert choice."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import zinf
import zinf.nnx
from zinf.moe import (
    MoE,
    Router,
    RouterBias,
    balanced_bias,
    expert_choice,
    sigmoid_top_k,
)
from zinf.moe.gating import NO_EXPERT
from zinf.moe.linen import MoE as LinenMoE

TOKENS, EXPERTS, DIM, K = 24, 8, 8, 3
GROUPS, LIMITED, SCALE = 4, 2, 2.5
random = np.random.default_rng(0)
LOGITS = random.standard_normal((TOKENS, EXPERTS), np.float32)
BIAS = random.standard_normal(EXPERTS).astype(np.float32) * 0.3


def by_hand(logits: np.ndarray) -> np.ndarray:
    """The gates of one token, as the paper's equations 12 to 16 say."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    biased = scores + BIAS
    in_groups = biased.reshape(GROUPS, -1)
    values = np.sort(in_groups, axis=1)[:, -2:].sum(1)
    best = np.argsort(-values)[:LIMITED]
    size = EXPERTS // GROUPS
    is_open = [e for e in range(EXPERTS) if e // size in best]
    chosen = sorted(is_open, key=lambda e: -biased[e])[:K]
    gates = np.zeros(EXPERTS)
    gates[chosen] = scores[chosen] / scores[chosen].sum() * SCALE
    return gates


def dense(routing) -> np.ndarray:
    chosen = jax.nn.one_hot(routing.choice, EXPERTS)
    return np.einsum("tke,tk->te", chosen, routing.gate)


def test_gates_of_a_sigmoid_router_are_those_of_the_paper():
    routing = sigmoid_top_k(
        LOGITS,
        K,
        bias_E=jnp.asarray(BIAS),
        num_groups=GROUPS,
        num_limited_groups=LIMITED,
        scale=SCALE,
    )
    wanted = np.stack([by_hand(row) for row in LOGITS])
    # Sums and quotients of float32.
    np.testing.assert_allclose(dense(routing), wanted, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(routing.counts, (wanted > 0).sum(0))


def test_equal_experts_have_a_balancing_loss_of_one():
    logits = jnp.eye(EXPERTS)  # Each expert is the best of one token.
    assert float(sigmoid_top_k(logits, 1).aux_loss) == pytest.approx(1.0, rel=1e-6)
    skewed = logits.at[:, 0].set(3.0)
    assert float(sigmoid_top_k(skewed, 1).aux_loss) > 1.5


def test_a_bias_balances_experts_and_has_no_gradient():
    skewed = jnp.asarray(LOGITS).at[:, 0].add(6.0)

    @jax.jit
    def step(bias):
        routing = sigmoid_top_k(skewed, 2, bias_E=bias)
        return balanced_bias(bias, routing.counts, 0.02), routing.counts

    bias = jnp.zeros(EXPERTS)
    first = None
    for _ in range(60):
        bias, counts = step(bias)
        first = counts if first is None else first
    even = TOKENS * 2 / EXPERTS
    assert int(first.max()) == TOKENS  # Every token has expert 0.
    # The bias moves on by its rate, so counts stay near the mean, within two tokens.
    assert np.abs(np.asarray(counts) - even).max() <= 2
    gradient = jax.grad(lambda b: sigmoid_top_k(skewed, 2, bias_E=b).gate.sum())(bias)
    chex.assert_trees_all_equal(gradient, jnp.zeros(EXPERTS))


def test_an_expert_that_chooses_takes_its_likeliest_tokens():
    routing = expert_choice(LOGITS, capacity=5)
    probabilities = np.asarray(jax.nn.softmax(LOGITS, axis=1))
    for expert in range(EXPERTS):
        best = set(np.argsort(-probabilities[:, expert])[:5])
        found = np.flatnonzero(np.asarray(routing.choice[:, expert]) == expert)
        assert set(found) == best
        np.testing.assert_array_equal(
            routing.gate[found, expert], probabilities[found, expert]
        )
    assert set(np.unique(routing.choice)) == {NO_EXPERT, *range(EXPERTS)}
    np.testing.assert_array_equal(routing.counts, [5] * EXPERTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_choice": True}, "may_see_later_tokens=True"),
        (
            {
                "expert_choice": True,
                "may_see_later_tokens": True,
                "drop_tokens": False,
            },
            "Leave out",
        ),
        ({"route_scale": 2.0}, 'options of score_func="sigmoid"'),
        ({"score_func": "tanh"}, "score_func is 'tanh'"),
        ({"score_func": "sigmoid", "num_expert_groups": 3}, "num_expert_groups is 3"),
        (
            {
                "score_func": "sigmoid",
                "num_expert_groups": 4,
                "num_limited_groups": 5,
            },
            "num_limited_groups is 5",
        ),
        (
            {
                "score_func": "sigmoid",
                "num_expert_groups": 4,
                "num_limited_groups": 1,
            },
            "1 of 4 groups have 2 experts",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Router(num_experts=EXPERTS, k=K, **options)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(DIM, 12, rngs=rngs)
        self.down = nnx.Linear(12, DIM, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(rows)))


def layer(**options) -> MoE:
    named = {"k": 2, "score_func": "sigmoid", "drop_tokens": False} | options
    return MoE(DIM, Mlp, EXPERTS, rngs=nnx.Rngs(0), **named)


def test_a_bias_that_nothing_reads_is_refused():
    with pytest.raises(ValueError, match="load_balance_coeff moves a bias"):
        layer(score_func="softmax", load_balance_coeff=0.01)


@pytest.mark.slow
def test_linen_keeps_the_bias_as_state():
    class LinenMlp(nn.Module):
        @nn.compact
        def __call__(self, rows: jax.Array) -> jax.Array:
            return nn.Dense(DIM)(nn.gelu(nn.Dense(12)(rows)))

    router = Router(num_experts=EXPERTS, k=2, score_func="sigmoid", drop_tokens=False)
    moe = LinenMoE(LinenMlp(), router, load_balance_coeff=0.01)
    x = jnp.asarray(random.standard_normal((TOKENS, DIM), np.float32))
    variables = moe.init(jax.random.key(0), x)
    assert not variables["router_state"]["router_bias"].any()
    mixed, changed = moe.apply(variables, x, mutable="router_state")
    wanted = balanced_bias(jnp.zeros(EXPERTS), mixed.counts, 0.01)
    np.testing.assert_array_equal(changed["router_state"]["router_bias"], wanted)
    moe.apply(variables, x, deterministic=True)  # Changes no state.


@pytest.mark.slow
@pytest.mark.parametrize("num_expert", [1, 4])
def test_the_bias_of_a_trained_module_is_state_on_any_mesh(num_expert):
    batches = random.standard_normal((3, 16, 4, DIM), np.float32)

    def train(num_devices: int, num_expert: int):
        mesh = zinf.make_mesh(jax.devices()[:num_devices], num_expert=num_expert)
        module = layer(load_balance_coeff=0.01)
        engine = zinf.nnx.initialize(
            lambda module, batch: jnp.mean((module(batch).output - batch) ** 2),
            module,
            optax.adamw(1e-2),
            {"zero_optimization": {"stage": 2}, "persistence_threshold": 1},
            mesh=mesh,
        )
        losses = [engine.step(batch)["loss"] for batch in batches]
        engine.evaluate(batches[0])
        trained = engine.update_module()
        engine.close()
        assert isinstance(trained.router_bias, RouterBias)
        return losses, np.asarray(trained.router_bias[...])

    expected, found = train(1, 1), train(8, num_expert)
    np.testing.assert_allclose(found[0], expected[0], rtol=16 * 2.0**-23)
    np.testing.assert_array_equal(found[1], expected[1])
    # Three steps of 0.01, up, down or none.
    assert np.abs(found[1]).max() <= 0.03 + 1e-6
    assert found[1].any()
