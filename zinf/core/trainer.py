"""The training loop: data, evaluation, checkpoints, metrics, resuming, interrupts."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import grain
import numpy as np
import optax

from zinf import observe
from zinf.checkpoint import Checkpoints
from zinf.core.engine.engine import Engine
from zinf.core.memory import BudgetExceeded
from zinf.core.optim.decision import NonFiniteError
from zinf.core.process.termination import Terminated, terminations
from zinf.core.step.run import StepRecord
from zinf.core.text.complaint import complain
from zinf.data import AbstractForeseen
from zinf.observe import (
    AbstractWriter,
    JsonLines,
    Metrics,
    Progress,
    Silence,
    Totals,
    TraceFile,
    summary,
)

STDERR = 2
TERMINATED = """
{name}: this step will be completed and saved, if that takes at most {seconds:g} s.
"""
INTERRUPTED = b"""
Interrupted: this step will be completed and saved. Interrupt again to stop at once,
without saving.
"""
# An evaluation without a limit says so after so many batches: the data may have no end.
MANY_BATCHES = 1000


@dataclass(frozen=True)
class Trainer:
    """Trains `engine` on batches of `train_data` until it has taken `steps` steps.

    If there are several processes, each gets its own share of every batch. The first
    process writes the files and prints for all. An interrupt of one process ends all of
    them after one more step.

    Attributes:
        train_data: a `grain` dataset, loader or iterator, whose position is saved and
            restored, such as `zinf.data.Paced`, for whose shapes plans are made while
            steps run; or any iterable of batches. When a run is resumed, the batches of
            an iterable that were used before are skipped.
        steps: number of optimizer steps, with those before a resume.
        evaluation_data: batches of the same shape. Each evaluation starts from the
            first batch, unless this is an iterator. The loss is that of
            `engine.evaluate`.
        evaluate_every: steps between evaluations; None for no evaluation. There is one
            after the last step.
        weights: what evaluations compute with: "master", the weights as trained, or
            "ema", their average (`zinf.with_ema`).
        evaluate_batches: the most batches of an evaluation; None takes all of
            `evaluation_data`, which then has an end.
        keep_best: save when an evaluation is the best so far, and keep that checkpoint
            beside the newest ones.
        patience: end the run after so many evaluations in a row that are no better than
            the best; None for all `steps`.
        checkpoints: where to save; None to save nothing.
        checkpoint_every: steps between checkpoints. There always is one at the end of
            the run.
        metrics: a file for the metrics of each step, as JSON lines. Lines of an earlier
            run for steps that this run repeats are moved to `metrics.1.jsonl`, or the
            next free number.
        tensorboard: a folder for the metrics as TensorBoard events. Events of an
            earlier run are moved to its subfolder `run.1`, unless that run is resumed.
        csv: a folder for the metrics as CSV files, one for each number; see
            `zinf.observe.CsvFiles`.
        trace: a file for a trace of the first `trace_steps` steps of this run. It shows
            every instruction on its link; `zinf plot` draws it.
        log_every: steps between printed lines, if there is no terminal for a progress
            bar.
        learning_rate: the schedule of the optimizer, to report the rate if the engine
            cannot read it from the optimizer state.
        describe: more metrics of a step, computed from its batch, such as
            `zinf.data.describe`. Of `tokens`, those of this process, the metrics have
            the sum over all processes and steps, as `tokens_seen`.
        grace_seconds: SIGTERM and SIGHUP end the process so long after they came, saved
            or not. Most schedulers kill after 30 seconds; this is for a closed
            terminal, which does not, and for a step that hangs.
        resume: begin from the newest of `checkpoints`, if there is one.
    """

    engine: Engine
    train_data: Iterable[Any]
    _: KW_ONLY
    steps: int
    evaluation_data: Iterable[Any] | None = None
    evaluate_every: int | None = None
    evaluate_batches: int | None = None
    weights: str = "master"
    keep_best: bool = False
    patience: int | None = None
    checkpoints: Checkpoints | None = None
    checkpoint_every: int | None = None
    metrics: Path | str | None = None
    tensorboard: Path | str | None = None
    csv: Path | str | None = None
    trace: Path | str | None = None
    trace_steps: int = 3
    log_every: int = 10
    learning_rate: optax.Schedule | None = None
    describe: Callable[[Any], Mapping[str, int]] | None = None
    grace_seconds: float = 300.0
    resume: bool = True

    def run(self) -> dict[str, Any]:
        """Train, save and report; return the metrics of the last step.

        If metrics, the trace or the lines on standard output cannot be written, the
        step is saved, the error is printed on standard error, and training goes on
        without them.

        After the first Ctrl-C the step is completed and saved; then KeyboardInterrupt
        is raised. After the second it is raised as soon as the engine can stop.
        SIGTERM and SIGHUP, unless they are ignored or handled, do as the first Ctrl-C,
        within `grace_seconds`; the KeyboardInterrupt is then a
        `zinf.core.process.termination.Terminated`, which has the signal.

        Raises:
            NonFiniteError: from a step; a note names the last checkpoint.
            StorageError: the last checkpoint cannot be written, or would not fit, or a
                name in it is longer than the drive allows. If an earlier one fails, for
                whatever reason, the error is printed and training continues.
            ValueError: `checkpoints` has those of another run; or `keep_best` or
                `patience` without `evaluate_every`.
            KeyboardInterrupt: after Ctrl-C, as described above.
        """
        if self.evaluate_every is None and (
            self.keep_best or self.patience is not None
        ):
            raise ValueError(
                "keep_best and patience go by evaluations, and there are none: set "
                "evaluate_every."
            )
        run = _Run(self)
        try:
            run.begin()
            return run.loop()
        except NonFiniteError as error:
            with run.surviving():
                run.wait()
            error.add_note(run.last_checkpoint())
            run.group.fail(error)
            raise
        except BaseException as error:
            # Report it before `close` can wait for the other processes, because they
            # wait for this one.
            run.group.fail(error)
            raise
        finally:
            run.close()


class _Asked(threading.Event):
    """Set when the run is to save and end, by Ctrl-C or by the signal `signum`."""

    signum: int | None = None


@dataclass(frozen=True)
class _Best:
    """The best evaluation of a run so far.

    Attributes:
        loss, step: of that evaluation; infinite and 0 if there was none.
        num_worse: evaluations since then.
    """

    loss: float = inf
    step: int = 0
    num_worse: int = 0

    def after(self, loss: float, step: int) -> "_Best":
        if loss < self.loss:
            return _Best(loss, step)
        return replace(self, num_worse=self.num_worse + 1)


class _Run:
    """The mutable state of one run of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.settings, self.engine = trainer, trainer.engine
        self.group = trainer.engine.planner.group
        self.batches = _Batches(trainer.train_data)
        self.num_skipped = self.tokens_seen = 0
        self.saved_step: int | None = None
        self.best = _Best()
        self.totals: Totals | None = None
        self.writers: list[AbstractWriter] = []
        self.trace: TraceFile | None = None
        self.progress: Progress | Silence = Silence()

    def begin(self) -> None:
        """Place the state, restore the newest checkpoint, and open the writers."""
        self.group.say("preparing")
        first = self.batches.peek()
        # Place the state for the largest batch, so that there is room for all others.
        largest = self.batches.largest()
        self.engine.prepare(largest)
        if self.settings.evaluate_every is not None:
            # Find out now if evaluation does not fit, not after hours of training.
            self.engine.prepare_evaluation(largest, kind=self.settings.weights)
        if self.settings.checkpoints is not None:
            self.resume(self.settings.checkpoints)
            self.settings.checkpoints.check_space(self.engine)
            self.settings.checkpoints.check_names(self.engine, self.settings.steps)
        if not self.engine.num_steps:
            self.engine.prepare(first)
        for shapes in self.batches.coming(self.settings.steps - self.engine.num_steps):
            self.engine.prepare_ahead(shapes)
        done, settings = self.engine.num_steps, self.settings
        if not self.group.is_first:
            return
        if sys.stdout is not None:
            self.progress = Progress(
                num_steps=settings.steps, after_step=done, log_every=settings.log_every
            )
            self.writers.append(self.progress)
        if settings.metrics is not None:
            lines = JsonLines(settings.metrics, after_step=done)
            self.writers.append(lines)
            self.say_kept("Metrics", lines.kept)
        if settings.tensorboard is not None:
            # Imported here, with `observe` being lazy: it takes two seconds.
            events = observe.TensorBoard(settings.tensorboard, after_step=done)
            self.writers.append(events)
            self.say_kept("TensorBoard events", events.kept)
        if settings.csv is not None:
            files = observe.CsvFiles(settings.csv, after_step=done)
            self.writers.append(files)
            self.say_kept("CSV files", files.kept)
        if settings.trace is not None:
            self.trace = TraceFile(settings.trace, num_steps=settings.trace_steps)
        if done:
            self.say(f"Resuming after step {done}.")

    def say(self, text: str) -> None:
        """Print a line; on standard error once standard output takes nothing."""
        try:
            self.progress.say(text)
        except OSError as error:
            self.go_on_without(self.progress, error)
            self.progress.say(text)

    def go_on_without(self, writer: AbstractWriter | TraceFile, error: OSError) -> None:
        """Close a file that takes no more, and say so on standard error."""
        if writer is self.trace:
            self.trace = None
        elif writer is self.progress:
            self.progress = Complaints()
        self.writers = [x for x in self.writers if x is not writer]
        with suppress(OSError):
            writer.close()
        complain(
            f"error: {writer.target} cannot be written: {error.strerror or error}. "
            "Training goes on without. To have them again, mend that and resume the "
            "run from a checkpoint."
        )

    def say_kept(self, what: str, kept: Path | None) -> None:
        if kept is not None:
            said = (
                f"{what} of an earlier run, of steps that are done anew, are in {kept}."
            )
            self.say(said)

    def resume(self, checkpoints: Checkpoints) -> None:
        self.saved_step = checkpoints.latest_step()
        # On each host the same path may be a different folder.
        self.group.agree({"newest checkpoint that is found": self.saved_step})
        if self.saved_step is None:
            return
        if not self.settings.resume:
            raise ValueError(
                f"{checkpoints.directory} has checkpoints of an earlier run, up to "
                f"step {self.saved_step}, and a new run would mix with them. Continue "
                "that run (resume=True), or name another folder."
            )
        self.group.say(f"loading the checkpoint of step {self.saved_step}")
        state = checkpoints.restore(self.engine) or {}
        self.batches.resume(state.get("batches"), self.engine.num_steps)
        self.num_skipped = state.get("num_skipped", 0)
        self.best = _Best(**state.get("best", {}))
        if self.settings.keep_best and self.best.step:
            checkpoints.keep_best(self.best.step)
        self.tokens_seen = state.get("tokens_seen", 0)

    def loop(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"step": self.engine.num_steps}
        is_ending = False
        with _interrupts(self.settings.grace_seconds) as is_interrupted:
            while not self.is_over():
                try:
                    batch = next(self.batches)
                except StopIteration:
                    self.say("The training data ended.")
                    break
                metrics = self.step(batch, is_interrupted)
                is_ending = self.is_ending(is_interrupted)
                if is_ending:
                    break
            self.finish()
        if is_ending:
            self.group.part()
        if is_ending or is_interrupted.is_set():
            signum = is_interrupted.signum
            raise KeyboardInterrupt if signum is None else Terminated(signum)
        return metrics

    def step(self, batch: Any, is_interrupted: _Asked) -> dict[str, Any]:
        self.group.say(f"step {self.engine.num_steps + 1}")
        metrics: dict[str, Any] = self.engine.step(batch)
        record = self.engine.last_step
        metrics["learning_rate"] = self.learning_rate(metrics)
        if self.settings.describe is not None:
            described = dict(self.settings.describe(batch))
            tokens = described.pop("tokens", 0)
            self.tokens_seen += tokens * self.engine.planner.num_shares
            metrics |= {**described, "tokens_seen": self.tokens_seen}
        self.num_skipped += metrics["skipped"]
        is_last = metrics["step"] == self.settings.steps
        is_due = self.evaluates_after(metrics["step"])
        is_best = False
        if is_due and not self.is_ending(is_interrupted):
            metrics["evaluation_loss"] = self.evaluate()
            self.best = self.best.after(metrics["evaluation_loss"], metrics["step"])
            is_best = self.settings.keep_best and self.best.step == metrics["step"]
            if is_best and self.settings.checkpoints is not None:
                self.settings.checkpoints.keep_best(self.best.step)
        unwritten = self.write(metrics, record)
        self.group.report(metrics)
        totals = Totals.of(metrics)
        self.totals = totals if self.totals is None else self.totals + totals
        every = self.settings.checkpoint_every
        # Of several processes only the first writes metrics, and all must save.
        is_unsafe = bool(unwritten) and self.group.count == 1
        is_wanted = _is_due(metrics["step"], every) or is_best or is_unsafe
        if not is_last and is_wanted:
            with self.surviving():
                self.save()
        for writer, error in unwritten:
            self.go_on_without(writer, error)
        if self.settings.checkpoints is not None:
            with self.surviving():
                self.settings.checkpoints.check()
        return metrics

    def write(
        self, metrics: Metrics, ran: StepRecord
    ) -> list[tuple[AbstractWriter | TraceFile, OSError]]:
        """Write the metrics of a step; returns the writers that failed, with errors."""
        unwritten: list[tuple[AbstractWriter | TraceFile, OSError]] = []
        for writer in self.writers:
            try:
                writer.write(metrics)
            except OSError as error:
                unwritten.append((writer, error))
        trace = self.trace
        if trace is not None and ran.plan is not None and ran.timeline is not None:
            try:
                trace.add(metrics["step"], ran.plan, ran.timeline)
            except OSError as error:
                unwritten.append((trace, error))
        return unwritten

    @contextmanager
    def surviving(self) -> Generator[None, None, None]:
        """Print the error if a save in the body fails, and let training continue.

        A drive may be full now and have space for the next save. With several processes
        the error is raised, because one process would continue without the others.
        """
        try:
            yield
        except (OSError, BudgetExceeded) as error:
            if self.group.count > 1:
                raise
            assert self.settings.checkpoints is not None
            found = [str(error)]
            try:
                self.saved_step = self.settings.checkpoints.latest_step()
            except OSError as unreadable:
                self.saved_step = None
                found.append(f"The folder of checkpoints is unreadable: {unreadable}")
            else:
                found.append(self.last_checkpoint())
            self.say("error: " + "\n".join(found))

    def is_ending(self, is_interrupted: _Asked) -> bool:
        """Whether any process was interrupted; the same on all."""
        # No timeout: the first process may take long to write a checkpoint.
        is_asked = is_interrupted.is_set() or self.group.is_asked_to_stop
        return self.group.any("interrupted", is_asked, timeout=None)

    def is_over(self) -> bool:
        """Whether all steps are done, or too many evaluations were no better."""
        if self.engine.num_steps >= self.settings.steps:
            return True
        patience, worse = self.settings.patience, self.best.num_worse
        if patience is None or worse < patience:
            return False
        self.say(
            f"The run ends: {worse} evaluations in a row were no better than the one "
            f"after step {self.best.step}."
        )
        return True

    def learning_rate(self, metrics: Metrics) -> float | None:
        """The rate of the latest step; schedules do not count skipped steps."""
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
        """The mean loss over the evaluation batches, by weight; see `Weighted`."""
        data = self.settings.evaluation_data
        batches = islice(() if data is None else data, self.settings.evaluate_batches)
        self.group.say(f"evaluation after step {self.engine.num_steps}")
        losses = []
        for batch in batches:
            kind = self.settings.weights
            losses.append(self.engine.evaluate_weighted(batch, kind=kind))
            if len(losses) == MANY_BATCHES and self.settings.evaluate_batches is None:
                self.say(
                    f"This evaluation has had {MANY_BATCHES:,} batches and takes all. "
                    "evaluate_batches is the most that one takes."
                )
        if not losses:
            raise ValueError(
                "evaluate_every is set, but evaluation_data has no batch. Give more "
                "data, or a smaller batch."
            )
        return sum(x.total for x in losses) / sum(x.weight for x in losses)

    def save(self) -> None:
        checkpoints = self.settings.checkpoints
        if checkpoints is None:
            return
        self.group.say(f"saving after step {self.engine.num_steps}")
        with self.surviving():
            checkpoints.wait()
        state: dict[str, Any] = {
            "batches": self.batches.state(),
            "num_skipped": self.num_skipped,
            "tokens_seen": self.tokens_seen,
        }
        if self.best.step:
            state["best"] = asdict(self.best)
        checkpoints.save(self.engine.num_steps, self.engine, state)
        self.saved_step = self.engine.num_steps

    def finish(self) -> None:
        """Save the last step if it is not saved yet, and print the summary."""
        if self.totals is None:
            self.say(f"Nothing to do: {self.engine.num_steps} steps are done.")
            return
        if self.saved_step != self.engine.num_steps:
            self.save()
        checkpoint = self.last_checkpoint()
        self.close_writer(self.progress)
        self.say(summary(self.totals, self.engine.plan))
        self.say(f"\n{checkpoint}")
        best, checkpoints = self.best, self.settings.checkpoints
        if best.step:
            place = ""
            if self.settings.keep_best and checkpoints is not None:
                place = f": {checkpoints.folder(best.step)}"
            what = f"The best evaluation, {best.loss:.6g}, was after step {best.step}"
            self.say(f"{what}{place}.")

    def wait(self) -> None:
        """Wait until the save that runs is complete; raise its error if it fails."""
        if self.settings.checkpoints is not None:
            self.settings.checkpoints.wait()

    def last_checkpoint(self) -> str:
        """A sentence that says where the last complete checkpoint is."""
        self.wait()
        checkpoints = self.settings.checkpoints
        if checkpoints is None or self.saved_step is None:
            return "No checkpoint was saved."
        folder = checkpoints.folder(self.saved_step)
        return f"The last checkpoint is {folder}, after step {self.saved_step}."

    def close(self) -> None:
        for writer in [*self.writers, *([] if self.trace is None else [self.trace])]:
            self.close_writer(writer)

    def close_writer(self, writer: AbstractWriter | TraceFile) -> None:
        try:
            writer.close()
        except OSError as error:
            self.go_on_without(writer, error)


