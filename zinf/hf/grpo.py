"""`zinf.hf.GRPOTrainer`: GRPO and RLOO, with the names and defaults of TRL."""

from typing import Any, ClassVar

from zinf.core.config.grpo import Grpo
from zinf.hf.trainers import AbstractRewardConfig, AbstractRewardTrainer


class GRPOConfig(AbstractRewardConfig):
    """The arguments of TRL's `GRPOConfig`; its method is the `grpo` section."""

    SECTION = Grpo
    DEFAULTS: ClassVar[dict[str, Any]] = {"learning_rate": 1e-6}


class GRPOTrainer(AbstractRewardTrainer):
    """GRPO and RLOO; see `AbstractRewardTrainer` for the arguments."""

    ARGUMENTS = GRPOConfig
