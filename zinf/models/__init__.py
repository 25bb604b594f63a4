"""Models for the shipped configs and for tests; the engine does not depend on them."""

from zinf.models.divergence import divergence as divergence
from zinf.models.gpt import GPT as GPT
from zinf.models.gpt import flops_per_token as flops_per_token
from zinf.models.gpt import held_out_sums as held_out_sums
from zinf.models.gpt import init_and_loss as init_and_loss
from zinf.models.gpt import next_token_loss as next_token_loss
from zinf.models.gpt import num_parameters as num_parameters
from zinf.models.gpt_config import GPTConfig as GPTConfig
