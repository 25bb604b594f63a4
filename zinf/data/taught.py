"""Batches with what a teacher says of them, as a grain dataset.

Knowledge distillation (https://arxiv.org/abs/1503.02531) trains a student on the
teacher's logits too. The teacher runs before the step, forward alone, on tiers of its
own; so the step has its logits as an array of the batch, and stays a pure function. In
a Mixture-of-Students (DeepSpeed-MoE, https://arxiv.org/abs/2201.05596, section 4.2.2)
the teacher is left out from some step on, when it would hold the student back.
"""

from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np

from zinf.data.foreseen import AbstractForeseen
from zinf.data.paced import Paced, abstract

TEACHER_LOGITS = "teacher_logits"


class Taught(grain.IterDataset):
    """Batches of a dataset, with the logits of a teacher in the first steps.

    Args:
        data: batches that are mappings of arrays.
        teacher: from a batch to its logits, such as `lambda batch:
            engine.apply(logits, batch)` with an engine of the teacher.
        until_step: the step that has no `teacher_logits`, nor has any after it; None:
            all steps have them. Step 0 is the first.

    Raises:
        NotImplementedError: the steps of `data` get longer (`Paced`).
    """

    def __init__(
        self,
        data: grain.IterDataset,
        teacher: Callable[[Any], Any],
        *,
        until_step: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(data, Paced):
            raise NotImplementedError(
                "A teacher with steps that get longer is not supported yet. Use the "
                "dataset without Paced, or train without a teacher."
            )
        self.data, self.teacher, self.until_step = data, teacher, until_step

    def __iter__(self) -> "TaughtIterator":
        return TaughtIterator(self)


class TaughtIterator(AbstractForeseen):
    """Iterates over a `Taught`. Its state is that of the data, and the steps taken."""

    def __init__(self, taught: Taught) -> None:
        super().__init__()
        self._taught = taught
        self._batches = iter(taught.data)
        self._step = 0
        self._like: Any = None
        self._logits: jax.ShapeDtypeStruct | None = None

    def __next__(self) -> Any:
        batch = next(self._batches)
        is_taught = self._is_taught(self._step)
        self._step += 1
        if not isinstance(batch, Mapping) or TEACHER_LOGITS in batch:
            raise ValueError(
                f"A teacher's logits are added to batches as {TEACHER_LOGITS!r}, and "
                f"the batch is {_described(batch)}. Give mappings of arrays without it."
            )
        self._like = abstract(batch)
        if not is_taught:
            return batch
        logits = np.asarray(self._taught.teacher(batch))
        self._logits = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        return {**batch, TEACHER_LOGITS: logits}

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON."""
        return {"data": self._batches.get_state(), "step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position that `get_state` returned."""
        self._batches.set_state(state["data"])
        self._step = state["step"]

    def whole(self) -> Any:
        """Shapes and dtypes of the largest batch. One batch must be taken."""
        if self._logits is None:
            return self._like
        return {**self._like, TEACHER_LOGITS: self._logits}

    def coming(self, num_steps: int) -> list[Any]:
        """Shapes and dtypes of the next batches, each once, in order of first use."""
        end = self._step + num_steps
        until = self._taught.until_step
        until = end if until is None else min(until, end)
        is_known = self._logits is not None
        shapes = [self.whole()] if is_known and self._step < until else []
        if max(self._step, until) < end:
            shapes.append(self._like)
        return shapes

    def _is_taught(self, step: int) -> bool:
        until = self._taught.until_step
        return until is None or step < until


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping of {', '.join(batch)}"
    return f"a {type(batch).__name__}"
