"""Completions that the model in training draws and rewards judge, as batches."""

from zinf.core.rollouts.asking import Samples as Samples
from zinf.core.rollouts.calls import Rewards as Rewards
from zinf.core.rollouts.environment import Environment as Environment
from zinf.core.rollouts.grpo import Rollouts as Rollouts
from zinf.core.rollouts.grpo import policy_loss as policy_loss
from zinf.core.rollouts.ppo import PpoRollouts as PpoRollouts
from zinf.core.rollouts.sizes import Prompt as Prompt
