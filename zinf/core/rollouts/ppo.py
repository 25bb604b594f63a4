"""Batches of PPO: values of a critic, and advantages over time."""

from typing import Self

import numpy as np

from zinf.core.config.ppo import Ppo
from zinf.core.rl import (
    generalized_advantages,
    token_rewards,
    token_weights,
    whitened,
)
from zinf.core.rollouts.rollouts import (
    AbstractRollouts,
    Arrays,
    Judged,
    Score,
    Weighed,
    in_steps,
)
from zinf.core.rollouts.sizes import Sizes

# The leaves (rows, tokens - 1) of a batch, beside tokens and labels.
NAMES = ("weights", "advantages", "old_logps", "old_values", "returns")


class PpoRollouts(AbstractRollouts[Ppo]):
    """Batches for an `ActorCriticLoss`; see `AbstractRollouts` for arguments.

    Each prompt has one completion.
    """

    _values: Score | None = None

    def valued_by(self, values: Score) -> Self:
        """These rollouts, with a critic's values from now on.

        Args:
            values: from a batch to the value before each token, float32 (rows,
                tokens - 1).
        """
        self._values = values
        return self

    def sizes_of(self, batch_size: int, num_microbatches: int) -> Sizes:
        drawn = batch_size * self.settings.num_mini_batches
        return Sizes(batch_size, drawn, self.settings.group_size)

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    @property
    def is_scored(self) -> bool:
        return True

    def ask(self, arrays: Arrays) -> Arrays:
        assert self._values is not None, "call `valued_by` first"
        return {"values": in_steps(self, self._values, arrays)}

    def weighed(self, judged: Judged) -> Weighed:
        settings, is_kept = self.settings, ~np.isnan(judged.rewards)
        mask = judged.is_drawn * is_kept[:, None]
        scores = np.where(is_kept, judged.rewards, 0.0)
        if settings.missing_eos_penalty is not None:
            scores = scores - settings.missing_eos_penalty * judged.is_cut
        penalties = self._rewards(np.zeros_like(scores), judged, mask)
        rewards = self._rewards(scores, judged, mask)
        if settings.whiten_rewards:
            rewards = whitened(rewards, mask, shift_mean=False)
        values = np.where(mask != 0, judged.more["values"], 0.0)
        how = {"gamma": settings.gamma, "lam": settings.lam}
        plain, returns = generalized_advantages(rewards, values, mask, **how)
        advantages = whitened(plain, mask)
        weights, denominators = token_weights(mask)
        arrays = {
            "weights": weights,
            "denominators": denominators,
            "advantages": advantages,
            "old_logps": judged.logps,
            "old_values": values,
            "returns": returns,
        }
        surprise = -np.where(mask != 0, judged.logps, 0.0).sum(axis=1)
        of_texts = {
            "scores": scores,
            "entropy": surprise,
            "non_score_reward": penalties.sum(axis=1),
            "rlhf_reward": scores + penalties.sum(axis=1),
        }
        if settings.kl_coef:
            of_texts["kl"] = -penalties.sum(axis=1) / settings.kl_coef
        metrics = {
            f"objective/{name}": float(x[is_kept].mean())
            for name, x in of_texts.items()
        }
        metrics["val/num_eos_tokens"] = float((~judged.is_cut).sum())
        shown = advantages.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        return Weighed(arrays, shown, metrics)

    def _rewards(
        self, scores: np.ndarray, judged: Judged, mask: np.ndarray
    ) -> np.ndarray:
        """Rewards of tokens, float64 (N, tokens - 1), 0 for rows that are left out."""
        settings, logps = self.settings, judged.logps
        reference = logps if judged.reference is None else judged.reference
        rewards, is_kept = np.zeros(mask.shape), mask.any(axis=1)
        given = (x[is_kept] for x in (scores, logps, reference, mask))
        how = {"kl_coef": settings.kl_coef, "kl_estimator": settings.kl_estimator}
        rewards[is_kept] = token_rewards(*given, **how)
        return rewards
