"""Routers: DeepSeek's, its bias, expert choice, groups, draws, and what is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.moe import Router, balanced_bias, expert_choice, sigmoid_top_k
from zinf.moe.gating import NO_EXPERT

TOKENS, EXPERTS, DIM, K = 24, 8, 8, 3
GROUPS, LIMITED, SCALE = 4, 2, 2.5
random = np.random.default_rng(0)
LOGITS = random.standard_normal((TOKENS, EXPERTS), np.float32)
BIAS = random.standard_normal(EXPERTS).astype(np.float32) * 0.3
KERNEL = random.standard_normal((DIM, EXPERTS), np.float32)
X = random.standard_normal((TOKENS, DIM), np.float32)


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


def test_gates_of_a_sigmoid_router_are_those_of_the_paper():
    routing = sigmoid_top_k(
        LOGITS,
        K,
        bias_E=jnp.asarray(BIAS),
        num_groups=GROUPS,
        num_limited_groups=LIMITED,
        scale=SCALE,
    )
    chosen = jax.nn.one_hot(routing.choice, EXPERTS)
    found = np.einsum("tke,tk->te", chosen, routing.gate)
    wanted = np.stack([by_hand(row) for row in LOGITS])
    # Sums and quotients of float32.
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
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

    bias, first = step(jnp.zeros(EXPERTS))
    for _ in range(60):
        bias, counts = step(bias)
    even = TOKENS * 2 / EXPERTS
    assert int(first.max()) == TOKENS  # Every token has expert 0.
    # The bias moves on by its rate, so counts stay near the mean, within two tokens.
    assert np.abs(np.asarray(counts) - even).max() <= 2
    gates = jax.jit(jax.grad(lambda b: sigmoid_top_k(skewed, 2, bias_E=b).gate.sum()))
    chex.assert_trees_all_equal(gates(bias), jnp.zeros(EXPERTS))


def test_an_expert_that_chooses_takes_its_likeliest_tokens():
    routing = expert_choice(LOGITS, capacity=5)
    choice, gate = map(np.asarray, (routing.choice, routing.gate))
    probabilities = np.asarray(jax.nn.softmax(LOGITS, axis=1))
    for expert in range(EXPERTS):
        best = set(np.argsort(-probabilities[:, expert])[:5])
        found = np.flatnonzero(choice[:, expert] == expert)
        assert set(found) == best
        np.testing.assert_array_equal(gate[found, expert], probabilities[found, expert])
    assert set(np.unique(choice)) == {NO_EXPERT, *range(EXPERTS)}
    np.testing.assert_array_equal(routing.counts, [5] * EXPERTS)


def routed(router, kernel=KERNEL, x=X, **options):
    return jax.jit(lambda kernel, x: router(kernel, x, **options))(kernel, x)


def test_capacity_is_counted_per_routing_group_and_by_its_own_factor():
    kernel = np.zeros((DIM, EXPERTS), np.float32)
    kernel[0, 1] = 5.0  # Every token wants expert 1.
    x = np.ones((TOKENS, DIM), np.float32)
    options = {
        "num_experts": EXPERTS,
        "min_capacity": 0,
        "capacity_factor": 2.0,
        "use_rts": False,
    }

    def kept(train=True, **more):
        routing = routed(Router(**options, **more), kernel, x, train=train)
        kept = np.flatnonzero(np.asarray(routing.choice[:, 0]) != NO_EXPERT)
        assert float(routing.dropped) == pytest.approx(1 - len(kept) / TOKENS)
        return kept.tolist()

    # Of each group of 8 the first 2 * 8 / 8 tokens are kept.
    assert kept(group_size=8) == [0, 1, 8, 9, 16, 17]
    assert kept() == [*range(2 * TOKENS // EXPERTS)]
    # Outside training the factor is 1, or 8.
    assert kept(train=False) == [*range(TOKENS // EXPERTS)]
    assert kept(train=False, eval_capacity_factor=8.0) == [*range(TOKENS)]
    assert kept(drop_tokens=False) == [*range(TOKENS)]


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1, "capacity_factor": 0.5},
        {"k": 1, "noisy_gate_policy": "RSample", "use_rts": False},
        {"k": 2},
        {"k": 3, "noisy_gate_policy": "Jitter"},
    ],
)
def test_routes_depend_on_the_key_alone_and_only_in_training(options: dict) -> None:
    router = Router(num_experts=EXPERTS, min_capacity=0, **options)
    assert router.needs_key

    def run(key, train):
        routing = router(KERNEL, X, key=key, train=train)
        return routing.choice, routing.gate

    run = jax.jit(run, static_argnums=1)
    first, again, other = (run(jax.random.key(i), True) for i in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(first[1], other[1])
    evaluated = (run(jax.random.key(i), False) for i in (0, 1))
    chex.assert_trees_all_equal(*evaluated)


def test_a_router_that_draws_nothing_needs_no_key() -> None:
    silent = [
        {"k": 1, "use_rts": False},
        {"k": 1, "drop_tokens": False},
        {"k": 2, "top2_2nd_expert_sampling": False},
        {"k": 3},
        {"k": 1, "score_func": "sigmoid"},
        {"k": 2, "expert_choice": True, "may_see_later_tokens": True},
    ]
    for options in silent:
        assert not Router(num_experts=EXPERTS, **options).needs_key


SIGMOID = {"score_func": "sigmoid", "num_expert_groups": 4}
CHOOSING = {"expert_choice": True, "may_see_later_tokens": True}
OPTIONS = [
    {"num_experts": 0},
    {"k": 9},
    {"k": 0},
    {"capacity_factor": 0},
    {"eval_capacity_factor": 0},
    {"min_capacity": -1},
    {"noisy_gate_policy": "jitter"},
    {"drop_policy": "random"},
    {"k": 2, "noisy_gate_policy": "RSample"},
    {"group_size": 0},
    {"expert_choice": True},
    {**CHOOSING, "drop_tokens": False},
    {**CHOOSING, "score_func": "sigmoid"},
    {"route_scale": 2.0},
    {"route_norm": False},
    {"score_func": "tanh"},
    {**SIGMOID, "num_expert_groups": 3},
    {**SIGMOID, "num_limited_groups": 5},
    {**SIGMOID, "num_limited_groups": 1, "k": 3},
]
CALLS = [
    ({"use_rts": True}, {}),
    ({"group_size": 7}, {}),
    ({"min_capacity": 25}, {}),
    ({}, {"x_TD": X[:, :3]}),
    ({}, {"bias_E": BIAS}),
]


def test_options_and_calls_that_contradict_each_other_are_refused(golden):
    sentences = []
    for options in OPTIONS:
        with pytest.raises(ValueError) as raised:
            Router(**{"num_experts": EXPERTS, **options})
        sentences.append(f"{', '.join(options)}: {raised.value}")
    for options, changes in CALLS:
        router = Router(**{"num_experts": EXPERTS, "use_rts": False, **options})
        with pytest.raises(ValueError) as raised:
            router(**{"kernel_DE": KERNEL, "x_TD": X, **changes})
        sentences.append(f"call: {raised.value}")
    # The limits themselves are allowed.
    Router(num_experts=EXPERTS, k=EXPERTS, min_capacity=0, group_size=1)
    Router(num_experts=EXPERTS, **SIGMOID, num_limited_groups=1, k=2)
    golden.check("router.txt", "\n".join(sentences))
