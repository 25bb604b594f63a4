"""PPO: rewards of tokens, advantages over time, and the loss of the critic.

Rewards and advantages are float64 on the host. The actor's loss is `PolicyLoss`. As
DeepSpeed-Chat and TRL compute them: https://arxiv.org/abs/1707.06347 with a KL penalty,
https://arxiv.org/abs/1909.08593.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.problem.weighted import Weighted
from zinf.core.rl.metrics import mean_over
from zinf.core.rl.policy import Batch, Metrics, PolicyLoss

KL_ESTIMATORS = ("k1", "k3")


def token_rewards(
    scores: np.ndarray,
    logps: np.ndarray,
    ref_logps: np.ndarray,
    mask: np.ndarray,
    *,
    kl_coef: float,
    clip: float | None = None,
    kl_estimator: str = "k1",
) -> np.ndarray:
    """Each token's KL penalty, and the score at the last token, (rows, tokens).

    Args:
        scores: of the completions, (rows,).
        logps, ref_logps: of the tokens, (rows, tokens).
        mask: 1 for tokens of the completion, (rows, tokens).
        kl_coef: weight of the penalty; DeepSpeed-Chat has 0.1 and TRL 0.05.
        clip: the largest absolute score; DeepSpeed-Chat has 5, TRL none.
        kl_estimator: "k1", logps - ref_logps, or "k3", which is never negative.

    Raises:
        ValueError: a score is not finite, a row has no token, or there is no such
            estimator.
    """
    is_token = np.asarray(mask) != 0
    scores = np.asarray(scores, np.float64)
    wrong = np.flatnonzero(~np.isfinite(scores) | ~is_token.any(axis=1))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"Row {row} has the score {scores[row]} and {int(is_token[row].sum())} "
            "tokens; PPO needs a finite score and a token. Leave the row out."
        )
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"kl_estimator is {kl_estimator!r}; it is one of "
            f"{', '.join(KL_ESTIMATORS)}."
        )
    difference = np.asarray(ref_logps, np.float64) - np.asarray(logps, np.float64)
    difference = np.where(is_token, difference, 0.0)
    is_k1 = kl_estimator == "k1"
    divergence = -difference if is_k1 else np.expm1(difference) - difference
    rewards = -kl_coef * divergence
    if clip is not None:
        scores = np.clip(scores, -clip, clip)
    rewards[np.arange(len(rewards)), _last(is_token)] += scores
    return rewards


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation: advantages and returns, (rows, tokens).

    https://arxiv.org/abs/1506.02438, equation 16: the sum over later tokens of
    (gamma * lam)^k * (reward + gamma * next value - value). Tokens out of the mask,
    such as results of tools between two turns, are no steps of the policy: the next
    value is that of the next token of the mask.

    Args:
        rewards: of tokens, (rows, tokens), see `token_rewards`.
        values: of the critic before each token, (rows, tokens).
        mask: 1 for tokens of the completion.
        gamma, lam: discount, and how much later values are trusted less.
    """
    is_token = np.asarray(mask) != 0
    rewards, values = (
        np.where(is_token, np.asarray(x, np.float64), 0.0) for x in (rewards, values)
    )
    advantages = np.zeros_like(values)
    next_values = next_advantages = np.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        deltas = rewards[:, t] + gamma * next_values - values[:, t]
        here = deltas + gamma * lam * next_advantages
        next_advantages = np.where(is_token[:, t], here, next_advantages)
        next_values = np.where(is_token[:, t], values[:, t], next_values)
        advantages[:, t] = np.where(is_token[:, t], here, 0.0)
    return advantages, advantages + values


def whitened(
    values: np.ndarray, mask: np.ndarray, *, shift_mean: bool = True
) -> np.ndarray:
    """Values scaled to the standard deviation 1, as TRL does, and 0 out of the mask.

    Args:
        values, mask: (rows, tokens), of the whole batch.
        shift_mean: whether their mean becomes 0; it stays if not, as for rewards.

    Raises:
        ValueError: fewer than two tokens are in the mask.
    """
    is_token = np.asarray(mask) != 0
    found = np.asarray(values, np.float64)[is_token]
    if len(found) < 2:
        raise ValueError(
            f"{len(found)} tokens have no standard deviation. Whitening needs at least "
            "two tokens in a batch."
        )
    mean = found.mean()
    scaled = (np.asarray(values, np.float64) - mean) / np.sqrt(found.var(ddof=1) + 1e-8)
    return np.where(is_token, scaled if shift_mean else scaled + mean, 0.0)


