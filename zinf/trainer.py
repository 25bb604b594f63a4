"""The training loop: steps on a data pipeline, with all that a long run needs."""

import os
import signal
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
import optax

from zinf.checkpoint import Checkpoints
from zinf.engine import Engine
from zinf.memory import StorageError
from zinf.observe import (
    AbstractWriter,
    JsonLines,
    Metrics,
    Progress,
    Silence,
    TensorBoard,
    Totals,
    TraceFile,
    summary,
)
from zinf.optim.decision import NonFiniteError

STDERR = 2
INTERRUPTED = b"""
Interrupted: this step will be completed and saved. Interrupt again to stop at once,
without saving.
"""


@dataclass(frozen=True)
class Trainer:
    """Trains `engine` on batches of `train_data` until it has taken `steps` steps.

    Of several processes, each is given its own share of every batch; the first writes
    the files and speaks for all, and an interrupt of one ends all after one step.

    Attributes:
        train_data: a `grain` dataset, loader or iterator, whose position is saved and
            restored; or any iterable of batches, whose first ones are passed over again
            when a run is resumed.
        steps: optimizer steps in all, with those before a resume.
        evaluation_data: batches of the same shape, begun anew for each evaluation
            unless it is an iterator. Their loss is that of `engine.evaluate`: of
            `eval_loss_fn`, or without dropout, if `zinf.initialize` was told how.
        evaluate_every: steps between evaluations; None for none. The last step has one.
        evaluate_batches: batches of an evaluation.
        checkpoints: where to save; None for nowhere.
        checkpoint_every: steps between checkpoints; the end of the run always has one.
        metrics: a file for the metrics of each step, as JSON lines. Lines of an earlier
            run, of steps that this one does anew, are moved to `metrics.1.jsonl`, or
            the next number that is free.
        tensorboard: a folder for the same as TensorBoard events. Those of an earlier
            run are moved to the folder `run.1` in it, unless that run is resumed.
        trace: a file for a trace of the first `trace_steps` steps of this run: every
            instruction on its link, as `zinf plot` draws it.
        log_every: steps between printed lines, where there is no terminal for a bar.
        learning_rate: what the optimizer uses, to show it where the engine cannot tell.
        resume: begin from the newest of `checkpoints`, if there is one.
    """

    engine: Engine
    train_data: Iterable[Any]
    _: KW_ONLY
    steps: int
    evaluation_data: Iterable[Any] | None = None
    evaluate_every: int | None = None
    evaluate_batches: int = 8
    checkpoints: Checkpoints | None = None
    checkpoint_every: int | None = None
    metrics: Path | str | None = None
    tensorboard: Path | str | None = None
    trace: Path | str | None = None
    trace_steps: int = 3
    log_every: int = 10
    learning_rate: optax.Schedule | None = None
    resume: bool = True

    def run(self) -> dict[str, Any]:
        """Train, save and report; returns the metrics of the last step.

        On the first Ctrl-C the step is completed and saved before it is raised; the
        second is raised as soon as the engine can stop.

        Raises:
            NonFiniteError: from a step; a note names the last checkpoint.
            StorageError: the last checkpoint cannot be written, or would not fit. (One
            before it that cannot is reported, and training goes on.)
            ValueError: `checkpoints` has those of another run.
            KeyboardInterrupt: see above.
        """
        run = _Run(self)
        try:
            run.begin()
            return run.loop()
        except NonFiniteError as error:
            error.add_note(run.last_checkpoint())
            run.group.fail(error)
            raise
        except BaseException as error:
            # Before anything waits for the other processes, which wait for this one.
            run.group.fail(error)
            raise
        finally:
            run.close()


