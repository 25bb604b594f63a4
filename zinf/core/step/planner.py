"""Plans training steps: cuts, compiles and arranges them within the budgets."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax

from zinf.core.optim.clipping import Clipping
from zinf.core.optim.summed import separated_sums
from zinf.core.plan import Transfer
from zinf.core.problem.problem import ParamSpec
from zinf.core.problem.source import Source, check_dependence
from zinf.core.program import ArrayId, Rows, Tier
from zinf.core.sharding import Layouts
from zinf.core.step.batch import batch_spec, check_rows
from zinf.core.step.choice import choose
from zinf.core.step.exchange import exchange_in_words
from zinf.core.step.prepared import AbstractPrepared, Measure
from zinf.core.step.setup import AtRest, Setup, StepRequest
from zinf.core.step.sums import sum_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planner(Setup):
    """Plans steps of one problem for batches of any shape.

    Attributes:
        measure: measures the rates of this machine for a planned step, given the shapes
            of a microbatch; None plans by the rates of `resources` alone.
    """

    measure: Measure | None = None

    @cached_property
    def of_batches(self) -> "Planner":
        """The planner of what runs on a batch.

        That is a whole step, unless the problem has sums of gradients: then it is a
        pass that adds to them, and the update is a step of its own.
        """
        if not self.problem.sums_gradients:
            return self
        problem = self.problem
        specs = {p: _SummedParam(**vars(x)) for p, x in problem.params.items()}
        sums = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)),
            problem.abstract_params,
        )
        own = {name: getattr(self, name) for name in Planner.__dataclass_fields__}
        own["problem"] = replace(problem, params=specs)
        own["separated"] = separated_sums(sums, problem.trainable)
        return _SummingPlanner(**own, updates=self)

    def with_loss(self, loss_fn: Callable, *, has_aux: bool) -> Self:
        """A planner of another loss of the same parameters."""
        problem = replace(self.problem, loss=self.problem.loss_of(loss_fn, has_aux))
        return replace(self, problem=problem)

    def plan_batch(self, batch: Any) -> AbstractPrepared:
        """The plan for the whole batch of all processes; places all arrays anew."""
        check_rows(batch, self.config)
        spec = batch_spec(batch, self.config.num_microbatches)
        return self.of_batches.plan(spec)

    def plan(self, batch: Any, at_rest: AtRest | None = None) -> AbstractPrepared:
        """The best step that fits the budgets, the same on all processes.

        Args:
            batch: shapes and dtypes of one microbatch.
            at_rest: where arrays already rest; None chooses that.

        Raises:
            InfeasibleError: no plan fits the budgets.
        """
        with self.planning():
            request = self._request(batch, at_rest)
            is_in_stacks = at_rest is not None and at_rest.is_in_stacks
            made, why = choose(self, request, is_in_stacks=is_in_stacks)
            _check_rows_of_groups(made)
            if self.measure is not None:
                made = made.retimed(self, self.measure, batch)
            if why:
                logger.info("execution: %s", why)
            said = why, self.attention.sentence(), self._exchange(made), made.experts
            if any(said):
                made = made.with_reason(" ".join(filter(None, said)))
        self.agree_on(made.plan, "plan")
        warning = made.warning(self.config)
        if warning is not None and at_rest is None and self.group.is_first:
            logger.warning(warning)
        return made

    def _exchange(self, made: AbstractPrepared) -> str:
        """How gradients go between devices, as a sentence; empty if all as they are."""
        if self.rule.gradient_encoding is None and self.rule.compression is None:
            return ""
        trained = [leaf.path for leaf in self.separated.leaves]
        return exchange_in_words(trained, made.layouts, made.in_parts)

    def _request(self, batch: Any, at_rest: AtRest | None) -> StepRequest:
        # Trace before fusing too: this refuses functions that are not a loss.
        source, weight = self.traced(batch, self.config.segment_max_bytes)
        check_dependence(source)
        return StepRequest(
            batch,
            source,
            self.layouts(source) if at_rest is None else at_rest.layouts,
            None if at_rest is None else at_rest.homes,
            self.step_weight(weight, batch),
        )

    @property
    def has_measured_rates(self) -> bool:
        """Whether plans go by rates that were measured on a machine."""
        return self.measure is not None or isinstance(self.config.rates, Path)


class _SummedParam(ParamSpec):
    """A leaf whose gradients are added to a sum, which changes in place of the leaf."""

    def updated(self, rows: Rows = None) -> ArrayId:
        return self.sum.piece(rows)

    def copy(self, rows: Rows = None) -> ArrayId | None:
        return None


@dataclass(frozen=True, kw_only=True)
class _SummingPlanner(Planner):
    """Plans passes that add gradients to sums; `updates` plans with the optimizer."""

    updates: Planner

    @property
    def clipping(self) -> Clipping:
        return Clipping(None, ())

    @property
    def may_defer(self) -> bool:
        # A deferred update runs where its result is read next, and no pass reads a sum.
        return False

    def splittable(self, layouts: Layouts) -> frozenset[str]:
        return self.updates.splittable(layouts)

    def layouts(self, source: Source) -> Layouts:
        return self.updates.layouts(source)


def _check_rows_of_groups(made: AbstractPrepared) -> None:
    """Refuse rows from the host for copies that groups of devices hold.

    See [Note: parts of all groups]: each group needs its part of such rows from others,
    and transfers exchange nothing.
    """
    moves = (i.operation for i in made.plan.instructions)
    moved = (m.arrays for m in moves if isinstance(m, Transfer))
    for array in (a for arrays in moved for a in arrays if a.rows is not None):
        is_part = made.plan.homes.get(array.whole) == Tier.DEVICE
        if is_part and made.layouts.of(array).num_groups > 1:
            raise NotImplementedError(
                f"{array.path} rests on the devices and is larger than a segment, so "
                "the host updates it by rows. This does not work yet with both "
                "zero_quantized_weights and zero_hpz_partition_size. Raise "
                "segment.max_bytes, offload parameters too, or leave one of them out."
            )
