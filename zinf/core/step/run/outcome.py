"""The result of one step, streamed or fused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zinf.core.optim.decision import MIXED, UNTOUCHED, NonFiniteError
from zinf.core.plan import Link
from zinf.core.step.run.run import StepRecord

WAITS = (
    "With gradient_clipping a step looks at the whole gradient before its first update."
)


@dataclass(frozen=True)
class Outcome:
    """Results and measurements of a step.

    Attributes:
        loss: the mean loss of the step, without the loss scale.
        grad_norm: the norm of the whole gradient, without the loss scale and before
            clipping.
        skips: the gradient is not finite, so the step changed nothing.
        extra: the loss function's other outputs, with a leading microbatch dim.
        interrupted: Ctrl-C came while the step ran; the step is complete nevertheless.
    """

    loss: float
    grad_norm: float
    skips: bool
    extra: Any
    interrupted: bool = False
    moved_bytes: Mapping[Link, int] = field(default_factory=dict)


def outcome_of(record: StepRecord, extra: Any) -> Outcome:
    """The outcome of a step that ran to its end.

    Raises:
        NonFiniteError: the step's decision was to refuse a loss or gradient that is not
            finite. `record.is_mixed` is set if its gradients updated something before.
    """
    decision = record.decision
    assert decision is not None
    if decision.refusal:
        record.is_mixed = record.has_updated
        state = f"{MIXED} {WAITS}" if record.is_mixed else UNTOUCHED
        raise NonFiniteError(f"{decision.refusal} {state}")
    assert decision.grad_norm is not None
    return Outcome(
        decision.loss,
        decision.grad_norm,
        decision.skips,
        extra,
        record.interrupted,
        record.moved_bytes,
    )
