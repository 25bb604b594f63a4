"""Simple preference optimization: chosen answers against rejected ones, no reference.

SimPO (https://arxiv.org/abs/2405.14734, equation 6) compares mean log-probabilities of
tokens, so a long answer has no advantage, and asks for a margin between the two.
"""

from collections.abc import Callable

import jax

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


def _loss(model: Model, config: Config) -> Callable:
    """-log sigmoid(beta * (mean of chosen - mean of rejected) - gamma), over pairs."""
    beta, gamma = config.data.beta, config.data.simpo_gamma

    def loss(
        params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        sums = log_probabilities(model, params, batch, *key, train=train)
        means = token_means(sums, batch)
        losses = jax.nn.softplus(gamma - beta * (means[:, 0] - means[:, 1]))
        return over_pairs(losses, batch)

    return loss


OBJECTIVE = Objective(
    loss=_loss,
    batch_spec=lambda config, rows, length: pairs_spec(rows, length),
    rows=lambda samples, model, config: Pairs(samples),
    tokenizing=PairTokenizing,
)
