"""What a step decides on the host between its backward pass and its updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

from zinf.optim.clipping import Clipping


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is not a finite number; nothing was updated."""


ADVICE = (
    "Lower the learning rate, clip gradients (gradient_clipping), or look for invalid "
    "values in the batch."
)
# What is said of the state that a failed step left.
UNTOUCHED = (
    "Nothing was updated: parameters and optimizer state are those of the step before."
)
MIXED = (
    "Some arrays are updated and others are not. Restore the last checkpoint with "
    "engine.restore(directory)."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Attributes:
    loss: mean over microbatches, not scaled.
    grad_norm: of the whole gradient, not scaled and before clipping; None when the
        updates did not wait for it.
    factor: what each gradient is multiplied by: clip coefficient over loss scale.
    skips: this step updates nothing: a scaled gradient overflowed, or it is refused.
    refusal: why, if the loss or a gradient is not finite and no loss scale could have
        caused it.
    """

    loss: float
    grad_norm: float | None
    factor: float
    skips: bool
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """What the updates that a step left to the next one go by.

    Attributes:
        step_values: those of the step whose gradients are at rest.
    """

    decision: Decision
    step_values: Sequence[Any]


def decide(
    losses: Sequence[float],
    sums_of_squares: Sequence[float] | None,
    *,
    clipping: Clipping,
    loss_scale: float,
    skips_overflow: bool,
) -> Decision:
    """Decides from the losses of the microbatches and the gradient's squares.

    Sums run in the given order in double precision, so that the result does not depend
    on where anything is placed.
    """
    loss = sum(losses) / len(losses)
    if not isfinite(loss) and not skips_overflow:
        refusal = (
            f"The loss is {loss} (by microbatch: {', '.join(map(str, losses))}). "
            f"{ADVICE}"
        )
        return Decision(loss, None, 0.0, True, refusal)
    if sums_of_squares is None:
        return Decision(loss, None, 1.0 / loss_scale, False)
    norm = sqrt(sum(sums_of_squares)) / loss_scale
    if not isfinite(norm) or not isfinite(loss):
        refusal = None
        if not skips_overflow:
            refusal = f"The gradient norm is {norm} while the loss is {loss}. {ADVICE}"
        return Decision(loss, norm, 0.0, True, refusal)
    return Decision(loss, norm, clipping.factor(norm) / loss_scale, False)
