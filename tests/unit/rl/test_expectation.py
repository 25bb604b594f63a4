"""Expected gradients over all texts are those of the expected reward.

A model of three words writes texts of at most two, and the word 0 ends a text: there
are seven texts, so expectations are sums over all of them, and nothing is sampled.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core import rl

END, WORDS, LENGTH = 0, 3, 2
TEXTS = [[END], *([a, b] for a in (1, 2) for b in range(WORDS))]
PROMPT = [1]
TOKENS, MASK = rl.token_rows([PROMPT] * len(TEXTS), TEXTS, len(PROMPT) + LENGTH)
RANDOM = np.random.default_rng(0)
REWARDS = RANDOM.normal(size=len(TEXTS))
# Logits of the first word, and of the second one after each first.
THETA = {
    "first": jnp.float32(RANDOM.normal(size=WORDS)),
    "second": jnp.float32(RANDOM.normal(size=(WORDS, WORDS))),
}
REFERENCE = jax.tree.map(lambda x: x + jnp.float32(RANDOM.normal(size=x.shape)), THETA)
GROUP, BETA = 2, 0.3


def logits_of(theta) -> jax.Array:
    """(texts, 2, words)."""
    first = jnp.broadcast_to(theta["first"], (len(TEXTS), WORDS))
    return jnp.stack([first, theta["second"][TOKENS[:, 1]]], axis=1)


def logps_of(theta) -> jax.Array:
    return rl.token_scores(logits_of(theta), TOKENS[:, 1:])[0]


def probabilities(theta) -> jax.Array:
    return jnp.exp(jnp.sum(logps_of(theta) * MASK, axis=1))


def expected_reward(theta, beta: float = 0.0) -> jax.Array:
    """The expected reward, less `beta` times the KL divergence from the reference."""
    difference = logps_of(theta) - logps_of(REFERENCE)
    rewards = REWARDS - beta * jnp.sum(difference * MASK, axis=1)
    return jnp.sum(probabilities(theta) * rewards)


OLD, REF = (np.asarray(logps_of(x)) for x in (THETA, REFERENCE))


def expected_gradient(loss_fn, texts: np.ndarray, advantages, loss_type: str, **extra):
    """The gradient of the loss of each group, weighted by the group's probability.

    Args:
        texts: numbers of texts, (groups, rows).
        advantages: (groups, rows) or (groups, rows, 2).
    """
    shape = (*texts.shape, LENGTH)
    weights, denominators = rl.token_weights(
        MASK[texts].reshape(-1, LENGTH), loss_type, max_completion_length=1
    )
    advantages = np.asarray(advantages).reshape(*texts.shape, -1)
    batch = {
        "weights": weights.reshape(shape),
        "denominators": denominators.reshape(texts.shape),
        "advantages": np.broadcast_to(advantages, shape),
        "old_logps": OLD[texts],
        "ref_logps": REF[texts],
        **{name: x[texts] for name, x in extra.items()},
    }
    batch = {name: jnp.float32(x) for name, x in batch.items()}
    chances = np.asarray(probabilities(THETA))[texts].prod(axis=1)

    def loss(theta) -> jax.Array:
        logps = logps_of(theta)[texts]
        losses = jax.vmap(lambda logps, batch: loss_fn(logps, batch)[0].mean)
        return jnp.sum(chances * losses(logps, batch))

    return jax.grad(loss)(THETA)


def assert_close(found, expected) -> None:
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6)


PAIRS = np.array(list(product(range(len(TEXTS)), repeat=GROUP)))


def test_the_texts_are_all_texts():
    assert float(jnp.sum(probabilities(THETA))) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_rloo_is_unbiased(beta):
    """Also with the KL divergence in the reward."""
    rewards = rl.with_kl(REWARDS, OLD, REF, MASK, beta)
    advantages = rl.rloo_advantages(rewards[PAIRS].reshape(-1), GROUP)
    loss_fn = rl.PolicyLoss("grpo", "sequence_product")
    found = expected_gradient(loss_fn, PAIRS, advantages, "grpo")
    expected = jax.grad(lambda theta: -expected_reward(theta, beta))(THETA)
    assert_close(found, expected)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "luspo"])
def test_grpo_without_scaling_is_unbiased(loss_type):
    """Up to (G - 1) / G: each reward is in the mean that it is compared with.

    That holds where tokens are summed. A mean over tokens prefers short texts.
    """
    advantages = rl.grpo_advantages(REWARDS[PAIRS].reshape(-1), GROUP, "none")
    found = expected_gradient(rl.PolicyLoss(loss_type), PAIRS, advantages, loss_type)
    share = (GROUP - 1) / GROUP
    expected = jax.grad(lambda theta: -share * expected_reward(theta))(THETA)
    assert_close(found, expected)
    means = expected_gradient(rl.PolicyLoss("grpo"), PAIRS, advantages, "grpo")
    with pytest.raises(AssertionError):
        assert_close(means, expected)


def values_of_states() -> np.ndarray:
    """The expected reward before each token, (texts, 2)."""
    chances = np.asarray(probabilities(THETA))
    first = TOKENS[:, 1]
    after = [np.average(REWARDS, weights=chances * (first == x)) for x in first]
    before = np.full(len(TEXTS), float(np.sum(chances * REWARDS)))
    return np.stack([before, np.array(after)], axis=1)


@pytest.mark.parametrize(
    ("values", "lam"),
    [(RANDOM.normal(size=(1, LENGTH)), 1.0), (values_of_states(), 0.6)],
)
def test_ppo_is_unbiased_at_ratio_one(values, lam):
    """With any values if lambda is 1, and with the true ones for any lambda."""
    rewards = rl.token_rewards(REWARDS, OLD, REF, MASK, kl_coef=0.0)
    values = np.broadcast_to(values, MASK.shape)
    advantages, returns = rl.generalized_advantages(rewards, values, MASK, lam=lam)
    np.testing.assert_allclose(returns, (advantages + values) * MASK)
    single = np.arange(len(TEXTS))[:, None]
    found = expected_gradient(rl.PolicyLoss(), single, advantages[:, None], "luspo")
    expected = jax.grad(lambda theta: -expected_reward(theta))(THETA)
    assert_close(found, expected)


def test_the_correction_of_the_divergence_makes_its_gradient_exact():
    """With it: of the divergence after each beginning of a text; without it: not."""

    def divergence(theta) -> jax.Array:
        kinds = [jax.nn.log_softmax(logits_of(x)) for x in (theta, REFERENCE)]
        of_tokens = jnp.sum(jnp.exp(kinds[0]) * (kinds[0] - kinds[1]), axis=-1)
        # Probabilities of beginnings are those of sampling.
        return BETA * jnp.sum(probabilities(THETA)[:, None] * of_tokens * MASK)

    single, expected = np.arange(len(TEXTS))[:, None], jax.grad(divergence)(THETA)
    zero = np.zeros((len(TEXTS), 1))
    for is_corrected in (True, False):
        loss_fn = rl.PolicyLoss(beta=BETA, use_bias_correction_kl=is_corrected)
        found = expected_gradient(loss_fn, single, zero, "luspo")
        if is_corrected:
            assert_close(found, expected)
        else:
            with pytest.raises(AssertionError):
                assert_close(found, expected)


def test_a_teacher_gives_the_gradient_of_the_divergence_of_tokens():
    """The reverse one, after each beginning of a text as it is drawn."""

    def divergence(theta) -> jax.Array:
        kinds = [jax.nn.log_softmax(logits_of(x)) for x in (theta, REFERENCE)]
        of_tokens = jnp.sum(jnp.exp(kinds[0]) * (kinds[0] - kinds[1]), axis=-1)
        return jnp.sum(probabilities(THETA)[:, None] * of_tokens * MASK)

    single, gains = np.arange(len(TEXTS))[:, None], (REF - OLD) * MASK
    found = expected_gradient(rl.PolicyLoss(), single, gains[:, None], "luspo")
    assert_close(found, jax.grad(divergence)(THETA))


def test_drawing_with_temperature_is_corrected_by_dividing_logits():
    """The trap: ratios of plain logits are not 1 where nothing was trained."""
    temperature, logits = 0.7, logits_of(THETA)
    drawn = jax.nn.log_softmax(logits / temperature)
    old = jnp.take_along_axis(drawn, TOKENS[:, 1:, None], axis=-1)[..., 0]
    scores, entropies = rl.token_scores(logits, TOKENS[:, 1:], temperature=temperature)
    np.testing.assert_allclose(scores, old, atol=1e-6)
    np.testing.assert_allclose(
        entropies, -jnp.sum(jnp.exp(drawn) * drawn, axis=-1), atol=1e-6
    )
    plain, _ = rl.token_scores(logits, TOKENS[:, 1:])
    assert np.abs(np.exp(plain - old) - 1).max() > 0.1
