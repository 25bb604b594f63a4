"""The teacher of a config's `distillation` section: planned, opened and asked.

The teacher and the model that it teaches are two engines in one process, and the
budgets hold for both together: the teacher is planned first, and the other model gets
what the teacher leaves.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import grain
import optax
from jax.sharding import Mesh

from zinf import models
from zinf.checkpoint import Place, Saved
from zinf.cli.evaluate import SavedEngine
from zinf.cli.gpt_task import GptTask, gpt_config
from zinf.cli.places import place_of_checkpoints
from zinf.core.config import Config, grouping
from zinf.core.engine.initialize import make_planner
from zinf.core.interchange import find
from zinf.core.machine.beside import in_own_folders, within
from zinf.core.machine.devices import group_devices, on_devices
from zinf.core.machine.resources import Resources
from zinf.core.plan import InfeasibleError, Shortage, show_bytes
from zinf.core.program import Tier
from zinf.core.segment import user_function
from zinf.core.step.forward import plan_forward
from zinf.core.step.planner import Planner
from zinf.core.step.setup import AtRest
from zinf.core.topology import Topology
from zinf.data import TEACHER_LOGITS, Taught
from zinf.distributed import Alone

KEY = "distillation.teacher"
# The logits of the last step, which its batch still holds, and those being made.
HELD_LOGITS = 2


@dataclass(frozen=True)
class Teacher:
    """A teacher that is planned, and holds nothing yet.

    Attributes:
        student: the config of the model that it teaches.
        config: of the run that made the teacher.
        logits: `(params, batch) -> logits`.
        batch: shapes of a batch of the student, without logits.
        held_bytes: the most bytes that the teacher and its logits hold, by tier.
        budgets: those of the student's config, for both.
    """

    student: Config
    config: Config
    planner: Planner
    logits: Callable
    batch: Any
    held_bytes: Mapping[Tier, int]
    budgets: Mapping[Tier, int]

    @property
    def path(self) -> Path:
        assert self.student.distillation is not None
        return self.student.distillation.teacher

    def summary(self) -> str:
        """The teacher's size, and what it holds, in one line."""
        held = [f"{show_bytes(n)} of {t}" for t, n in self.held_bytes.items() if n]
        count = models.num_parameters(gpt_config(self.config))
        return f"teacher {self.path}: {count:,} parameters, holds {', '.join(held)}"

    def beside(self) -> Config:
        """The student's config, with budgets of what the teacher leaves.

        Raises:
            InfeasibleError: the teacher leaves nothing.
        """
        alone = f"the teacher {self.path}"
        short = {
            tier: Shortage(self.budgets[tier], self.held_bytes[tier], alone)
            for tier in (Tier.DEVICE, Tier.HOST)
            if self.held_bytes[tier] >= self.budgets[tier]
        }
        if short:
            raise InfeasibleError(short, self.budgets)
        left = {t: max(n - self.held_bytes[t], 1) for t, n in self.budgets.items()}
        return within(self.student, left)

    @contextmanager
    def named_in_errors(self) -> Generator[None, None, None]:
        """In the `with` block, infeasible plans also say what the teacher takes."""
        try:
            yield
        except InfeasibleError as error:
            budgets = " and ".join(
                f"{self.held_bytes[tier]:,} bytes of {tier.row.budget}"
                for tier in error.shortages
            )
            text = f"The teacher {self.path} takes {budgets}, which is not in these."
            raise error.because([text]) from None

    def open(self) -> "OpenTeacher":
        """The teacher with the parameters of its checkpoint, on its tiers.

        Raises:
            FileNotFoundError: its run has no such checkpoint.
        """
        assert self.student.distillation is not None
        step = self.student.distillation.step
        with Saved(find(place_of_checkpoints(self.config), step)) as saved:
            engine = SavedEngine(self.planner, None)
            engine.saved = saved
            engine.prepare(self.batch)
        return OpenTeacher(self, engine, saved.directory.parent)


