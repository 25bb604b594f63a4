"""Batches of GRPO and RLOO: a completion is compared with others of its prompt."""

from typing import Self

import numpy as np

from zinf.core.config.grpo import Grpo
from zinf.core.rl import (
    PolicyLoss,
    entropy_mask,
    grpo_advantages,
    importance_correction,
    rloo_advantages,
    token_weights,
    with_kl,
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

TEACHER = "teacher_logps"


class Rollouts(AbstractRollouts[Grpo]):
    """Batches for a loss of `policy_loss`; see `AbstractRollouts` for arguments."""

    _teacher: Score | None = None

    def taught_by(self, teacher: Score) -> Self:
        """These rollouts, with a teacher of their tokens from now on.

        Args:
            teacher: from a batch to log-probabilities of its tokens, float32 (rows,
                tokens - 1).
        """
        self._teacher = teacher
        return self

    def ask(self, arrays: Arrays) -> Arrays:
        if self.settings.teacher is None:
            return {}
        assert self._teacher is not None, "call `taught_by` first"
        return {TEACHER: in_steps(self, self._teacher, arrays)}

    def sizes_of(self, batch_size: int, num_microbatches: int) -> Sizes:
        rest = {"batch": batch_size, "num_microbatches": num_microbatches}
        return sizes_of(self.settings, **rest)

    @property
    def names(self) -> tuple[str, ...]:
        return batch_names(self.settings, self.sizes)

    @property
    def is_scored(self) -> bool:
        settings = self.settings
        is_used_again = self.sizes.num_steps * settings.num_iterations > 1
        in_reward = settings.is_rloo and settings.beta > 0
        return is_used_again or in_reward or settings.importance_sampling_correction

    def weighed(self, judged: Judged) -> Weighed:
        settings, logps = self.settings, judged.logps
        mask = judged.is_drawn * ~np.isnan(judged.rewards)[:, None]
        if settings.mask_truncated_completions:
            mask = mask * ~judged.is_cut[:, None]
        advantages = _advantages(settings, judged)
        of_tokens, metrics = advantages[:, None], {}
        if TEACHER in judged.more:
            gains = (judged.more[TEACHER] - logps).astype(np.float64)
            of_tokens = of_tokens + settings.kl_penalty_coef * gains
            # The reverse KL divergence from the teacher, by what was drawn.
            count = max(1.0, float(mask.sum()))
            metrics["teacher_kl"] = float(-(gains * mask).sum() / count)
        weights, denominators = token_weights(
            mask,
            "grpo" if settings.is_rloo else settings.loss_type,
            max_completion_length=settings.max_completion_length,
        )
        made = {
            "weights": weights,
            "denominators": denominators,
            "advantages": of_tokens * mask,
            "old_logps": logps,
            "policy_weights": np.ones(mask.shape),
        }
        if settings.importance_sampling_correction:
            ratios = _corrections(settings, judged, mask)
            made[_of_corrections(policy_loss(settings))] = ratios
        if settings.top_entropy_quantile < 1:
            quantile = settings.top_entropy_quantile
            is_kept = entropy_mask(judged.entropies, mask, quantile)
            made["policy_weights"] = made["policy_weights"] * is_kept
        if judged.reference is not None:
            made["ref_logps"] = judged.reference
        return Weighed(made, advantages, metrics)


def policy_loss(settings: Grpo) -> PolicyLoss:
    """The loss that a `grpo` section asks for, without the weights of tokens."""
    is_rloo = settings.is_rloo
    return PolicyLoss(
        loss_type="grpo" if is_rloo else settings.loss_type,
        importance_sampling_level=(
            "sequence_product" if is_rloo else settings.importance_sampling_level
        ),
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
        # RLOO has the divergence in the reward.
        beta=0.0 if is_rloo else settings.beta,
        use_bias_correction_kl=settings.use_bias_correction_kl,
        sapo_temperature_pos=settings.sapo_temperature_pos,
        sapo_temperature_neg=settings.sapo_temperature_neg,
        vespo_k_pos=settings.vespo_k_pos,
        vespo_lambda_pos=settings.vespo_lambda_pos,
        vespo_k_neg=settings.vespo_k_neg,
        vespo_lambda_neg=settings.vespo_lambda_neg,
    )


def sizes_of(settings: Grpo, *, batch: int, num_microbatches: int) -> Sizes:
    """How many completions a `grpo` section has drawn at once.

    Raises:
        ValueError: they do not divide each other.
    """
    drawn = settings.generation_batch_size
    if drawn is None:
        count = settings.steps_per_generation or num_microbatches
        drawn = batch // num_microbatches * count
    group, how = settings.num_generations, "grpo.generation_batch_size"
    if settings.generation_batch_size is None:
        how = "train_batch_size times grpo.steps_per_generation"
    if drawn % batch:
        raise ValueError(
            f"{drawn} completions are drawn at once, which is no multiple of the "
            f"{batch} of a step. Set grpo.steps_per_generation to a multiple of "
            f"the microbatches of a step, {num_microbatches}."
        )
    if drawn % group:
        raise ValueError(
            f"{drawn} completions are drawn at once ({how}), which are no groups "
            f"of {group} (grpo.num_generations). Use a multiple of {group}."
        )
    return Sizes(batch, drawn, group)


def batch_names(settings: Grpo, sizes: Sizes) -> tuple[str, ...]:
    """The leaves (rows, tokens - 1) of a batch, beside tokens and labels."""
    policy = policy_loss(settings)
    has_factors = settings.top_entropy_quantile < 1
    corrections = (_of_corrections(policy),) * settings.importance_sampling_correction
    return (
        "weights",
        "advantages",
        *("old_logps",) * (sizes.num_steps * settings.num_iterations > 1),
        *("ref_logps",) * (policy.beta > 0),
        *dict.fromkeys((*corrections, *("policy_weights",) * has_factors)),
    )


def _of_corrections(policy: PolicyLoss) -> str:
    """The leaf of a batch that has the corrections for the sampler.

    vespo's weight of a sequence is a function of them.
    """
    is_vespo = policy.loss_type == "vespo"
    return "importance_ratios" if is_vespo else "policy_weights"


def _advantages(settings: Grpo, judged: Judged) -> np.ndarray:
    """The advantages of the completions, float64 (N,)."""
    rewards, group = judged.rewards, settings.num_generations
    if not settings.is_rloo:
        return grpo_advantages(rewards, group, settings.scale_rewards)
    if judged.reference is not None:
        rest = judged.reference, judged.is_drawn, settings.beta
        rewards = with_kl(rewards, judged.logps, *rest)
    return rloo_advantages(rewards, group)


def _corrections(settings: Grpo, judged: Judged, mask: np.ndarray) -> np.ndarray:
    """What corrects each token for another sampler, (N, tokens - 1)."""
    return importance_correction(
        judged.logps,
        judged.drawn_logps,
        mask,
        settings.importance_sampling_mode,
        cap=settings.importance_sampling_cap,
    )
