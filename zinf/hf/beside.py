"""Opens a model in training after the frozen models beside it, within one budget."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.plan import InfeasibleError
from zinf.distributed import AbstractGroup
from zinf.hf.engine import ModelEngine
from zinf.hf.frozen import Frozen, in_words
from zinf.hf.judge import Judge
from zinf.hf.model import Model
from zinf.hf.objectives.objective import Drawing
from zinf.hf.reference import TEACHER, check_length, open_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beside:
    """What a run from rewards opens before the model in training.

    Attributes:
        policy: the model in training, without a critic.
        judges: the reward models.
        spec: shapes and dtypes of the batches of all processes.
    """

    config: Config
    drawing: Drawing
    policy: Model
    judges: Sequence[Judge]
    spec: Mapping[str, jax.ShapeDtypeStruct]

    def open(
        self,
        trained: Callable[[Config], ModelEngine],
        mesh: Mesh,
        group: AbstractGroup,
        notes: Callable[[], list[str]],
    ) -> ModelEngine:
        """The engine of the model in training, with the others.

        Args:
            trained: opens it, with a config that has the budgets that are left.
            notes: what it takes, in sentences for an error.

        Raises:
            InfeasibleError: the budgets have no room for all of them.
        """
        config, frozen = self.config, list[Frozen]()
        rows, length = self.spec["input_ids"].shape
        shape = {"rows": rows, "length": length, "group": group}
        with ExitStack() as stack:
            reference = teacher = None
            if self.drawing.has_copy(config):
                given = self.policy, config, mesh, self.spec
                reference = open_reference(*given, group=group)
                config = placed(reference.frozen, config, frozen, stack)
            opened = []
            for number, judge in enumerate(self.judges, 2):
                found = judge.open(config, mesh, **shape, number=number)
                assert found.frozen is not None, "it is opened"
                opened.append(found)
                config = placed(found.frozen, config, frozen, stack)
            model = self.drawing.teacher(self.policy, config)
            if model is not None:
                check_length(model, length)
                named = {"title": f"the {TEACHER}", "number": 2 + len(opened)}
                read = {name: self.spec[name] for name in ("input_ids", "labels")}
                given = model, config, mesh, read
                teacher = open_reference(*given, **named, group=group)
                config = placed(teacher.frozen, config, frozen, stack)
            try:
                engine = trained(config)
            except InfeasibleError as error:
                raise error.because(in_words(frozen) + notes()) from None
            stack.pop_all()
        engine.reference, engine.judges = reference, tuple(opened)
        engine.teacher = teacher
        return engine


def placed(
    frozen: Frozen, config: Config, before: list[Frozen], stack: ExitStack
) -> Config:
    """The config of what is placed after a frozen model, which joins those `before`."""
    stack.callback(frozen.close)
    before.append(frozen)
    logger.info(frozen.brief())
    return frozen.beside(config)
