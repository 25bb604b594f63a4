"""The user's loss and parameters, as one value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UserLoss:
    """A loss with its parameters, as `zinf.initialize` takes them.

    Attributes:
        loss_fn: `(params, batch[, key])`, or with model state
            `(params, model_state, batch[, key])`.
        params, model_state: a pytree of arrays, or a function of no arguments that
            returns one.
        has_aux: the loss function returns auxiliary values too.
        eval_loss_fn: what evaluation computes instead, if anything else.
        state_rules: how the model states of microbatches become one; see `rules_of`.
    """

    loss_fn: Callable
    params: Any
    has_aux: bool = False
    eval_loss_fn: Callable | None = None
    model_state: Any = None
    state_rules: Mapping[str, str] | None = None
