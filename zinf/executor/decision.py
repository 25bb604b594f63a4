"""What a step decides on the host between its backward pass and its updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

# DeepSpeed and torch.nn.utils.clip_grad_norm_ add this to the norm before dividing.
CLIP_EPSILON = 1e-6


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is not a finite number; nothing was updated."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Attributes:
    loss: mean over microbatches, not scaled.
    grad_norm: of the whole gradient, not scaled and before clipping; None when the
        updates did not wait for it.
    factor: what each gradient is multiplied by: clip coefficient over loss scale.
    skips: a scaled gradient overflowed, so this step updates nothing.
    """

    loss: float
    grad_norm: float | None
    factor: float
    skips: bool


def decide(
    losses: Sequence[float],
    sums_of_squares: Sequence[float] | None,
    *,
    clip_norm: float | None,
    loss_scale: float,
    skips_overflow: bool,
) -> Decision:
    """Decides from the losses of the microbatches and the gradient's squares.

    Sums run in the given order in double precision, so that the result does not depend
    on where anything is placed.

    Raises:
        NonFiniteError: the loss is not finite, or a gradient is not and there is no
            loss scale that could have caused it.
    """
    loss = sum(losses) / len(losses)
    if not isfinite(loss) and not skips_overflow:
        raise NonFiniteError(
            f"The loss is {loss} (by microbatch: {', '.join(map(str, losses))}). "
            "Nothing was updated: parameters and optimizer state are those of the step "
            "before. Lower the learning rate, clip gradients (gradient_clipping), or "
            "look for invalid values in the batch."
        )
    if sums_of_squares is None:
        return Decision(loss, None, 1.0 / loss_scale, False)
    norm = sqrt(sum(sums_of_squares)) / loss_scale
    if not isfinite(norm) or not isfinite(loss):
        if skips_overflow:
            return Decision(loss, norm, 0.0, True)
        raise NonFiniteError(
            f"The gradient norm is {norm} while the loss is {loss}. Nothing was "
            "updated, unless the updates overlap the backward pass. Lower the "
            "learning rate, or clip gradients (gradient_clipping)."
        )
    clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + CLIP_EPSILON))
    return Decision(loss, norm, clip / loss_scale, False)
