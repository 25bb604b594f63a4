"""The `grpo` section: training from rewards, with TRL's names and defaults."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zinf.core.config.completions import Completions, Reader, Share
from zinf.core.config.scalar import (
    Count,
    Flag,
    NonNegative,
    Number,
    Positive,
    Seconds,
    Text,
)
from zinf.core.config.section import Violation


class Grpo(Completions):
    """Draws completions of prompts, and makes those likelier that are rewarded more.

    GRPO (https://arxiv.org/abs/2402.03300) compares each completion with the others of
    its prompt. A microbatch is TRL's batch of a device.
    """

    KEY: ClassVar[str] = "grpo"
    LENGTH: ClassVar[str] = "max_completion_length"
    TIMES: ClassVar[str] = "num_iterations"
    PENALTY: ClassVar[str] = "beta"
    READERS: ClassVar[tuple[Reader, ...]] = (
        Reader("loss_type scale_rewards", "algorithm grpo", lambda x: not x.is_rloo),
        Reader(
            "importance_sampling_level",
            "algorithm grpo with another loss_type than vespo",
            lambda x: x.formula not in ("rloo", "vespo"),
        ),
        Reader(
            "epsilon",
            "losses that clip on both sides",
            lambda x: x.clips or (x.formula == "cispo" and x.epsilon_high is None),
        ),
        Reader(
            "epsilon_high",
            "losses that clip",
            lambda x: x.clips or x.formula == "cispo",
        ),
        Reader("delta", "losses that clip on both sides", lambda x: x.clips),
        Reader(
            "sapo_temperature_neg sapo_temperature_pos",
            "loss_type sapo",
            lambda x: x.formula == "sapo",
        ),
        Reader(
            "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
            "loss_type vespo",
            lambda x: x.formula == "vespo",
        ),
        Reader(
            "importance_sampling_mode importance_sampling_cap",
            "importance_sampling_correction",
            lambda x: x.importance_sampling_correction,
        ),
        Reader(
            "use_bias_correction_kl",
            "algorithm grpo with a beta above 0",
            lambda x: x.beta > 0 and not x.is_rloo,
        ),
        Reader(
            "ref_model_mixup_alpha ref_model_sync_steps",
            "sync_ref_model",
            lambda x: x.sync_ref_model,
        ),
        Reader("kl_penalty_coef", "a teacher", lambda x: x.teacher is not None),
    )

    algorithm: Literal["grpo", "rloo"] = "grpo"
    """grpo, or rloo: REINFORCE whose baseline is the mean of the other completions of
    the prompt, one ratio a sequence (https://arxiv.org/abs/2402.14740)."""

    environment: Text | None = None
    """A function that replies to what the model wrote, as FILE.py:FUNCTION, until it
    returns None. null: a completion is one turn."""

    environment_timeout: Seconds = 60.0
    """Seconds that a call of the environment may take; what takes longer is left
    out."""

    max_tool_calling_iterations: Count | None = None
    """Most replies of the environment in a completion; null: as many as fit
    max_completion_length."""

    num_generations: Annotated[Count, Field(ge=2)] = 8
    """Completions of a prompt, which are a group."""

    max_completion_length: Count = 256
    """Most tokens of a completion, of all its turns with the replies between them."""

    steps_per_generation: Count | None = None
    """Microbatches that are made of the completions drawn at once; null: those of a
    step (gradient_accumulation_steps)."""

    generation_batch_size: Count | None = None
    """Completions drawn at once, in place of steps_per_generation."""

    num_iterations: Count = 1
    """How often each completion is trained on (mu of the paper)."""

    teacher: Text | None = None
    """A model, its folder or its name on the hub, that the model learns from what it
    writes itself (on-policy distillation): the advantage of each token has the
    log-probability by the teacher less that by the model. Rewards are then optional."""

    kl_penalty_coef: Positive = 1.0
    """Factor of the teacher's part of advantages."""

    beta: NonNegative = 0.0
    """Factor of the divergence from the reference, which is the model as training
    begins, or moves towards it (sync_ref_model). 0: there is no reference."""

    epsilon: Positive = 0.2
    """Ratios of probabilities are clipped below 1 - epsilon."""

    epsilon_high: Positive | None = None
    """And above 1 + epsilon_high; null: epsilon. With cispo: the largest weight."""

    delta: Positive | None = None
    """Largest ratio where the advantage is negative too (two-sided clipping); null: no
    limit."""

    loss_type: Literal[
        "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"
    ] = "dapo"
    """How tokens are weighed: grpo, a mean of means of completions; bnpo, dapo, a mean
    over all tokens of the step; dr_grpo, over max_completion_length. cispo, sapo,
    luspo and vespo have terms of their own."""

    scale_rewards: Literal["group", "batch", "none"] | Flag = "group"
    """What advantages are divided by: the deviation of rewards in the group, in the
    batch, or nothing. true is group, false is none."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """Whether a ratio is of a token or of a completion (GSPO)."""

    mask_truncated_completions: Flag = False
    """Leave completions out that no end token ended."""

    top_entropy_quantile: Share = 1.0
    """Train on this share of the tokens, those of the highest entropy."""

    use_bias_correction_kl: Flag = False
    """Multiply the divergence by the ratio, which makes its gradient unbiased."""

    sapo_temperature_neg: Positive = 1.05
    """With sapo, of tokens with a negative advantage."""

    sapo_temperature_pos: Positive = 1.0
    """With sapo, of others."""

    vespo_k_pos: NonNegative = 2.0
    """With vespo, the power of the ratio of a completion with an advantage of 0 or
    more: how much small ratios count."""

    vespo_lambda_pos: NonNegative = 3.0
    """Its decay: how much large ratios count."""

    vespo_k_neg: NonNegative = 3.0
    """The power where the advantage is negative."""

    vespo_lambda_neg: NonNegative = 2.0
    """The decay where the advantage is negative."""

    importance_sampling_correction: Flag = True
    """Correct for the difference between the probabilities that tokens were drawn with
    and those of the training program."""

    importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "sequence_mask"
    """By token or by completion; larger corrections are cut (truncate) or their tokens
    left out (mask)."""

    importance_sampling_cap: Positive = 3.0
    """The largest correction."""

    sync_ref_model: Flag = False
    """Move the reference towards the model every ref_model_sync_steps. It then rests as
    optimizer state does, 4 bytes a parameter, and is saved."""

    ref_model_mixup_alpha: Annotated[Number, Field(ge=0, le=1)] = 0.6
    """Share of the model in the reference that moves."""

    ref_model_sync_steps: Count = 512
    """Steps between moves of the reference."""

    @property
    def group_size(self) -> int:
        return self.num_generations

    @property
    def is_rloo(self) -> bool:
        return self.algorithm == "rloo"

    @property
    def formula(self) -> str:
        """The loss in use: rloo, or `loss_type`."""
        return "rloo" if self.is_rloo else self.loss_type

    @property
    def clips(self) -> bool:
        """Whether ratios are clipped on both sides."""
        return self.formula not in ("cispo", "sapo", "vespo")

    def violations(self) -> Iterator[Violation]:
        if self.sync_ref_model and not self.beta:
            text = "moves a reference, and there is none, as beta is 0"
            yield ("sync_ref_model",), f"{text}. Set beta, or leave it out."
        is_of_tokens = self.importance_sampling_level == "token"
        is_of_tokens &= self.formula not in ("rloo", "vespo")
        if self.teacher is not None and not is_of_tokens:
            text = "needs ratios of tokens: algorithm grpo, importance_sampling_level"
            yield ("teacher",), f"{text} token and another loss_type than vespo."
        yield from self._of_vespo()
        if None not in (self.steps_per_generation, self.generation_batch_size):
            text = "says how many completions are drawn at once, and so does"
            yield (
                ("generation_batch_size",),
                f"{text} steps_per_generation. Remove one of them.",
            )
        yield from super().violations()

    def _of_vespo(self) -> Iterator[Violation]:
        """Corrections of completions, which vespo makes of those of tokens."""
        if self.formula != "vespo":
            return
        mode = self.importance_sampling_mode
        if self.importance_sampling_correction and mode.startswith("sequence"):
            text = "is of completions, and vespo reads the corrections of tokens"
            yield (
                ("importance_sampling_mode",),
                f"{text}. Set it to token_truncate or token_mask.",
            )
