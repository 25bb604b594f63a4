"""The steps of a run, by the shape of the batch; the first batch places all arrays."""

from collections.abc import Callable
from typing import Any

from zinf.core.engine.ahead import Ahead
from zinf.core.engine.condition import Condition
from zinf.core.engine.pending_save import PendingSave
from zinf.core.memory import Residents, Stores
from zinf.core.step.batch import signature, with_shapes_before
from zinf.core.step.planner import Planner
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.runner import AbstractRunner, switch
from zinf.core.step.setup import AtRest


class Runners:
    """A runner of training steps for each shape of batch.

    Attributes:
        stores, residents: exist from the first batch on, which places all arrays.
        by_shape: the runners that are made.
        current: the one of the latest batch.
        pending_save: the save that still reads arrays, if any.
        condition: whether the arrays can be used.
    """

    stores: Stores
    residents: Residents

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.by_shape: dict[tuple, AbstractRunner] = {}
        self.current: AbstractRunner | None = None
        self.ahead = Ahead()
        self.pending_save = PendingSave()
        self.condition = Condition()

    def placed(self) -> AbstractRunner:
        """The current runner, which exists from the first batch on."""
        if self.current is None:
            raise ValueError(
                "Arrays have their places when the first batch is known, and none was "
                "given yet. Pass batch= to zinf.initialize, or take a step first."
            )
        return self.current

    def at_rest(self) -> AtRest:
        """Where the arrays rest, once they are placed."""
        is_in_stacks = self.stores.stacks is not None
        return AtRest(self.residents.homes, self.residents.layouts, is_in_stacks)

    def flush(self) -> None:
        """Run the updates that the last step deferred, if any."""
        if self.current is not None:
            record = StepRecord()
            with self.condition.updating("What a step left to do", record):
                self.current.flush(record)

    def prepare(
        self, batch: Any, place: Callable[[AbstractPrepared], None]
    ) -> AbstractRunner:
        """The runner for the shape of a batch, which becomes the current one.

        Args:
            place: makes `stores` and `residents`; called at the first batch.
        """
        shape = signature(batch)
        if self.by_shape.get(shape) is not self.current:
            self.flush()
        if shape not in self.by_shape:
            with with_shapes_before(batch, self.by_shape):
                made = self.ahead.take(shape) or self._make(batch, place)
                self.by_shape[shape] = made
        self.current = switch(self.current, self.by_shape[shape])
        return self.current

    def prepare_ahead(self, batch: Any) -> None:
        """Have the runner for a shape made while steps run; see `Engine`."""
        shape, placed = signature(batch), self.current is not None
        if not placed or shape in self.by_shape or shape in self.ahead:
            return
        spec, at_rest = self.planner.batch_spec(batch), self.at_rest()
        # No reference to the engine: see `Engine.__init__`.
        planner, stores, wait = self.planner, self.stores, self.pending_save.wait

        def make() -> AbstractRunner:
            with planner.problem.modes.own():
                made = planner.plan(spec, at_rest)
                return made.runner(planner, stores, spec, wait)

        if planner.group.count > 1:
            self.by_shape[shape] = make()
        else:
            self.ahead.begin(shape, make)

    def close(self) -> None:
        """Wait for a save, close the stores and drop all runners."""
        self.ahead.close()
        self.pending_save.close(self.stores)
        self.by_shape.clear()
        self.current = None

    def _make(
        self, batch: Any, place: Callable[[AbstractPrepared], None]
    ) -> AbstractRunner:
        spec = self.planner.batch_spec(batch)
        is_first = self.current is None
        made = self.planner.plan(spec, None if is_first else self.at_rest())
        if is_first:
            place(made)
        wait = self.pending_save.wait
        return made.runner(self.planner, self.stores, spec, wait)
