"""From rewards, compared within the completions of a prompt: GRPO and RLOO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from zinf.core.config import Config
from zinf.core.rl import PolicyLoss
from zinf.core.rollouts import Rollouts, policy_loss
from zinf.core.rollouts.grpo import batch_names, sizes_of
from zinf.core.rollouts.sizes import Sizes
from zinf.data.configured import batch_size
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives.from_rewards import drawing_objective, scored


@dataclass(frozen=True)
class FromRewards:
    """The loss of a model that learns from the advantages of what it wrote.

    Attributes:
        policy: the loss of log-probabilities.
        temperature: that of drawing; logits are divided by it.
    """

    model: Model
    policy: PolicyLoss
    temperature: float = 1.0

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Any:
        """`(loss, metrics)`, see `PolicyLoss`.

        Args:
            batch: of `Rollouts`: `input_ids` and `labels` (rows, tokens), and what
                `PolicyLoss` reads.
        """
        how = {"train": train, "temperature": self.temperature}
        read = scored(self.model, batch)
        logps = self.model.token_log_probabilities(params, read, *key, **how)
        return self.policy(logps, batch)


def _loss(model: Model, config: Config) -> Callable:
    settings = config.grpo
    return FromRewards(model, policy_loss(settings), settings.temperature).loss


def _sizes(config: Config) -> Sizes:
    count = config.num_microbatches
    return sizes_of(config.grpo, batch=batch_size(config), num_microbatches=count)


OBJECTIVE = drawing_objective(
    Rollouts,
    loss=_loss,
    names=lambda config: batch_names(config.grpo, _sizes(config)),
    drawn=lambda config: _sizes(config).drawn,
)