@dataclass(frozen=True)
class OpenTeacher:
    """A teacher whose parameters are on their tiers. `close` frees them.

    Attributes:
        checkpoint: the folder of the step whose parameters it has.
    """

    teacher: Teacher
    engine: SavedEngine
    checkpoint: Place

    def taught(self, data: grain.IterDataset) -> Taught:
        """Batches of the student with what this teacher says of them."""
        student = self.teacher.student
        assert student.distillation is not None
        ask = partial(
            self.engine.apply,
            self.teacher.logits,
            num_microbatches=student.num_microbatches,
        )
        return Taught(data, ask, until_step=student.distillation.until_step)

    def close(self) -> None:
        self.engine.close()


def plan_teacher(
    student: Config, mesh: Mesh, machine: Topology | None = None
) -> Teacher:
    """The teacher of a config that has one, planned within the budgets of both configs.

    Args:
        mesh: the devices of the student. Its budgets are per device.
        machine: of the mesh, if nothing is run.

    Raises:
        InfeasibleError: it does not fit.
    """
    assert student.distillation is not None
    path = student.distillation.teacher
    if student.model is not None and student.model.huggingface is not None:
        raise NotImplementedError(
            "zinf plan does not know teachers of transformers yet; zinf train and zinf "
            "finetune place them. Leave it out with --set distillation=null."
        )
    on = None
    if machine is not None:
        on = group_devices(machine.devices(), grouping(path, ()))
    config, on = on_devices(path, on)
    _check(config, student)
    named = GptTask(student).arguments()[1]
    batch = dict(named["batch"])
    logits_spec = batch.pop(TEACHER_LOGITS)
    budgets = Resources(student, mesh, Alone(), machine).capacity
    own = Resources(config, on, Alone(), machine).capacity
    most = {t: min(own[t], budgets[t]) for t in (Tier.DEVICE, Tier.HOST)}
    config = in_own_folders(within(config, own | most))
    shape = replace(gpt_config(config), dropout=0.0, random_ltd_layers=())
    init, loss = models.init_and_loss(shape, seed=config.run.seed)
    count = student.num_microbatches
    quiet = config.without_training().told()
    quiet = quiet.model_copy(update={"gradient_accumulation_steps": count})
    on_machine = {"mesh": on, "topology": machine}
    planner = make_planner(loss, init, optax.identity(), quiet, **on_machine)
    logits, spec = models.logits_of(shape), planner.batch_spec(batch)
    try:
        placed = planner.plan(spec)
        forward = plan_forward(
            planner,
            user_function(logits, planner.problem, None),
            spec,
            AtRest(placed.plan.homes, placed.layouts),
            num_microbatches=count,
        )
    except InfeasibleError as error:
        raise error.because([f"This is the teacher, {path}."]) from None
    peaks = placed.plan.peak_bytes, forward.plan.peak_bytes
    held = {tier: max(peak[tier] for peak in peaks) for tier in Tier}
    logits_bytes = prod(logits_spec.shape) * logits_spec.dtype.itemsize
    held[Tier.HOST] += HELD_LOGITS * logits_bytes
    return Teacher(student, config, planner, logits, batch, held, budgets)


def _check(teacher: Config, student: Config) -> None:
    """Raise if a model cannot be the teacher of another one."""
    unknown = {
        "model.huggingface": teacher.model is not None
        and teacher.model.huggingface is not None,
        "adapter": teacher.adapter is not None,
    }
    for name in (name for name, is_used in unknown.items() if is_used):
        raise NotImplementedError(
            f"{KEY}: its config has {name}, which is not supported for teachers yet."
        )
    theirs, ours = gpt_config(teacher), gpt_config(student)
    if theirs.vocab_size != ours.vocab_size:
        raise ValueError(
            f"{KEY}: its model.vocab_size is {theirs.vocab_size:,}, and that of this "
            f"config {ours.vocab_size:,}. Both must predict the same tokens."
        )
    if theirs.max_length < student.sequence_length:
        raise ValueError(
            f"{KEY}: its model.max_length is {theirs.max_length:,} tokens, and "
            f"data.sequence_length of this config {student.sequence_length:,}. Lower "
            "data.sequence_length, or train a teacher of longer sequences."
        )
