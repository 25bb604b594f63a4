"""Models for the shipped configs and for tests; the engine does not depend on them."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.models.divergence import divergence as divergence
    from zinf.models.gpt import GPT as GPT
    from zinf.models.gpt_config import GPTConfig as GPTConfig
    from zinf.models.gpt_functions import decoding as decoding
    from zinf.models.gpt_functions import flops_per_token as flops_per_token
    from zinf.models.gpt_functions import held_out_sums as held_out_sums
    from zinf.models.gpt_functions import init_and_loss as init_and_loss
    from zinf.models.gpt_functions import logits_of as logits_of
    from zinf.models.gpt_functions import num_parameters as num_parameters
    from zinf.models.gpt_loss import next_token_loss as next_token_loss

# A model of transformers needs a module of this package, and not flax.
make_lazy(__name__)
