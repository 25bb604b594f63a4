"""Batches from rewards: no mean depends on their parts, and bad input is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core import rl
from zinf.core.problem.weighted import Weighted

ROWS, TOKENS = 8, 6
LENGTHS = (6, 1, 4, 0, 2, 3, 6, 2)
MASK = np.float32(np.arange(TOKENS) < np.array(LENGTHS)[:, None])
SEQUENCES = [level for level in rl.LEVELS if level != "token"]
LOSSES = [
    *((loss_type, "token") for loss_type in rl.LOSS_TYPES),
    *(("grpo", level) for level in SEQUENCES),
]


def drawn(seed: int) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).normal(size=(ROWS, TOKENS)) / 3)


def batch_of(loss_type: str) -> dict[str, np.ndarray]:
    weights, denominators = rl.token_weights(
        MASK, loss_type, max_completion_length=TOKENS
    )
    return {
        "weights": weights,
        "denominators": denominators,
        "advantages": 3 * drawn(2) * MASK,
        "old_logps": drawn(3),
        "ref_logps": drawn(4),
    }


def summed(loss_fn, logps, batch, parts) -> tuple[float, jax.Array, dict[str, float]]:
    """Loss, gradient and metrics of a step whose microbatches are parts of its rows."""

    def total(logps):
        results = [
            loss_fn(logps[part], {n: x[part] for n, x in batch.items()})
            for part in parts
        ]
        loss = sum(x.total for x, _ in results) / sum(x.weight for x, _ in results)
        return loss, jax.tree.map(lambda *x: jnp.stack(x), *[aux for _, aux in results])

    (loss, aux), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logps))
    return float(loss), grad, rl.metric_values(aux)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_no_mean_depends_on_microbatches(loss_type, level):
    """The trap: a mean over each microbatch gives tokens of short ones more weight."""
    loss_fn = rl.PolicyLoss(loss_type, level, beta=0.1)
    batch, logps = batch_of(loss_type), drawn(1)
    whole = summed(loss_fn, logps, batch, [slice(None)])
    parts = [slice(0, 2), slice(2, 8)]
    loss, grad, metrics = summed(loss_fn, logps, batch, parts)
    assert loss == pytest.approx(whole[0], rel=1e-5)
    np.testing.assert_allclose(grad, whole[1], atol=1e-6)
    assert metrics == pytest.approx(whole[2], rel=1e-5)
    means = [
        loss_fn(logps[part], {n: x[part] for n, x in batch.items()})[0].mean
        for part in parts
    ]
    if loss_type == "bnpo":
        assert float(np.mean(means)) != pytest.approx(whole[0], rel=0.01)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_no_mean_depends_on_packing(loss_type, level):
    """Two samples in a row are as one in each of two rows, ratios of sequences too."""
    loss_fn = rl.PolicyLoss(loss_type, level, beta=0.1)
    batch, logps = batch_of(loss_type), drawn(1)
    expected = summed(loss_fn, logps, batch, [slice(None)])
    packed = {
        name: x.reshape(ROWS // 2, 2, -1).sum(1)[:, 0]
        if name == "denominators"
        else x.reshape(ROWS // 2, -1)
        for name, x in batch.items()
    }
    numbers = np.repeat([[1, 2]], TOKENS, axis=1)
    packed["segment_ids"] = np.broadcast_to(numbers, (ROWS // 2, 2 * TOKENS))
    loss, grad, metrics = summed(
        loss_fn, logps.reshape(ROWS // 2, -1), packed, [slice(None)]
    )
    assert loss == pytest.approx(expected[0], rel=1e-5)
    np.testing.assert_allclose(grad.reshape(logps.shape), expected[1], atol=1e-6)
    assert metrics == pytest.approx(expected[2], rel=1e-5)


def test_what_is_out_of_the_mask_changes_nothing():
    """Padding may have any log-probability, also none that is finite."""
    loss_fn, batch = rl.PolicyLoss("grpo", "sequence", beta=0.1), batch_of("grpo")
    expected = summed(loss_fn, drawn(1), batch, [slice(None)])
    wild = {n: np.where(MASK, x, np.nan) for n, x in batch.items() if "logps" in n}
    logps = np.where(MASK, drawn(1), -np.inf)
    loss, grad, metrics = summed(loss_fn, logps, batch | wild, [slice(None)])
    assert (loss, metrics) == (expected[0], expected[2])
    np.testing.assert_array_equal(grad, expected[1])


END, OTHER_END = 9, 8


def test_a_mask_has_the_tokens_of_the_model_and_no_other():
    """The traps: padding that is an end token, results of tools, and one place off."""
    prompts, completions = [[1, 2], [3]], [[4, END], [5, 6, 7, 4]]
    own = [[1, 1], [1, 0, 0, 1]]
    tokens, mask = rl.token_rows(prompts, completions, 6, padding=END, own=own)
    assert tokens.tolist() == [[1, 2, 4, END, END, END], [3, 5, 6, 7, 4, END]]
    # Entry t is that of token t + 1: the end token is the model's, padding is not.
    assert [row[1:][m == 1].tolist() for row, m in zip(tokens, mask, strict=True)] == [
        [4, END],
        [5, 4],
    ]


def test_any_end_token_ends_a_completion():
    """The trap: with one of several end tokens most texts count as cut off."""
    completions = [[1, END], [1, OTHER_END], [1, 2], [END, 1], []]
    cut = rl.is_truncated(completions, (END, OTHER_END))
    assert cut.tolist() == [False, False, True, True, False]
    _, mask = rl.token_rows([[1]] * 5, completions, 4, kept=~cut)
    assert mask.sum(1).tolist() == [2, 2, 0, 0, 0]


def test_rewards_that_are_missing_are_left_out_and_bad_ones_are_told():
    rewards, wrong = rl.as_rewards("f", [1, None, float("nan"), True, np.inf], 5)
    np.testing.assert_array_equal(rewards, [1, np.nan, np.nan, 1, np.nan])
    assert wrong == (2, 4)
    advantages = rl.grpo_advantages([1, 0, np.nan, 4, np.nan, np.nan], 2, "none")
    assert advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]
    metrics = rl.reward_metrics({"f": np.array([1.0, 1, 0, 2])}, np.ones(4), 2)
    assert metrics["frac_reward_zero_std"] == 1
    assert metrics["rewards/f/mean"] == 1


def test_tokens_of_tools_are_no_steps_of_the_policy():
    """Advantages over time pass them, as if they were not there."""
    mask = np.array([[1, 0, 0, 1, 1]])
    rewards, values = np.array([[1.0, 9, 9, 2, 3]]), np.array([[0.5, 9, 9, 1, 2]])
    found = rl.generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    own = mask[0] == 1
    expected = rl.generalized_advantages(
        rewards[:, own], values[:, own], mask[:, own], gamma=0.9, lam=0.8
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x[:, own], y)
        assert not x[:, ~own].any()


def test_metrics_of_nothing_are_left_out():
    aux = {"a": Weighted(np.zeros(2), np.zeros(2)), "b_min": np.array([np.inf, np.inf])}
    assert rl.metric_values({**aux, "c_max": np.array([1.0, 3.0])}) == {"c_max": 3.0}


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_penalty_of_a_token_is_the_estimate_of_its_divergence(estimator):
    """Schulman's estimators, http://joschu.net/blog/kl-approx.html."""
    logps, ref_logps = np.log([[0.5, 0.2]]), np.log([[0.25, 0.3]])
    ratio = np.array([[0.5, 1.5]])
    expected = {"k1": -np.log(ratio), "k3": ratio - 1 - np.log(ratio)}[estimator]
    named = {"kl_coef": 0.1, "kl_estimator": estimator}
    found = rl.token_rewards([0.0], logps, ref_logps, np.ones((1, 2)), **named)
    np.testing.assert_allclose(found, -0.1 * expected, rtol=1e-12)


