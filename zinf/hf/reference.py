"""Frozen models beside the one in training that score its tokens.

The reference is what it was when it began; a teacher is another model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.sharding import rows_of_process
from zinf.distributed import AbstractGroup
from zinf.hf.engine import ModelEngine, open_model
from zinf.hf.frozen import ALONE, Frozen, place
from zinf.hf.model import Model

TEACHER = "teacher"


@dataclass(frozen=True)
class Reference:
    """The weights of a model's files on tiers of their own."""

    frozen: Frozen
    temperature: float
    num_microbatches: int

    def __call__(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Log-probabilities of tokens, float32 (rows of all processes, tokens - 1).

        Args:
            batch: this process's rows.
        """
        engine = self.frozen.engine
        return _scores(engine, batch, self.temperature, self.num_microbatches)


def open_reference(
    model: Model,
    config: Config,
    mesh: Mesh,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    *,
    group: AbstractGroup = ALONE,
    title: str = "the reference",
    number: int = 1,
) -> Reference:
    """A frozen model of a config, with the weights of the model's files.

    Args:
        spec: shapes and dtypes of the batches of all processes that it scores.
        group: the processes that run it together.
        title, number: see `zinf.hf.frozen.place`.

    Raises:
        InfeasibleError: it does not fit its share of the budgets.
    """
    temperature, count = config.completions.temperature, config.num_microbatches
    rows, length = spec["input_ids"].shape
    here = rows_of_process(mesh, rows)
    zeros = {name: np.zeros((here, *x.shape[1:]), x.dtype) for name, x in spec.items()}

    def run(own: Config) -> ModelEngine:
        engine = open_model(model, own, rows=rows, length=length, group=group)
        _scores(engine, zeros, temperature, count)
        return engine

    named = {"number": number, "output_bytes": rows * length * np.float32().itemsize}
    frozen = place(title, config, mesh, run, **named, group=group)
    return Reference(frozen, temperature, count)


def check_length(teacher: Model, length: int) -> None:
    """Refuse a teacher that was made for fewer tokens than rows have.

    Raises:
        ValueError: see above.
    """
    if teacher.max_length is not None and teacher.max_length < length:
        raise ValueError(
            f"The teacher {teacher.name} reads {teacher.max_length:,} tokens, and rows "
            f"have {length:,}. Lower data.sequence_length (--sequence-length)."
        )


def _scores(
    engine: ModelEngine, batch: Mapping[str, Any], temperature: float, count: int
) -> np.ndarray:
    names = engine.model.scored_leaves
    scored = {name: batch[name] for name in names}
    return engine.log_probabilities(
        scored, temperature=temperature, num_microbatches=count
    )
