"""The few numbers that a resume needs besides the arrays of leaves."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import jax
import numpy as np

from zinf.core.config import LossScaling
from zinf.core.engine.saved_scalars import parse_scalars
from zinf.core.optim.advance import Advance
from zinf.core.optim.decision import ADVICE, UNTOUCHED, NonFiniteError
from zinf.core.optim.loss_scale import LossScale, LossScaleSettings
from zinf.core.optim.separate import Separated
from zinf.core.optim.update import compile_advance
from zinf.core.sharding.mesh import first_cpu

# The last one is of the schedule, by which optax's optimizers end.
COUNT = re.compile(r"\bcount\W*$")


class Scalars:
    """Step count, loss scale, and optimizer state that all leaves share.

    Attributes:
        num_steps: number of steps taken, with skipped ones.
        num_skipped: number of steps that changed nothing, as their loss or gradients
            were not finite.
        num_summed: batches whose gradients wait in sums for the next update.
    """

    def __init__(
        self,
        separated: Separated,
        loss_scaling: LossScaling | None,
        *,
        max_skipped: int = 0,
    ):
        """See `Config.skip_nonfinite` for `max_skipped`."""
        self._separated, self._max_skipped = separated, max_skipped
        self.num_steps = self.num_skipped = self._num_skipped_in_row = 0
        self.num_summed = 0
        self._shared = [np.asarray(s.value) for s in separated.shared]
        self._settings = None
        self._scale = None
        if loss_scaling is not None:
            self._settings = LossScaleSettings(**asdict(loss_scaling))
            self._scale = LossScale.initial(self._settings)

    @cached_property
    def _advance(self) -> Any:
        # On the CPU, because on a device the result would wait behind queued work.
        return compile_advance(self._separated, device=first_cpu())

    @cached_property
    def _rate(self) -> Any:
        rate = self._separated.rate
        return None if rate is None else jax.jit(rate)

    @property
    def is_scaled(self) -> bool:
        return self._scale is not None

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite may be left out."""
        return self.is_scaled or self._max_skipped > 0

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.scale

    def learning_rate(self, advanced: Sequence[np.ndarray]) -> float | None:
        """The learning rate of a step, by `optax.inject_hyperparams` or schedule.

        None if the optimizer has no one rate.

        Args:
            advanced: the shared optimizer state after the step. An injected rate in it
                is that of the step; its count includes the update of the step.
        """
        count = 1
        for state, value in zip(self._separated.shared, advanced, strict=True):
            if state.optax_path.replace("'", "").rstrip("]").endswith("learning_rate"):
                return float(value)
            if COUNT.search(state.optax_path):
                count = int(value)
        if self._rate is None:
            return None
        with jax.default_device(first_cpu()):
            return float(self._rate(np.int32(count - 1)))

    def advance(self) -> Advance:
        """Shared state and step values of the next step. Changes nothing."""
        return Advance(
            self._shared,
            self._advance,
            reads_loss=self._separated.reads_loss,
            norm_groups=self._separated.norm_groups,
        )

    def commit(self, advanced: Sequence[np.ndarray], *, skipped: bool) -> None:
        """Count a step. A skipped step does not advance the optimizer's own count.

        Raises:
            NonFiniteError: `skip_nonfinite` steps in a row were skipped before this
                one. The step is not counted.
        """
        in_row = self._num_skipped_in_row + 1 if skipped else 0
        if not self.is_scaled and 0 < self._max_skipped < in_row:
            raise NonFiniteError(
                f"The loss or a gradient was not finite in {in_row} steps in a row, "
                f"and skip_nonfinite is {self._max_skipped}. {ADVICE} {UNTOUCHED}"
            )
        self._num_skipped_in_row = in_row
        self.num_skipped += skipped
        self.num_steps += 1
        if not skipped:
            self._shared = list(advanced)
        if self._scale is not None:
            self._scale = self._scale.update(skipped)

    def to_json(self) -> dict[str, Any]:
        """All of it, and which arrays of a checkpoint are averages of weights.

        Those are in "averages": by kind, the slot of the state array of each leaf.
        """
        averages = {
            kind: {path: state.slot for path, state in states.items()}
            for kind, states in self._separated.averages().items()
        }
        return {
            **({"averages": averages} if averages else {}),
            "num_steps": self.num_steps,
            "shared": [
                {"name": s.optax_path, "dtype": str(x.dtype), "value": x.tolist()}
                for s, x in zip(self._separated.shared, self._shared, strict=True)
            ],
            "loss_scale": None if self._scale is None else self._scale.to_dict(),
            "num_skipped": self.num_skipped,
            "num_skipped_in_row": self._num_skipped_in_row,
            **({"num_summed": self.num_summed} if self.num_summed else {}),
        }

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Restore what `to_json` returned.

        Raises:
            ValueError: the state is of another optimizer, or damaged. Then nothing was
                changed (see [Note: saved scalars]).
        """
        saved = parse_scalars(state)
        names = [s.optax_path for s in self._separated.shared]
        found = [s.name for s in saved.shared]
        if found != names:
            raise ValueError(
                f"The saved optimizer shares {found}, this one {names}. Resume with "
                "the optimizer that the run was started with."
            )
        pairs = zip(saved.shared, self._shared, strict=True)
        self._shared = [s.array(like) for s, like in pairs]
        self.num_steps, self.num_skipped = saved.num_steps, saved.num_skipped
        self._num_skipped_in_row = saved.num_skipped_in_row
        self.num_summed = saved.num_summed
        if self._settings is not None and saved.loss_scale is not None:
            scale = saved.loss_scale.model_dump()
            self._scale = LossScale.from_dict(self._settings, scale)
