"""What a step decides on the host between its backward pass and its updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from zinf.core.optim.clipping import Clipping
from zinf.core.optim.squares import added, root


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is not a finite number; nothing was updated."""


ADVICE = (
    "Lower the learning rate, clip gradients (gradient_clipping) if they are not, or "
    "look for invalid values in the batch."
)
# Ends of error messages: the state that a failed step left.
UNTOUCHED = (
    "Nothing was updated: parameters and optimizer state are those of the step before."
)
MIXED = (
    "Some arrays are updated and others are not. Restore the last checkpoint with "
    "engine.restore(directory)."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step decides before its updates run.

    Attributes:
        loss: the mean loss of the step, not scaled.
        grad_norm: of the whole gradient, not scaled and before clipping; None when the
            updates did not wait for it.
        factor: what each gradient is multiplied by: clip coefficient over loss scale.
        skips: this step updates nothing: a scaled gradient overflowed, the step is
            refused, or its loss or a gradient is not finite and such steps may be
            skipped.
        refusal: why, if the loss or a gradient is not finite and such steps may not be
            skipped.
    """

    loss: float
    grad_norm: float | None
    factor: float
    skips: bool
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """What updates read of their gradients' step: its decision and its step values."""

    decision: Decision
    step_values: Sequence[Any]

    @property
    def factor(self) -> np.float32:
        """The factor by which each gradient is multiplied."""
        return np.float32(self.decision.factor)


def judge(
    losses: Any, square: Any, *, clipping: Clipping, loss_scale: Any, xp: Any
) -> tuple[Any, Any, Any]:
    """`(norm, factor, is_finite)` of a gradient, the rule of every step.

    The streamed step calls it with numbers in double precision, the fused step inside
    its executable.

    Args:
        losses: the loss of each microbatch.
        square: the sum of the squares of the scaled gradient, as a number of [Note:
            wide sums of squares].
        xp: NumPy, or jax.numpy if the arguments are traced.
    """
    norm = root(square, xp) / loss_scale
    is_finite = xp.isfinite(norm) & xp.all(xp.isfinite(losses))
    return norm, clipping.factor(norm, xp) / loss_scale, is_finite


def decide(
    losses: Sequence[float],
    sums_of_squares: Sequence[float] | None,
    *,
    clipping: Clipping,
    loss_scale: float,
    weight: float,
    skips_overflow: bool,
) -> Decision:
    """Decides from the losses of the microbatches and the gradient's squares.

    Sums run in the given order in double precision, so that the result does not depend
    on where anything is placed.

    Args:
        sums_of_squares: numbers of [Note: wide sums of squares]; None if updates do not
            wait for the gradient.
        weight: what the sum of the losses is divided by.
    """
    if sums_of_squares is None:
        judged = None, 1 / loss_scale, np.all(np.isfinite(losses))
        return decision_of(losses, judged, weight=weight, skips_overflow=skips_overflow)
    with np.errstate(invalid="ignore"):
        judged = judge(
            losses,
            added(sums_of_squares),
            clipping=clipping,
            loss_scale=loss_scale,
            xp=np,
        )
    return decision_of(losses, judged, weight=weight, skips_overflow=skips_overflow)


def decision_of(
    losses: Sequence[float],
    judged: tuple[Any, Any, Any],
    *,
    weight: float,
    skips_overflow: bool,
) -> Decision:
    """The decision of a step from what `judge` found. The norm may be None."""
    norm, factor, is_finite = judged
    loss = sum(losses) / weight
    norm = None if norm is None else float(norm)
    if is_finite:
        return Decision(loss, norm, float(factor), False)
    what = f"loss is {loss} (by microbatch: {', '.join(map(str, losses))})"
    if isfinite(loss):
        what = f"gradient norm is {norm} while the loss is {loss}"
    refusal = None if skips_overflow else f"The {what}. {ADVICE}"
    return Decision(loss, norm, 0.0, True, refusal)
