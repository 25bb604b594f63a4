"""The steps of a run, by the shape of the batch; the first batch places all arrays."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from zinf.core.engine.ahead import Ahead
from zinf.core.engine.condition import Condition
from zinf.core.engine.pending_save import PendingSave
from zinf.core.engine.recent import Recent, SameFunction
from zinf.core.memory import Residents, Stores
from zinf.core.optim.advance import Advance
from zinf.core.optim.update import compile_advance
from zinf.core.sharding.mesh import first_cpu
from zinf.core.step.batch import signature, with_shapes_before
from zinf.core.step.planner import Planner
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.run.outcome import Outcome
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.runner import AbstractRunner, switch
from zinf.core.step.setup import AtRest

# Losses, beside that of training, whose runners are kept.
MAX_LOSSES = 8


@dataclass(frozen=True)
class OtherLoss:
    """Another loss than that of training, of the same parameters.

    Attributes:
        given: the user's function, by which losses are told apart.
        function: with the arguments of the loss of training.
    """

    given: SameFunction
    has_aux: bool
    function: Callable = field(compare=False)


class Runners:
    """A runner of training steps for each shape of batch.

    If gradients are summed over several batches, a runner adds those of one, and
    `update` updates from the sums.

    Attributes:
        stores, residents: exist from the first batch on, which places all arrays.
        by_shape: the runners that are made, of the loss of training.
        of_losses: the same for each other loss.
        current: the one of the latest batch.
        pending_save: the save that still reads arrays, if any.
        condition: whether the arrays can be used.
    """

    stores: Stores
    residents: Residents

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.by_shape: dict[tuple, AbstractRunner] = {}
        self.of_losses: Recent[dict[tuple, AbstractRunner]] = Recent(MAX_LOSSES)
        self._updating: AbstractRunner | None = None
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
        self,
        batch: Any,
        place: Callable[[AbstractPrepared], None],
        loss: OtherLoss | None = None,
    ) -> AbstractRunner:
        """The runner for the shape of a batch, which becomes the current one.

        Args:
            place: makes `stores` and `residents`; called at the first batch.
            loss: None: that of training.
        """
        shape, by_shape = signature(batch), self.by_shape
        if loss is not None:
            by_shape = self.of_losses.get(loss, dict)
        if by_shape.get(shape) is not self.current:
            self.flush()
        if shape not in by_shape:
            with with_shapes_before(batch, by_shape):
                ahead = self.ahead.take(shape) if loss is None else None
                by_shape[shape] = ahead or self._make(batch, place, loss)
        self.current = switch(self.current, by_shape[shape])
        return self.current

    def update(self, advance: Advance, record: StepRecord) -> Outcome:
        """Update from the sums of gradients.

        Raises:
            NonFiniteError: a sum is not finite; nothing was updated.
        """
        assert self._updating is not None, "sums have gradients, so they are placed"
        # What the runner of a batch has on the device is not in this plan.
        current = self.placed()
        switch(current, self._updating)
        try:
            given = {"advance": advance, "loss_scale": 1.0, "record": record}
            return self._updating.step({}, [], **given)
        finally:
            switch(self._updating, current)

    def sums_advance(self, num_summed: int) -> Advance:
        """The step values of adding gradients to sums that have so many batches."""
        before = [np.array(num_summed, np.int32)]
        return Advance(before, self._advance_sums, reads_loss=False)

    @cached_property
    def _advance_sums(self) -> Callable:
        separated = self.planner.of_batches.separated
        return compile_advance(separated, device=first_cpu())

    def prepare_ahead(self, batch: Any) -> None:
        """Have the runner for a shape made while steps run; see `Engine`."""
        shape, placed = signature(batch), self.current is not None
        if not placed or shape in self.by_shape or shape in self.ahead:
            return
        spec, at_rest = self.planner.batch_spec(batch), self.at_rest()
        # No reference to the engine: see `Engine.__init__`.
        planner, stores = self.planner.of_batches, self.stores
        wait = self.pending_save.wait

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
        self.of_losses.clear()
        self.current = self._updating = None

    def _make(
        self,
        batch: Any,
        place: Callable[[AbstractPrepared], None],
        loss: OtherLoss | None,
    ) -> AbstractRunner:
        planner, wait = self.planner.of_batches, self.pending_save.wait
        if loss is not None:
            planner = planner.with_loss(loss.function, has_aux=loss.has_aux)
        spec = planner.batch_spec(batch)
        is_first = self.current is None
        made = planner.plan(spec, None if is_first else self.at_rest())
        if is_first:
            updating = None
            if planner is not self.planner:
                with self.planner.planning():
                    updating = made.updating(self.planner)
            place(made if updating is None else _with_room_for(made, updating))
            if updating is not None:
                rest = self.planner, self.stores, {}, wait
                self._updating = updating.runner(*rest)
        return made.runner(planner, self.stores, spec, wait)


def _with_room_for(made: AbstractPrepared, other: AbstractPrepared) -> AbstractPrepared:
    """`made`, with the larger of the peaks of both on each tier.

    Stores pin host memory once, for all that is to run.
    """
    own, others = made.plan.peak_bytes, other.plan.peak_bytes
    peaks = {tier: max(own[tier], others[tier]) for tier in own}
    return replace(made, plan=replace(made.plan, peak_bytes=peaks))
