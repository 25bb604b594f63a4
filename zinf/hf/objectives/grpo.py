"""From rewards, compared within the completions of a prompt: GRPO and RLOO."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from zinf.core.config import Config
from zinf.core.rl import PolicyLoss
from zinf.core.rollouts import Rollouts, policy_loss
from zinf.core.rollouts.functions import place_of_model
from zinf.core.rollouts.grpo import batch_names, sizes_of
from zinf.core.rollouts.sizes import Sizes
from zinf.data.configured import batch_size
from zinf.hf.actor_critic import check_tokens
from zinf.hf.engine import ModelEngine
from zinf.hf.model import Batch, Model, Params, load
from zinf.hf.objectives.from_rewards import drawing_objective, drawn_by, scored
from zinf.hf.reference import TEACHER


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


def _by(rollouts: Rollouts, engine: ModelEngine, config: Config) -> Rollouts:
    """Rollouts that an engine draws, and its teacher scores; see `drawn_by`."""
    if engine.teacher is not None:
        rollouts = rollouts.taught_by(engine.teacher)
    return drawn_by(rollouts, engine, config)


@cache
def _loaded(name: str) -> Model:
    return load(name)


def _teacher(policy: Model, config: Config) -> Model | None:
    name = config.grpo.teacher
    if name is None:
        return None
    if config.data.images is not None:
        raise NotImplementedError(
            f"grpo.teacher is {name}, and prompts have images, which a teacher does "
            "not read yet. Leave one of them out."
        )
    teacher = _loaded(place_of_model(name, config.folders_of_modules()) or name)
    check_tokens(policy, teacher, TEACHER, "--teacher, grpo.teacher")
    return teacher


OBJECTIVE = drawing_objective(
    Rollouts,
    loss=_loss,
    names=lambda config: batch_names(config.grpo, _sizes(config)),
    drawn=lambda config: _sizes(config).drawn,
    by=_by,
    teacher=_teacher,
)