@dataclass(frozen=True)
class ValueLoss:
    """The clipped loss of a critic.

    Attributes:
        cliprange_value: how far a value may go from what it was when the batch was
            made and still be pulled by its return; None: as far as it likes.
        vf_coef: a factor of the loss, such as 0.1 in TRL.
    """

    cliprange_value: float | None = 0.2
    vf_coef: float = 1.0

    def __call__(self, values: jax.Array, batch: Batch) -> tuple[Weighted, Metrics]:
        """0.5 * max((value - return)^2, (clipped value - return)^2), and metrics.

        Args:
            values: of the critic that is trained, (rows, tokens).
            batch: `weights` and `denominators`, see `token_weights` (dapo is the mean
                over tokens); `old_values` and `returns`, (rows, tokens).
        """
        mask = (batch["weights"] != 0).astype(jnp.float32)
        values = jnp.where(mask != 0, values.astype(jnp.float32), 0.0)
        errors = jnp.square(values - batch["returns"])
        metrics: Metrics = {"val/mean": mean_over(values, mask)}
        if self.cliprange_value is not None:
            reach = self.cliprange_value
            old = batch["old_values"]
            clipped = jnp.clip(values, old - reach, old + reach)
            clipped_errors = jnp.square(clipped - batch["returns"])
            is_clipped = clipped_errors > errors
            metrics["val/clipfrac_avg"] = mean_over(is_clipped, mask)
            errors = jnp.maximum(errors, clipped_errors)
        losses = jnp.where(mask != 0, 0.5 * self.vf_coef * errors, 0.0)
        total = jnp.sum(batch["weights"] * losses)
        weight = jnp.sum(batch["denominators"])
        return Weighted(total, weight), jax.lax.stop_gradient(metrics)


@dataclass(frozen=True)
class ActorCriticLoss:
    """The loss of a policy and of the critic beside it, as TRL's `PPOTrainer` has it.

    Attributes:
        cliprange: how far from 1 ratios of probabilities are clipped.
        vf_coef: a factor of the critic's loss.
        cliprange_value: see `ValueLoss`.
    """

    cliprange: float = 0.2
    vf_coef: float = 0.1
    cliprange_value: float | None = 0.2

    def __call__(
        self, logps: jax.Array, values: jax.Array, batch: Batch
    ) -> tuple[Weighted, Metrics]:
        """The sum of both losses, and metrics under TRL's names.

        Args:
            logps: see `PolicyLoss`.
            values: see `ValueLoss`.
            batch: what both read: `old_logps`, `advantages`, `old_values`, `returns`,
                `weights` and `denominators`.
        """
        actor, shares = PolicyLoss(epsilon=self.cliprange)(logps, batch)
        critic, metrics = ValueLoss(self.cliprange_value)(values, batch)
        mask = (batch["weights"] != 0).astype(jnp.float32)
        differences = jnp.where(mask != 0, logps - batch["old_logps"], 0.0)
        metrics |= {
            "loss/policy_avg": actor,
            "loss/value_avg": critic,
            "policy/clipfrac_avg": shares["clip_ratio/region_mean"],
            "policy/approxkl_avg": mean_over(0.5 * jnp.square(differences), mask),
            "val/ratio": mean_over(jnp.exp(differences), mask),
        }
        loss = Weighted(actor.total + self.vf_coef * critic.total, actor.weight)
        return loss, jax.lax.stop_gradient(metrics)


def _last(is_token: np.ndarray) -> np.ndarray:
    """The place of the last token of each row, (rows,)."""
    return is_token.shape[1] - 1 - np.argmax(is_token[:, ::-1], axis=1)
