"""A frozen model beside the one in training, from whose predictions that one learns.

Knowledge distillation (https://arxiv.org/abs/1503.02531), such as of a model with fewer
layers from the whole one (`zinf prune --layers`; XTC, https://arxiv.org/abs/2206.01859,
and Mixture-of-Students, https://arxiv.org/abs/2201.05596). The teacher runs forward
alone before each step, on its own tiers, and its logits are an array of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.problem.weighted import Weighted
from zinf.data import TEACHER_LOGITS, Taught
from zinf.hf.actor_critic import check_tokens
from zinf.hf.batch import entropies
from zinf.hf.engine import ModelEngine, open_model
from zinf.hf.frozen import Frozen, place
from zinf.hf.model import Batch, Model, Params, load_as_stored
from zinf.hf.reference import TEACHER, check_length
from zinf.models.divergence import divergence

# The logits of the last step, which its batch still holds, and those being made.
HELD_LOGITS = 2
Spec = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Distilled:
    """The loss of a student.

    Attributes:
        coefficient: the mean divergence from the teacher is added so many times.
        temperature: logits of both are divided by it.
    """

    model: Model
    coefficient: float
    temperature: float

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        """`Model.loss`, and the divergence from a teacher over the same tokens.

        Args:
            batch: as for `Model.loss`; maybe with `teacher_logits` (batch, tokens,
                words). Without them it is that loss.
        """
        own = {name: x for name, x in batch.items() if name != TEACHER_LOGITS}
        if TEACHER_LOGITS not in batch:
            return self.model.loss(params, own, *key, train=train)
        logits = self.model.logits(params, own, *key, train=train).astype(jnp.float32)
        losses, is_trained = entropies(logits, own)
        gaps = divergence(logits, batch[TEACHER_LOGITS], temperature=self.temperature)
        losses += self.coefficient * jnp.where(is_trained, gaps, 0.0)
        return Weighted(jnp.sum(losses), jnp.sum(is_trained.astype(jnp.float32)))


def teacher_of(config: Config, student: Model, length: int) -> Model:
    """The teacher that a config names, without its weights; the same object each time.

    Raises:
        ValueError: it has other tokens, or reads shorter texts, than the student.
    """
    assert config.distillation is not None
    teacher = _loaded(str(config.distillation.teacher), student)
    check_length(teacher, length)
    return teacher


@lru_cache(maxsize=1)
def _loaded(name: str, student: Model) -> Model:
    """The teacher of a student, which predicts the same tokens."""
    teacher = load_as_stored(name)
    if teacher.vocab_size != student.vocab_size:
        raise ValueError(
            f"The teacher {teacher.name} has {teacher.vocab_size:,} words, and "
            f"{student.name} {student.vocab_size:,}. Both must predict the same tokens."
        )
    check_tokens(student, teacher, TEACHER, "--teacher, distillation.teacher")
    return teacher


def logits_spec(teacher: Model, rows: int, length: int) -> jax.ShapeDtypeStruct:
    """What a teacher says of a batch."""
    dtype = numpy_dtype(teacher.dtype)
    return jax.ShapeDtypeStruct((rows, length, teacher.vocab_size), dtype)


@dataclass(frozen=True)
class Teacher:
    """A teacher whose weights are on their tiers."""

    frozen: Frozen
    num_microbatches: int

    def taught(self, data: grain.IterDataset, config: Config) -> Taught:
        """Batches of the student with what this teacher says of them."""
        assert config.distillation is not None
        ask = partial(_logits, self.frozen.engine, self.num_microbatches)
        return Taught(data, ask, until_step=config.distillation.until_step)


def open_teacher(teacher: Model, config: Config, mesh: Mesh, spec: Spec) -> Teacher:
    """A teacher with its weights, within its share of the budgets of a config.

    Args:
        spec: of the longest batch, without its logits.

    Raises:
        InfeasibleError: it does not fit its share.
    """
    rows, length = spec["input_ids"].shape
    count = config.num_microbatches
    zeros = {name: np.zeros(x.shape, x.dtype) for name, x in spec.items()}

    def run(own: Config) -> ModelEngine:
        engine = open_model(teacher, own, rows=rows, length=length)
        _logits(engine, count, zeros)
        return engine

    made = logits_spec(teacher, rows, length)
    nbytes = HELD_LOGITS * made.size * made.dtype.itemsize
    named = {"number": 1, "output_bytes": nbytes}
    frozen = place(f"the {TEACHER}", config, mesh, run, **named)
    return Teacher(frozen, count)


def _logits(engine: ModelEngine, count: int, batch: Mapping[str, Any]) -> Any:
    """The teacher's logits (rows, tokens, words)."""
    read = {name: x for name, x in batch.items() if name != "labels"}
    return engine.apply(
        engine.applied(engine.model.logits), read, num_microbatches=count
    )
