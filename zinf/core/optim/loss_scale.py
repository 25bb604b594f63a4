"""Dynamic loss scaling for fp16, step for step as DeepSpeed's `DynamicLossScaler`.

The loss is multiplied by a scale so that small gradients survive in fp16. A step whose
gradients overflow is skipped; after `hysteresis` of them the scale halves with each
further one. After `window` clean steps in a row it doubles.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

SCALE_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class LossScaleSettings:
    """Settings, in DeepSpeed's words.

    Attributes:
        initial_scale: 2 ** `initial_scale_power`; the scale itself if not `dynamic`.
        window: clean steps in a row before the scale doubles.
        hysteresis: number of overflows before the scale halves.
        consecutive_hysteresis: a clean step restores `hysteresis`, not only a doubling.
        min_scale: the scale never falls below.
    """

    initial_scale: float
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    dynamic: bool = True
    consecutive_hysteresis: bool = False


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of the coming step, and the state that decides the next one.

    Attributes:
        scale: multiplies the loss; gradients are multiplied by its inverse.
        step: steps taken, skipped ones included.
        last_overflow: the latest step that overflowed; -1 before any.
        patience: overflows left before the scale halves.
    """

    settings: LossScaleSettings
    scale: float
    step: int = 0
    last_overflow: int = -1
    patience: int

    @classmethod
    def initial(cls, settings: LossScaleSettings) -> "LossScale":
        return cls(
            settings=settings,
            scale=float(settings.initial_scale),
            patience=settings.hysteresis,
        )

    @classmethod
    def from_dict(
        cls, settings: LossScaleSettings, state: dict[str, Any]
    ) -> "LossScale":
        """The state that `to_dict` gave, under the settings of this run."""
        return cls(settings=settings, **state)

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON-able numbers, without the settings."""
        state = asdict(self)
        del state["settings"]
        return state

    @property
    def inverse(self) -> float:
        return 1.0 / self.scale

    def update(self, overflow: bool) -> "LossScale":
        """The state after a step whose gradients did or did not overflow.

        Raises:
            FloatingPointError: the gradients overflow at the smallest scale.
        """
        if not self.settings.dynamic:
            return replace(self, step=self.step + 1)
        after = self._after_overflow() if overflow else self._after_clean_step()
        return replace(after, step=self.step + 1)

    def _after_overflow(self) -> "LossScale":
        last = replace(self, last_overflow=self.step)
        if self.settings.hysteresis != 1 and self.patience != 1:
            return replace(last, patience=self.patience - 1)
        if self.scale == self.settings.min_scale:
            raise FloatingPointError(
                f"The gradients of step {self.step} overflow although the loss scale "
                f"is at its minimum of {self.scale:g}. Lower the learning rate, lower "
                "`fp16.min_loss_scale`, or train in bf16, which needs no loss scale."
            )
        # The patience stays at 1: further overflows halve the scale at once.
        halved = max(self.scale / SCALE_FACTOR, self.settings.min_scale)
        return replace(last, scale=halved)

    def _after_clean_step(self) -> "LossScale":
        settings, after = self.settings, self
        if settings.consecutive_hysteresis:
            after = replace(after, patience=settings.hysteresis)
        # Clean steps before this one, so the scale doubles at the (window + 1)-th.
        clean_steps = self.step - self.last_overflow - 1
        if clean_steps > 0 and clean_steps % settings.window == 0:
            doubled = self.scale * SCALE_FACTOR
            after = replace(after, scale=doubled, patience=settings.hysteresis)
        return after
