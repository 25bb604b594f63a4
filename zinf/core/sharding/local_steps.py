"""0/1 Adam: gradients by signs between updates of the variance, then local steps.

Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1
Adam" (arXiv:2202.06009), as DeepSpeed's ZeroOneAdam has it. Until `var_freeze_step`
updates the variance changes in ever fewer steps, which alone exchange gradients as they
are. Then devices take steps of their own and send nothing, and every so many steps they
average the sums of these steps by their signs.

Steps are counted as DeepSpeed does, whose first call of `step` only makes buffers: the
first update is its step 2. All that is sent depends on that count alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from zinf.core.sharding.layout import Layout
from zinf.core.sharding.signs import (
    AbstractCompression,
    Arrays,
    Phase,
    SignedParts,
    lost_by,
    with_lost,
)

FIRST_STEP = 2
# Among the errors of a leaf, after those of signs: the sum of the steps of a device,
# and its momentum.
STEPS_SLOT, MOMENTUM_SLOT = 2, 3


@dataclass(frozen=True)
class LocalSteps(AbstractCompression):
    """What 0/1 Adam sends.

    Attributes:
        b1: the decay of the momentum.
        eps: is added to the root of the variance.
        weight_decay: decoupled, per step and learning rate.
        var_freeze_step: updates after which the variance stays and steps are local.
        var_update_scaler: updates of the variance after which the interval between
            them doubles; it begins as 1.
        local_step_scaler: local steps after which the interval between exchanges
            doubles; it begins as 1.
        local_step_clipper: the longest of these intervals.
    """

    b1: float
    eps: float
    weight_decay: float
    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    phases = (Phase.GRADIENTS, Phase.PLAIN, Phase.LOCAL, Phase.STEPS)
    num_rates = 3

    @property
    def warm_up(self) -> int:
        return self.var_update_scaler

    @cached_property
    def variance_ends(self) -> tuple[int, ...]:
        """The steps after which the interval between updates of the variance doubles,
        as DeepSpeed counts them, until the variance stays."""
        ends, step, interval = [], FIRST_STEP - 1, 1
        while step < self.var_freeze_step + FIRST_STEP:
            first = (step // interval + 1) * interval
            step = first + (self.var_update_scaler - 1) * interval
            ends.append(step)
            interval *= 2
        return tuple(ends)

    def updates_variance(self, number: Any) -> Any:
        """Whether an update changes the variance, by the number before it; traceable.

        Only of updates before `var_freeze_step`.
        """
        step = number + FIRST_STEP
        interval = 2 ** (jnp.asarray(self.variance_ends) < step).sum()
        return step % interval == 0

    def phase(self, number: int) -> Phase:
        if number < self.var_freeze_step:
            return Phase.PLAIN if self.updates_variance(number) else Phase.GRADIENTS
        return Phase.STEPS if self._is_exchanged(number) else Phase.LOCAL

    def _is_exchanged(self, number: int) -> bool:
        """Whether a local step ends in an exchange."""
        num_doubled = (number - self.var_freeze_step) // self.local_step_scaler
        interval = min(2**num_doubled, self.local_step_clipper)
        return (number + FIRST_STEP) % interval == 0

    def forgets(self, number: int) -> bool:
        return number == self.var_freeze_step

    def parts(self, total: Layout, phase: Phase) -> "OwnSteps | None":
        return None if phase == Phase.PLAIN else OwnSteps(total)

    def in_words(self, num_leaves: int) -> str:
        return (
            f"Of {num_leaves} leaves gradients are averaged by their signs, but for "
            f"steps that update the variance; after {self.var_freeze_step:,} updates "
            "devices take steps of their own, whose sums are averaged by signs"
        )

    def rates(self, number: int, rate: Callable[[int], Any]) -> tuple[float, ...]:
        """For a local step its learning rate, the sum of the rates since the last
        exchange, and 1 if it is the first step since then."""
        if number < self.var_freeze_step:
            return (0.0,) * self.num_rates
        first = number
        while not self._is_first(first):
            first -= 1
        rates = [float(rate(n)) for n in range(first, number + 1)]
        return rates[-1], sum(rates), float(first == number)

    def _is_first(self, number: int) -> bool:
        """Whether a local step is the first one since an exchange."""
        return number == self.var_freeze_step or self._is_exchanged(number - 1)

    def merged(
        self, number: int, errors: Sequence[np.ndarray], arrays: Arrays
    ) -> dict[str, np.ndarray]:
        """See `AbstractCompression`: of local steps, as an exchange without signs."""
        if self.forgets(number):
            return {}
        if number < self.var_freeze_step:
            return with_lost(errors, arrays, self.b1, 1 - self.b1)
        root = np.sqrt(arrays["nu"]) + self.eps
        lost = lost_by(errors, root.shape) / root
        steps = errors[STEPS_SLOT][0, 0] + np.where(arrays["nu"] > 0, lost, 0)
        new = {"master": arrays["master"] + steps}
        if not self._is_first(number):
            new["mu"] = errors[MOMENTUM_SLOT][0, 0]
        return new

    def begun(
        self, number: int, shapes: Sequence[tuple[int, ...]], arrays: Arrays
    ) -> dict[int, np.ndarray]:
        """See `AbstractCompression`."""
        shape = shapes[MOMENTUM_SLOT]
        return {MOMENTUM_SLOT: np.broadcast_to(arrays["mu"], shape)}


@dataclass(frozen=True)
class OwnSteps(SignedParts):
    """Parts of gradients by signs, and what local steps of devices leave.

    After the two errors, `errors` are the sum of the steps of a device since the last
    exchange, and its momentum.
    """

    def error_shapes(self, count: int) -> tuple[tuple[int, ...], ...]:
        own = 1, count, *self.total.shape
        return (*super().error_shapes(count), own, own)
