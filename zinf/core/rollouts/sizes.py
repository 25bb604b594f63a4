"""Prompts, and the sizes and leaves of the batches that are made of completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from zinf.core.config.grpo import Grpo
from zinf.core.rl import PolicyLoss


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data.

    Attributes:
        tokens: int32 (T,).
        shown: what reward functions get: a text, or a conversation as messages.
        columns: the other fields of its record, for reward functions.
        where: the place of the record, for messages.
    """

    tokens: np.ndarray
    shown: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = "a prompt"


def policy_loss(settings: Grpo) -> PolicyLoss:
    """The loss that a `grpo` section asks for, without the weights of tokens."""
    is_rloo = settings.algorithm == "rloo"
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
    )


@dataclass(frozen=True)
class Sizes:
    """How many completions there are at once, of which steps are made.

    Attributes:
        batch: completions of a step.
        drawn: completions that are drawn at once.
        group: completions of a prompt.
    """

    batch: int
    drawn: int
    group: int

    @classmethod
    def of(cls, settings: Grpo, *, batch: int, num_microbatches: int) -> "Sizes":
        """The sizes that a section asks for.

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
        return cls(batch, drawn, group)

    @property
    def num_prompts(self) -> int:
        return self.drawn // self.group

    @property
    def num_steps(self) -> int:
        """Steps that use each drawn completion once."""
        return self.drawn // self.batch


def check_room(prompt: Prompt, max_completion_length: int, length: int) -> None:
    """Refuse a prompt that has no room for a completion.

    Raises:
        ValueError: see above.
    """
    count = len(prompt.tokens)
    if count + max_completion_length > length:
        raise ValueError(
            f"{prompt.where}: the prompt has {count:,} tokens, and with "
            f"grpo.max_completion_length = {max_completion_length:,} they are more "
            f"than the {length:,} of a row (data.sequence_length, or what the model "
            "was made for). Shorten the prompt, lower max_completion_length, or raise "
            "data.sequence_length."
        )


def scores_by_trainer(settings: Grpo, sizes: Sizes) -> bool:
    """Whether tokens are scored by the program of training before the first step."""
    is_used_again = sizes.num_steps * settings.num_iterations > 1
    in_reward = settings.algorithm == "rloo" and settings.beta > 0
    return is_used_again or in_reward or settings.importance_sampling_correction


def batch_names(settings: Grpo, sizes: Sizes) -> tuple[str, ...]:
    """The leaves (rows, tokens - 1) of a batch, beside tokens and labels."""
    policy = policy_loss(settings)
    corrects = settings.importance_sampling_correction
    drops = settings.top_entropy_quantile < 1
    return (
        "weights",
        "advantages",
        *("old_logps",) * (sizes.num_steps * settings.num_iterations > 1),
        *("ref_logps",) * (policy.beta > 0),
        *("policy_weights",) * (corrects or drops),
    )


def batch_spec(
    names: Sequence[str], rows: int, length: int, tokens_name: str = "input_ids"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch; `names` are those of `batch_names`."""
    tokens = jax.ShapeDtypeStruct((rows, length), np.int32)
    found = dict.fromkeys(names, jax.ShapeDtypeStruct((rows, length - 1), np.float32))
    found["denominators"] = jax.ShapeDtypeStruct((rows,), np.float32)
    own = {tokens_name: tokens}
    if tokens_name == "input_ids":
        own["labels"] = tokens
    return own | found