class Complaints(Silence):
    """Progress of a run whose standard output takes nothing more: no lines of steps."""

    def say(self, text: str) -> None:
        complain(text)


class _Batches:
    """The batches of a training run, with a position that can be saved."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._iterator = iter(source)
        self._ahead: list[Any] = []

    def peek(self) -> Any:
        """The next batch, which `next` still returns afterwards."""
        try:
            self._ahead = [next(self)]
        except StopIteration:
            raise ValueError(
                "train_data has no batch. Give more data, or a smaller batch."
            ) from None
        return self._ahead[0]

    def largest(self) -> Any:
        """The next batch, or the shapes of the largest one that comes; peek before."""
        if isinstance(self._iterator, AbstractForeseen):
            return self._iterator.whole()
        return self._ahead[0]

    def coming(self, num_steps: int) -> list[Any]:
        """Shapes of the batches of the next steps, if they change."""
        if isinstance(self._iterator, AbstractForeseen):
            return self._iterator.coming(num_steps)
        return []

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._iterator)

    def state(self) -> Any:
        """The position for `resume`, as JSON or bytes. No peeked batch may be left."""
        if isinstance(self._iterator, grain.DatasetIterator | grain.DataLoaderIterator):
            return self._iterator.get_state()
        return None

    def resume(self, state: Any, num_steps: int) -> None:
        """Continue at the position `state`, or after `num_steps` batches."""
        if isinstance(self._iterator, grain.DatasetIterator | grain.DataLoaderIterator):
            self._ahead.clear()
            self._iterator.set_state(state)
            return
        for _ in range(num_steps):
            next(self)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@contextmanager
def _interrupts(grace_seconds: float) -> Generator[_Asked, None, None]:
    """Yields an event that the first Ctrl-C sets; KeyboardInterrupt is not raised.

    SIGTERM and SIGHUP set it too, for `grace_seconds` at most.

    If it were raised between a batch and its step, the data would be one batch ahead of
    the engine. Only the main thread gets signals; in other threads this does nothing.
    """
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)
        # Not print(): the signal may have interrupted a print, which is not reentrant.
        with suppress(OSError):
            os.write(STDERR, INTERRUPTED)

    def ask_to_end(signum: int) -> None:
        asked.signum = asked.signum or signum
        asked.set()
        name = signal.Signals(signum).name
        with suppress(OSError):
            os.write(
                STDERR, TERMINATED.format(name=name, seconds=grace_seconds).encode()
            )

    previous = signal.signal(signal.SIGINT, ask)
    try:
        with terminations(ask_to_end, grace_seconds=grace_seconds):
            yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
