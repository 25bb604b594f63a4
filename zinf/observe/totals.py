"""Sums of the metrics of a run: time, tokens, bytes moved and peak bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from zinf.core.program import MOVING, Link, Tier
from zinf.observe.writer import Metrics


@dataclass(frozen=True)
class Totals:
    """Sums and maxima of the metrics of a run's steps.

    Attributes:
        first_loss, last_loss: losses of the first and the last step of this run.
        evaluation_loss: loss of the last evaluation; None if there was none.
        counted: what `tokens` are, "tokens" or "samples".
        peak_bytes: largest number of bytes that any step held, per tier.
        moved_bytes: sum of the bytes that were moved, per link.
    """

    num_steps: int
    first_loss: float
    last_loss: float
    evaluation_loss: float | None
    seconds: float
    tokens: float
    counted: str
    peak_bytes: Mapping[Tier, int]
    moved_bytes: Mapping[Link, int]

    @classmethod
    def of(cls, metrics: Metrics) -> Self:
        """The totals of one step."""
        seconds = metrics["step_seconds"]
        return cls(
            num_steps=1,
            first_loss=metrics["loss"],
            last_loss=metrics["loss"],
            evaluation_loss=metrics.get("evaluation_loss"),
            seconds=seconds,
            tokens=metrics["tokens_per_second"] * seconds,
            counted=counted(metrics),
            peak_bytes={tier: metrics[f"{tier}_bytes"] for tier in Tier},
            moved_bytes={link: metrics[link.metric] for link in MOVING},
        )

    def __add__(self, later: "Totals") -> "Totals":
        evaluations = (later.evaluation_loss, self.evaluation_loss)
        return Totals(
            num_steps=self.num_steps + later.num_steps,
            first_loss=self.first_loss,
            last_loss=later.last_loss,
            evaluation_loss=next((x for x in evaluations if x is not None), None),
            seconds=self.seconds + later.seconds,
            tokens=self.tokens + later.tokens,
            counted=later.counted,
            peak_bytes={
                tier: max(self.peak_bytes[tier], later.peak_bytes[tier])
                for tier in Tier
            },
            moved_bytes={
                link: self.moved_bytes[link] + later.moved_bytes[link]
                for link in MOVING
            },
        )


def counted(metrics: Metrics) -> str:
    """The unit that a step's `tokens_per_second` counts: tokens or samples."""
    return "samples" if "samples_per_second" in metrics else "tokens"
