"""The mathematics of learning from rewards: GRPO and its kin, RLOO, and PPO.

What is made with a batch is NumPy; what a loss computes of it is traced by jax.
"""

from zinf.core.rl.advantages import grpo_advantages as grpo_advantages
from zinf.core.rl.advantages import rloo_advantages as rloo_advantages
from zinf.core.rl.corrections import IMPORTANCE_MODES as IMPORTANCE_MODES
from zinf.core.rl.corrections import difference_metrics as difference_metrics
from zinf.core.rl.corrections import entropy_mask as entropy_mask
from zinf.core.rl.corrections import importance_correction as importance_correction
from zinf.core.rl.metrics import metric_values as metric_values
from zinf.core.rl.policy import LEVELS as LEVELS
from zinf.core.rl.policy import PolicyLoss as PolicyLoss
from zinf.core.rl.policy import token_scores as token_scores
from zinf.core.rl.ppo import ActorCriticLoss as ActorCriticLoss
from zinf.core.rl.ppo import ValueLoss as ValueLoss
from zinf.core.rl.ppo import generalized_advantages as generalized_advantages
from zinf.core.rl.ppo import token_rewards as token_rewards
from zinf.core.rl.ppo import whitened as whitened
from zinf.core.rl.rewards import as_rewards as as_rewards
from zinf.core.rl.rewards import combined as combined
from zinf.core.rl.rewards import combined_advantages as combined_advantages
from zinf.core.rl.rewards import reward_metrics as reward_metrics
from zinf.core.rl.rewards import with_kl as with_kl
from zinf.core.rl.tokens import LOSS_TYPES as LOSS_TYPES
from zinf.core.rl.tokens import is_truncated as is_truncated
from zinf.core.rl.tokens import token_rows as token_rows
from zinf.core.rl.tokens import token_weights as token_weights