class _Run:
    """One run of a trainer: what changes while it goes."""

    def __init__(self, trainer: Trainer) -> None:
        self.settings, self.engine = trainer, trainer.engine
        self.group = trainer.engine.planner.group
        self.batches = _Batches(trainer.train_data)
        self.num_skipped = 0
        self.saved_step: int | None = None
        self.totals: Totals | None = None
        self.writers: list[AbstractWriter] = []
        self.trace: TraceFile | None = None
        self.progress: Progress | Silence = Silence()

    def begin(self) -> None:
        """Place the state, take it from the newest checkpoint, and open the writers."""
        self.group.say("preparing")
        runner = self.engine.prepare(self.batches.peek())
        if self.settings.evaluate_every is not None:
            # What does not fit is found now, and not after hours of training.
            runner.prepare_evaluation()
        if self.settings.checkpoints is not None:
            self.resume(self.settings.checkpoints)
            self.settings.checkpoints.check_space(self.engine)
        first, settings = self.engine.num_steps, self.settings
        if not self.group.is_first:
            return
        self.progress = Progress(
            num_steps=settings.steps, after_step=first, log_every=settings.log_every
        )
        self.writers.append(self.progress)
        if settings.metrics is not None:
            lines = JsonLines(settings.metrics, after_step=first)
            self.writers.append(lines)
            self.say_kept("Metrics", lines.kept)
        if settings.tensorboard is not None:
            events = TensorBoard(settings.tensorboard, after_step=first)
            self.writers.append(events)
            self.say_kept("TensorBoard events", events.kept)
        if settings.trace is not None:
            self.trace = TraceFile(settings.trace, num_steps=settings.trace_steps)
        if first:
            self.progress.say(f"Resuming after step {first}.")

    def say_kept(self, what: str, kept: Path | None) -> None:
        if kept is not None:
            said = (
                f"{what} of an earlier run, of steps that are done anew, are in {kept}."
            )
            self.progress.say(said)

    def resume(self, checkpoints: Checkpoints) -> None:
        self.saved_step = checkpoints.latest_step()
        # A folder of the same name may be each host's own.
        self.group.agree({"newest checkpoint that is found": self.saved_step})
        if self.saved_step is None:
            return
        if not self.settings.resume:
            raise ValueError(
                f"{checkpoints.directory} has checkpoints of an earlier run, up to "
                f"step {self.saved_step}, and a new run would mix with them. Continue "
                "that run (resume=True), or name another folder."
            )
        state = checkpoints.restore(self.engine) or {}
        self.batches.resume(state.get("batches"), self.engine.num_steps)
        self.num_skipped = state.get("num_skipped", 0)

    def loop(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"step": self.engine.num_steps}
        is_ending = False
        with _interrupts() as is_interrupted:
            while self.engine.num_steps < self.settings.steps:
                try:
                    batch = next(self.batches)
                except StopIteration:
                    self.progress.say("The training data ended.")
                    break
                metrics = self.step(batch, is_interrupted)
                is_ending = self.is_ending(is_interrupted)
                if is_ending:
                    break
            self.finish()
        if is_ending:
            self.group.part()
        if is_ending or is_interrupted.is_set():
            raise KeyboardInterrupt
        return metrics

    def step(self, batch: Any, is_interrupted: threading.Event) -> dict[str, Any]:
        self.group.say(f"step {self.engine.num_steps + 1}")
        metrics: dict[str, Any] = self.engine.step(batch)
        ran = self.engine.last_step
        if self.trace is not None and ran.plan is not None and ran.timeline is not None:
            self.trace.add(metrics["step"], ran.plan, ran.timeline)
        metrics["learning_rate"] = self.learning_rate(metrics)
        self.num_skipped += metrics["skipped"]
        is_last = metrics["step"] == self.settings.steps
        is_due = self.evaluates_after(metrics["step"])
        if is_due and not self.is_ending(is_interrupted):
            metrics["evaluation_loss"] = self.evaluate()
        for writer in self.writers:
            writer.write(metrics)
        totals = Totals.of(metrics)
        self.totals = totals if self.totals is None else self.totals + totals
        if not is_last and _is_due(metrics["step"], self.settings.checkpoint_every):
            with self.surviving():
                self.save()
        if self.settings.checkpoints is not None:
            with self.surviving():
                self.settings.checkpoints.check()
        return metrics

    @contextmanager
    def surviving(self) -> Generator[None, None, None]:
        """Reports a save that failed, such as on a full drive, and goes on.

        The next one may succeed; the last one must. Of several processes one would go
        on without the others, so there it ends all.
        """
        try:
            yield
        except StorageError as error:
            if self.group.count > 1:
                raise
            assert self.settings.checkpoints is not None
            self.saved_step = self.settings.checkpoints.latest_step()
            self.progress.say(f"error: {error}\n{self.last_checkpoint()}")

    def is_ending(self, is_interrupted: threading.Event) -> bool:
        """Whether any process was interrupted; the same on all."""
        # The first process may be long at writing what it saves.
        return self.group.any("interrupted", is_interrupted.is_set(), timeout=None)

    def learning_rate(self, metrics: Metrics) -> float | None:
        """Of the step that was just taken: schedules count only real updates."""
        schedule = self.settings.learning_rate
        if schedule is None:
            return metrics["learning_rate"]
        return float(np.asarray(schedule(metrics["step"] - 1 - self.num_skipped)))

    def evaluates_after(self, step: int) -> bool:
        every = self.settings.evaluate_every
        return every is not None and (
            step == self.settings.steps or _is_due(step, every)
        )

    def evaluate(self) -> float:
        """The mean loss over the evaluation batches."""
        data = self.settings.evaluation_data
        batches = islice(() if data is None else data, self.settings.evaluate_batches)
        self.group.say(f"evaluation after step {self.engine.num_steps}")
        losses = [self.engine.evaluate(batch) for batch in batches]
        if not losses:
            raise ValueError(
                "evaluate_every is set, but evaluation_data has no batch. Give more "
                "data, or a smaller batch."
            )
        return sum(losses) / len(losses)

    def save(self) -> None:
        checkpoints = self.settings.checkpoints
        if checkpoints is None:
            return
        self.group.say(f"saving after step {self.engine.num_steps}")
        with self.surviving():
            checkpoints.wait()
        state = {"batches": self.batches.state(), "num_skipped": self.num_skipped}
        checkpoints.save(self.engine.num_steps, self.engine, state)
        self.saved_step = self.engine.num_steps

    def finish(self) -> None:
        """Save what is not saved yet, and report."""
        if self.totals is None:
            self.progress.say(f"Nothing to do: {self.engine.num_steps} steps are done.")
            return
        if self.saved_step != self.engine.num_steps:
            self.save()
        checkpoint = self.last_checkpoint()
        self.progress.close()
        self.progress.say(summary(self.totals, self.engine.plan))
        self.progress.say(f"\n{checkpoint}")

    def last_checkpoint(self) -> str:
        """Where the last complete checkpoint is, in a sentence."""
        checkpoints = self.settings.checkpoints
        if checkpoints is not None:
            checkpoints.wait()
        if checkpoints is None or self.saved_step is None:
            return "No checkpoint was saved."
        folder = checkpoints.folder(self.saved_step)
        return f"The last checkpoint is {folder}, after step {self.saved_step}."

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        if self.trace is not None:
            self.trace.close()


