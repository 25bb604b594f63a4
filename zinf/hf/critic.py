"""The critic of PPO: a model of `transformers` with a value before each token."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from zinf.core.problem.weighted import Weighted
from zinf.core.rl.policy import Metrics
from zinf.core.rl.ppo import ValueLoss
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.model import Batch, Params

INPUTS = ("input_ids", "attention_mask", "position_ids")


def load_critic(
    path_or_id: str | Path, *, dtype: str = "float32", seed: int = 0
) -> HeadModel:
    """A model with one number for each token, from a language or a reward model.

    A reward model keeps its head, as DeepSpeed-Chat and TRL begin a critic; a bias that
    it does not have is 0. The head of another model gets initial values. There is no
    dropout before the head, since values are targets of regression.

    Args:
        path_or_id, dtype, seed: as for `load_head`.

    Raises:
        FileNotFoundError, OSError, ValueError, NotImplementedError: see `load_head`.
    """
    found = load_head(
        path_or_id,
        "AutoModelForTokenClassification",
        labels=("value",),
        dtype=dtype,
        seed=seed,
    )
    found.config.classifier_dropout = 0.0
    return found


@dataclass(frozen=True)
class Critic:
    """Values of a model and their loss.

    Attributes:
        model: of `load_critic`.
        value_loss: the loss of values.
    """

    model: HeadModel
    value_loss: ValueLoss = field(default_factory=ValueLoss)

    def values(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """The value before each token, float32 (rows, tokens - 1).

        Entry t is of the text up to token t, so it stands beside the log-probability of
        token t + 1.

        Args:
            batch: `input_ids` (rows, tokens), and maybe `attention_mask` and
                `position_ids`; its other arrays are not read.
        """
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        outputs = self.model.logits(params, inputs, *key, train=train)
        return outputs[:, :-1, 0].astype(jnp.float32)

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        """The clipped loss of values; see `zinf.rl.ValueLoss` for the batch."""
        return self.loss_and_metrics(params, batch, *key, train=train)[0]

    def loss_and_metrics(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> tuple[Weighted, Metrics]:
        """The loss and its metrics, for `has_aux=True`."""
        return self.value_loss(self.values(params, batch, *key, train=train), batch)
