"""Identity preference optimization: the gain of chosen answers has a target.

IPO (https://arxiv.org/abs/2310.12036, equation 17) asks for a difference between chosen
and rejected answers, and for no more of it, so a model that tells all pairs apart still
stays near the reference. As in TRL, differences are of means over tokens; those of the
paper are of sums.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from zinf.core.config import Config
from zinf.core.problem.weighted import Weighted
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives import dpo
from zinf.hf.pairs import log_probabilities, over_pairs, token_means


def _loss(model: Model, config: Config) -> Callable:
    """(mean gain of chosen - mean gain of rejected - 1 / (2 * beta))**2, over pairs.

    Gains are those of DPO; see `zinf.hf.objectives.dpo.Preference.loss`.
    """
    target = 1 / (2 * config.data.beta)

    def loss(
        params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        sums = log_probabilities(model, params, batch, *key, train=train)
        gains = token_means(sums - batch["reference"], batch)
        return over_pairs(jnp.square(gains[:, 0] - gains[:, 1] - target), batch)

    return loss


OBJECTIVE = replace(dpo.OBJECTIVE, loss=_loss)