class _Batches:
    """The batches of a training run, with a position that can be saved."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._iterator = iter(source)
        self._ahead: list[Any] = []

    def peek(self) -> Any:
        """The next batch, which stays the next."""
        try:
            self._ahead = [next(self)]
        except StopIteration:
            raise ValueError(
                "train_data has no batch. Give more data, or a smaller batch."
            ) from None
        return self._ahead[0]

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._iterator)

    def state(self) -> Any:
        """What `resume` needs, as JSON or bytes, once the peeked batch is taken."""
        if isinstance(self._iterator, grain.DatasetIterator | grain.DataLoaderIterator):
            return self._iterator.get_state()
        return None

    def resume(self, state: Any, num_steps: int) -> None:
        """Continue where `state` was taken, after `num_steps` steps of a batch each."""
        if isinstance(self._iterator, grain.DatasetIterator | grain.DataLoaderIterator):
            self._ahead.clear()
            self._iterator.set_state(state)
            return
        for _ in range(num_steps):
            next(self)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@contextmanager
def _interrupts() -> Generator[threading.Event, None, None]:
    """Sets the event on the first Ctrl-C, instead of raising it anywhere.

    An interrupt between a batch and its step would leave the data a batch ahead of the
    engine. Only the main thread gets signals; elsewhere this does nothing.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)
        # print() must not be entered from a signal that may have interrupted it.
        os.write(STDERR, INTERRUPTED)

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
