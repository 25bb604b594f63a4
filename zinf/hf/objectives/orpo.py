"""Odds ratio preference optimization: fine-tuning and preferences in one, no reference.

ORPO (https://arxiv.org/abs/2403.07691, equation 6) trains on chosen answers as sft does
and adds the odds of chosen against rejected ones. The probability of an answer is the
geometric mean of those of its tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.config import Config
from zinf.core.problem.weighted import Weighted
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives.objective import Objective
from zinf.hf.pairs import (
    Pairs,
    PairTokenizing,
    log_probabilities,
    over_pairs,
    pairs_spec,
    token_means,
)

# A probability of 1 has infinite odds. Those nearer to 1 than this count as this one.
LARGEST_LOG_PROBABILITY = -float(np.finfo(np.float32).eps)


def _loss(model: Model, config: Config) -> Callable:
    """-(mean of chosen) - beta * log sigmoid(log odds ratio), over pairs.

    TRL's `ORPOTrainer` has the tokens of prompts in the first term too, and divides it
    by the tokens of a microbatch. Here, as in the paper, it is of the chosen answer,
    and each pair counts alike.
    """
    beta = config.data.beta

    def loss(
        params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        sums = log_probabilities(model, params, batch, *key, train=train)
        means = token_means(sums, batch)
        odds = _log_odds(means)
        preferences = jax.nn.softplus(odds[:, 1] - odds[:, 0])
        return over_pairs(beta * preferences - means[:, 0], batch)

    return loss


def _log_odds(log_probabilities: jax.Array) -> jax.Array:
    """log(p / (1 - p)) of log(p); finite, and so is its derivative."""
    clipped = jnp.minimum(log_probabilities, LARGEST_LOG_PROBABILITY)
    return clipped - jax.nn.log1mexp(-clipped)


OBJECTIVE = Objective(
    loss=_loss,
    batch_spec=lambda config, rows, length: pairs_spec(rows, length),
    rows=lambda samples, model, config: Pairs(samples),
    tokenizing=PairTokenizing,
)
