"""`zinf.hf.GRPOTrainer`: GRPO and RLOO, with the names and defaults of TRL."""

from typing import Any, ClassVar

from zinf.core.config.grpo import Grpo
from zinf.core.rollouts.asking import Function
from zinf.hf.trainers import AbstractRewardConfig, AbstractRewardTrainer


class GRPOConfig(AbstractRewardConfig):
    """The arguments of TRL's `GRPOConfig`; its method is the `grpo` section."""

    SECTION = Grpo
    DEFAULTS: ClassVar[dict[str, Any]] = {"learning_rate": 1e-6}


class GRPOTrainer(AbstractRewardTrainer):
    """GRPO and RLOO; see `AbstractRewardTrainer` for the other arguments.

    Args:
        environment: a function that replies to what the model wrote, called as reward
            functions are (`zinf/core/rollouts/environment.py`), or its name, such as
            "play.py:reply". None: that of `config`, or none.
    """

    ARGUMENTS = GRPOConfig

    def __init__(
        self, *given: Any, environment: Function | str | None = None, **named: Any
    ) -> None:
        self.environment = environment
        super().__init__(*given, **named)
