"""`zinf.hf.PPOTrainer`: PPO, with the names and defaults of TRL."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from zinf.core.config.ppo import Ppo
from zinf.core.rollouts.functions import place_of_model
from zinf.hf.model import Model
from zinf.hf.trainers import AbstractRewardConfig, AbstractRewardTrainer


class PPOConfig(AbstractRewardConfig):
    """The arguments of TRL's `PPOConfig`; its method is the `ppo` section.

    `total_episodes` counts the completions that are drawn.
    """

    SECTION = Ppo
    COUNTS: ClassVar[Mapping[str, Any]] = {
        **AbstractRewardConfig.COUNTS,
        "total_episodes": None,
    }

    def with_critic(self, name: str) -> "PPOConfig":
        """The same, with a critic that begins from a model."""
        return PPOConfig(**{**self.training, **self.section, "critic": name})

    def num_steps(self, samples_of_epoch: int, batch: int) -> int:
        drawn = self.training.get("total_episodes")
        if drawn is None or self.training.get("max_steps", -1) > 0:
            return super().num_steps(samples_of_epoch, batch)
        default = Ppo.model_fields["num_ppo_epochs"].default
        return ceil(drawn * self.section.get("num_ppo_epochs", default) / batch)


class PPOTrainer(AbstractRewardTrainer):
    """PPO, with a critic that is trained beside the policy.

    Args:
        reward_funcs: as for `AbstractRewardTrainer`; TRL's `reward_model` is one.
        value_model: folder or name of the model that the critic begins from; None: the
            reward model, if there is one alone, else `model`.
        rest, named: see `AbstractRewardTrainer`.
    """

    ARGUMENTS = PPOConfig

    def __init__(
        self,
        model: str | Path | Model,
        reward_funcs: Any,
        args: PPOConfig | None = None,
        *rest: Any,
        value_model: str | Path | None = None,
        **named: Any,
    ) -> None:
        args = PPOConfig() if args is None else args
        if value_model is None and "critic" not in args.section:
            is_one = callable(reward_funcs) or isinstance(reward_funcs, str | Path)
            given = [reward_funcs] if is_one else reward_funcs
            names = [str(x) for x in given if isinstance(x, str | Path)]
            judges = [x for x in names if place_of_model(x, [Path.cwd()]) is not None]
            value_model = judges[0] if len(judges) == 1 else None
        if value_model is not None:
            args = args.with_critic(str(value_model))
        super().__init__(model, reward_funcs, args, *rest, **named)
