"""Compute precision: bf16, and fp16 with loss scaling."""

from collections.abc import Iterator
from dataclasses import dataclass

from zinf.core.config.scalar import Count, Flag, NonNegative, Whole
from zinf.core.config.section import Section, Violation
from zinf.core.config.status import Auto
from zinf.core.config.unread import TABLE


@dataclass(frozen=True, slots=True)
class LossScaling:
    """How the loss is scaled so that small fp16 gradients do not vanish.

    Dynamic scaling (Micikevicius et al., https://arxiv.org/abs/1710.03740) halves the
    scale after `hysteresis` overflows, never below `min_scale`, and doubles it after
    `window` steps without one. Static scaling keeps `initial_scale`.
    """

    initial_scale: float
    window: int
    hysteresis: int
    min_scale: float
    dynamic: bool
    consecutive_hysteresis: bool


class BF16(Section):
    """bfloat16 compute copies of fp32 master parameters."""

    UNREAD = TABLE["bf16"]

    enabled: Auto[Flag] = False
    """Compute in bfloat16; masters and optimizer state stay fp32."""


class FP16(Section):
    """float16 compute copies of fp32 master parameters, with loss scaling."""

    UNREAD = TABLE["fp16"]

    enabled: Auto[Flag] = False
    """Compute in float16 with loss scaling; masters and optimizer state stay fp32."""

    loss_scale: Auto[NonNegative] = 0.0
    """Static loss scale; 0 scales dynamically."""

    initial_scale_power: Auto[Whole] = 16
    """The first dynamic loss scale is 2 to this power."""

    loss_scale_window: Auto[Count] = 1000
    """Steps without an overflow before the loss scale doubles."""

    hysteresis: Auto[Count] = 2
    """Overflows before the loss scale halves."""

    consecutive_hysteresis: Auto[Flag] = False
    """Every step without an overflow restores the full hysteresis."""

    min_loss_scale: Auto[NonNegative] = 1.0
    """The dynamic loss scale never falls below this."""

    def violations(self) -> Iterator[Violation]:
        initial = (
            2.0**self.initial_scale_power if self.initial_scale_power < 1024 else 0
        )
        if not self.loss_scale and not 0 < self.min_loss_scale <= initial:
            yield (
                ("min_loss_scale",),
                f"{self.min_loss_scale} is not between 0 and the initial scale, 2 to "
                f"the power of initial_scale_power = {self.initial_scale_power}.",
            )

    @property
    def loss_scaling(self) -> LossScaling | None:
        """The scaling asked for; None when fp16 is off."""
        if not self.enabled:
            return None
        return LossScaling(
            initial_scale=self.loss_scale or 2.0**self.initial_scale_power,
            window=self.loss_scale_window,
            hysteresis=self.hysteresis,
            min_scale=self.min_loss_scale,
            dynamic=self.loss_scale == 0,
            consecutive_hysteresis=self.consecutive_hysteresis,
        )


class DataTypes(Section):
    """Dtypes of other arrays than compute copies and masters."""

    UNREAD = TABLE["data_types"]