ONES = np.ones((2, 3))
REFUSED = {
    "'f' returned 2; it must return a list of 3": lambda: rl.as_rewards("f", [1, 2], 3),
    "'f' returned a int": lambda: rl.as_rewards("f", 1, 3),
    "'f' returned 'good' for completion 1": lambda: rl.as_rewards("f", [1, "good"], 2),
    "f, g left out all 2 completions": lambda: rl.combined(
        {"f": np.full(2, np.nan), "g": np.full(2, np.nan)}
    ),
    "There is no reward function": lambda: rl.combined({}),
    "reward_weights has 2 numbers for 1 reward": lambda: rl.combined(
        {"f": np.ones(2)}, [1, 2]
    ),
    "not finite: [nan]": lambda: rl.combined({"f": np.ones(2)}, [np.nan]),
    "num_generations is 1": lambda: rl.grpo_advantages(np.ones(2), 1),
    "num_generations is 1:": lambda: rl.rloo_advantages(np.ones(2), 1),
    "3 rewards are not groups of 2": lambda: rl.grpo_advantages(np.ones(3), 2),
    "reward of completion 1 is inf": lambda: rl.rloo_advantages([1, np.inf], 2),
    "scale_rewards is 'all'": lambda: rl.grpo_advantages(np.ones(2), 2, "all"),
    "loss_type is 'ppo'; it is one of grpo": lambda: rl.token_weights(ONES, "ppo"),
    "divides by max_completion_length": lambda: rl.token_weights(ONES, "dr_grpo"),
    "Row 1 has 2 tokens of prompt and 2 of completion": lambda: rl.token_rows(
        [[1], [1, 2]], [[1], [1, 2]], 3
    ),
    "Row 0 has 0 tokens of prompt": lambda: rl.token_rows([[]], [[1]], 3),
    "2 prompts have 1 completions": lambda: rl.token_rows([[1], [1]], [[1]], 3),
    "`own` marks 2 of them": lambda: rl.token_rows([[1]], [[1]], 3, own=[[1, 0]]),
    "importance correction is 'mask'": lambda: rl.importance_correction(
        ONES, ONES, ONES, "mask"
    ),
    "top_entropy_quantile is 0": lambda: rl.entropy_mask(ONES, ONES, 0),
    "importance_sampling_level is 'word'": lambda: rl.PolicyLoss("grpo", "word"),
    "none may be negative": lambda: rl.PolicyLoss(beta=-1),
    "delta is 1.1; it has to be over": lambda: rl.PolicyLoss(delta=1.1),
    "temperatures of sapo are (0,": lambda: rl.PolicyLoss(sapo_temperature_pos=0),
    "vespo has ratios of sequences": lambda: rl.PolicyLoss("vespo", "sequence"),
    "Row 1 has the score nan": lambda: rl.token_rewards(
        [1, np.nan], ONES, ONES, ONES, kl_coef=0.1
    ),
    "kl_estimator is 'k2'": lambda: rl.token_rewards(
        [1, 1], ONES, ONES, ONES, kl_coef=0.1, kl_estimator="k2"
    ),
    "1 tokens have no standard deviation": lambda: rl.whitened(
        ONES, np.eye(2, 3) * [1, 0, 0]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_by_name(message):
    with pytest.raises(ValueError) as refusal:
        REFUSED[message]()
    assert message in str(refusal.value)
