"""The `ppo` section: PPO from rewards, with TRL's names and defaults."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zinf.core.config.completions import Completions, Reader
from zinf.core.config.scalar import (
    Count,
    Flag,
    NonNegative,
    Number,
    Positive,
    Text,
)

Factor = Annotated[Number, Field(ge=0, le=1)]


class Ppo(Completions):
    """Trains a policy on what it writes, and a critic that foretells the rewards.

    PPO (https://arxiv.org/abs/1707.06347) with a penalty of the divergence from the
    reference in the reward of each token (https://arxiv.org/abs/1909.08593). A batch of
    train_batch_size completions is TRL's mini batch.
    """

    KEY: ClassVar[str] = "ppo"
    LENGTH: ClassVar[str] = "response_length"
    TIMES: ClassVar[str] = "num_ppo_epochs"
    PENALTY: ClassVar[str] = "kl_coef"
    READERS: ClassVar[tuple[Reader, ...]] = (
        Reader("kl_estimator", "a kl_coef above 0", lambda x: x.kl_coef > 0),
    )

    critic: Text | None = None
    """Model that the critic begins from, a folder or a name on the hub: a reward model,
    whose head is kept, or a language model, which gets a new one. Null: the reward
    model, if there is one alone; else the model that is trained."""

    response_length: Count = 53
    """Most tokens of a completion."""

    temperature: Positive = 0.7
    """Logits are divided by it, in drawing and in the loss."""

    missing_eos_penalty: Positive | None = None
    """Subtracted from the reward of a completion that no end token ended; null: 0."""

    num_ppo_epochs: Count = 4
    """How often each completion is trained on."""

    num_mini_batches: Count = 1
    """Batches that are made of the completions drawn at once."""

    whiten_rewards: Flag = False
    """Scale the rewards of tokens to a standard deviation of 1."""

    kl_coef: NonNegative = 0.05
    """Factor of the divergence from the reference, which is the model as training
    begins. 0: there is no reference."""

    kl_estimator: Literal["k1", "k3"] = "k1"
    """Estimate of the divergence (http://joschu.net/blog/kl-approx.html): k1, the
    difference of log-probabilities, or k3, which is never negative."""

    cliprange: Positive = 0.2
    """Ratios of probabilities are clipped this far from 1."""

    vf_coef: NonNegative = 0.1
    """Factor of the loss of the critic."""

    cliprange_value: Positive = 0.2
    """Values are clipped this far from what they were when completions were drawn."""

    gamma: Factor = 1.0
    """Discount of the reward of a token later."""

    lam: Factor = 0.95
    """How much advantages trust values of later tokens: 1 trusts rewards alone."""
