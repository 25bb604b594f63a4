"""Steps in two halves: gradients of several batches and losses, and one update."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import jax

from zinf.core.engine.condition import Condition
from zinf.core.engine.metrics import (
    StepMetrics,
    joined,
    moved_metrics,
    pass_metrics,
    update_metrics,
)
from zinf.core.engine.random_key import step_keys
from zinf.core.engine.runners import OtherLoss, Runners
from zinf.core.engine.scalars import Scalars
from zinf.core.engine.state import write_model_state
from zinf.core.engine.turn import Turn
from zinf.core.optim.decision import NonFiniteError
from zinf.core.step.batch import check_values
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.run.outcome import Outcome
from zinf.core.step.run.run import StepRecord

DROPPED = (
    "The sums of gradients are dropped. Parameters and optimizer state are those of "
    "the last update; call forward_backward again for what the next one is to have."
)


@contextmanager
def _interrupted_at_end() -> Generator[list[Outcome], None, None]:
    """Raise KeyboardInterrupt after the `with` block if one came during an outcome."""
    outcomes: list[Outcome] = []
    yield outcomes
    if any(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt


class Verbs(ABC):
    """The methods of an engine that Tinker and SkyRL name."""

    rng: jax.Array | None
    last_step: StepRecord
    _runners: Runners
    _condition: Condition
    _scalars: Scalars
    _turn: Turn

    def forward_backward(
        self, batch: Any, loss: Callable | None = None, *, has_aux: bool = False
    ) -> dict[str, Any]:
        """Add the gradients of a loss to those that the next `optim_step` applies.

        Needs `forward_backward: true` in the config: each trained leaf then has a sum
        of gradients, which rests and is saved as optimizer state is. Gradients are
        those of the loss that the call returns, the mean over the batch, and calls add
        up: to average over calls, weigh the losses. Nothing is clipped before
        `optim_step`. After one call, `optim_step` gives what `step` gives, to the bit;
        only the update from a gradient of 16 bits (bf16 with one microbatch) may differ
        in the last bit, as the sum of it is float32.

        Args:
            batch: as for `step`.
            loss: a function with the arguments of the loss of training, for the same
                parameters; None: that loss. It is traced once for each shape of batch:
                pass the same function again, not a new lambda.
            has_aux: `loss` returns `(loss, aux)`, such as values of each token.

        Returns:
            `loss`, `grad_norm` of this call alone, `summed` (the number of calls since
            the last update), `aux` if the loss returns it, and seconds and bytes as
            `step` gives them.

        Raises:
            ValueError: the config does not say `forward_backward: true`.
            NonFiniteError: the loss or a gradient is not finite. Unless the message
                says that sums are dropped, they are as before the call.
        """
        with self._turn.of("forward_backward"):
            self._check_sums("forward_backward")
            other = None if loss is None else self._other_loss(loss, has_aux)
            with _interrupted_at_end() as outcomes:
                return self._add_gradients(batch, other, outcomes)

    def optim_step(self) -> dict[str, Any]:
        """Update the parameters from the sums of gradients, which are then empty.

        Returns:
            `step`, `grad_norm` of the sums before clipping, `learning_rate`, `summed`
            (the number of calls of `forward_backward`), and seconds and bytes.

        Raises:
            ValueError: no gradient was added since the last update.
            NonFiniteError: a sum is not finite. Nothing was updated, and the sums are
                dropped.
        """
        with self._turn.of("optim_step"):
            self._check_sums("optim_step")
            if not self._scalars.num_summed:
                raise ValueError(
                    "No gradient was added since the last update. Call "
                    "engine.forward_backward(batch) before engine.optim_step()."
                )
            with _interrupted_at_end() as outcomes:
                return self._update_from_sums(outcomes)

    def _both(self, batch: Any) -> dict[str, Any]:
        """`forward_backward` and `optim_step`, with the metrics of a step.

        If Ctrl-C is pressed in the first, the second still runs.
        """
        with _interrupted_at_end() as outcomes:
            added = self._add_gradients(batch, None, outcomes)
            return joined(added, self._update_from_sums(outcomes))

    def _add_gradients(
        self, batch: Any, loss: OtherLoss | None, outcomes: list[Outcome]
    ) -> StepMetrics:
        start = perf_counter()
        self._condition.check()
        check_values(batch)
        planner, scalars = self._runners.planner, self._scalars
        planner.check_batch(batch)
        runner = self._runners.prepare(batch, self._place, loss)
        waited = perf_counter() - start
        self._runners.stores.reset_peaks()
        record = self.last_step = StepRecord(number=self._scalars.num_steps)
        count = planner.config.num_microbatches
        keys = step_keys(
            self.rng, scalars.num_steps, count, number_of_call=scalars.num_summed
        )
        advance = self._runners.sums_advance(scalars.num_summed)
        with self._condition.updating("forward_backward", record):
            try:
                outcome = runner.step(
                    batch, keys, advance=advance, loss_scale=1.0, record=record
                )
            except NonFiniteError:
                if not record.is_mixed:
                    raise
                record.is_mixed = False
                raise self._dropped(record) from None
            if planner.problem.state_paths:
                residents, problem = self._runners.residents, planner.problem
                write_model_state(residents, problem, outcome, record)
        scalars.num_summed += 1
        seconds = perf_counter() - start
        metrics = pass_metrics(outcome, runner, self._runners.stores, seconds, waited)
        metrics |= {"grad_norm": outcome.grad_norm, "summed": scalars.num_summed}
        outcomes.append(outcome)
        return metrics

    def _update_from_sums(self, outcomes: list[Outcome]) -> StepMetrics:
        start, scalars = perf_counter(), self._scalars
        self._condition.check()
        self._runners.stores.reset_peaks()
        record = self.last_step = StepRecord(number=scalars.num_steps)
        advance = scalars.advance()
        with self._condition.updating("optim_step", record):
            try:
                outcome = self._runners.update(advance, record)
            except NonFiniteError:
                if record.is_mixed:
                    raise
                raise self._dropped(record) from None
        metrics = update_metrics(outcome, scalars, advance.after)
        metrics["summed"] = scalars.num_summed
        scalars.commit(advance.after, skipped=False)
        scalars.num_summed = 0
        seconds = perf_counter() - start
        metrics |= moved_metrics(outcome, self._runners.stores, seconds)
        outcomes.append(outcome)
        return metrics

    def _dropped(self, record: StepRecord) -> NonFiniteError:
        """Drop the sums; the error that says so."""
        self._scalars.num_summed = 0
        assert record.decision is not None
        return NonFiniteError(f"{record.decision.refusal} {DROPPED}")

    def _check_sums(self, what: str) -> None:
        if not self._runners.planner.problem.sums_gradients:
            raise ValueError(
                f"engine.{what} needs sums of gradients, which this engine does not "
                "have: they take 4 bytes for each trained number. Set "
                "forward_backward: true in the config, or use engine.step."
            )

    @abstractmethod
    def _other_loss(self, loss: Callable, has_aux: bool) -> OtherLoss:
        """Another loss of the same parameters, as the user has them."""

    @abstractmethod
    def _place(self, made: AbstractPrepared) -> None:
        """Place all state as a step has it."""
