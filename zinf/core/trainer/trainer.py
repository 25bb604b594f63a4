"""The training loop: steps, and hooks after them."""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax

from zinf import observe
from zinf.checkpoint import Checkpoints
from zinf.core.engine.engine import Engine
from zinf.core.memory import BudgetExceeded
from zinf.core.optim.decision import NonFiniteError
from zinf.core.process.termination import Terminated
from zinf.core.trainer.batches import Batches
from zinf.core.trainer.evaluation import Best, mean_loss
from zinf.core.trainer.hook import Hook
from zinf.core.trainer.interrupts import Asked, interrupts
from zinf.core.trainer.output import Output
from zinf.observe import JsonLines, Progress, Totals, TraceFile, summary


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
        hooks: functions of the metrics of a step, called after it, each every so many
            steps; they may add to the metrics before these are written.
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
    hooks: Sequence[Hook] = ()
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
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                with run.surviving():
                    run.last_checkpoint()
                error.add_note(run.last_checkpoint())
            # Report it before `close` can wait for the other processes, because they
            # wait for this one.
            run.group.fail(error)
            raise
        finally:
            run.output.close()


class _Run:
    """The mutable state of one run of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.settings, self.engine = trainer, trainer.engine
        self.group = trainer.engine.planner.group
        self.batches = Batches(trainer.train_data)
        self.output = Output()
        self.num_skipped = self.tokens_seen = self.num_saves = 0
        self.saved_step: int | None = None
        self.wants_save = False
        self.best = Best()
        self.totals: Totals | None = None
        self.interrupts = Asked()
        self.hooks = [
            Hook(self.evaluate, trainer.evaluate_every, at_end=True),
            *trainer.hooks,
            Hook(self.write),
            Hook(self.want_save, trainer.checkpoint_every),
            Hook(self.keep),
        ]

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
        done, settings, output = self.engine.num_steps, self.settings, self.output
        if not done:
            self.engine.prepare(first)
        for shapes in self.batches.coming(settings.steps - done):
            self.engine.prepare_ahead(shapes)
        if not self.group.is_first:
            return
        if sys.stdout is not None:
            shown = {"num_steps": settings.steps, "log_every": settings.log_every}
            output.show(Progress(**shown, after_step=done))
        if settings.metrics is not None:
            lines = JsonLines(settings.metrics, after_step=done)
            output.add(lines, "Metrics", lines.kept)
        if settings.tensorboard is not None:
            # Imported here, with `observe` being lazy: it takes two seconds.
            events = observe.TensorBoard(settings.tensorboard, after_step=done)
            output.add(events, "TensorBoard events", events.kept)
        if settings.csv is not None:
            files = observe.CsvFiles(settings.csv, after_step=done)
            output.add(files, "CSV files", files.kept)
        if settings.trace is not None:
            output.trace = TraceFile(settings.trace, num_steps=settings.trace_steps)
        if done:
            self.output.say(f"Resuming after step {done}.")

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
        self.best = Best(**state.get("best", {}))
        if self.settings.keep_best and self.best.step:
            checkpoints.keep_best(self.best.step)
        self.tokens_seen = state.get("tokens_seen", 0)

    def loop(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"step": self.engine.num_steps}
        is_ending = False
        with interrupts(self.settings.grace_seconds) as self.interrupts:
            while not self.is_over():
                try:
                    batch = next(self.batches)
                except StopIteration:
                    self.output.say("The training data ended.")
                    break
                metrics = self.step(batch)
                is_ending = self.is_ending()
                if is_ending:
                    break
            else:
                if self.engine.num_steps < self.settings.steps:
                    self.output.say(f"The run ends: {self.best.no_better()}.")
            self.finish()
        if is_ending:
            self.group.part()
        if is_ending or self.interrupts.is_set():
            signum = self.interrupts.signum
            raise KeyboardInterrupt if signum is None else Terminated(signum)
        return metrics

    def step(self, batch: Any) -> dict[str, Any]:
        self.group.say(f"step {self.engine.num_steps + 1}")
        metrics: dict[str, Any] = self.engine.step(batch)
        self.count(batch, metrics)
        self.wants_save = False
        for hook in self.hooks:
            hook.after(metrics, is_last=metrics["step"] == self.settings.steps)
        return metrics

    def count(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Add the learning rate, and what is counted in a batch, to the metrics."""
        schedule, describe = self.settings.learning_rate, self.settings.describe
        if schedule is not None:
            # Schedules do not count skipped steps.
            updates = metrics["step"] - 1 - self.num_skipped
            metrics["learning_rate"] = float(np.asarray(schedule(updates)))
        if describe is not None:
            described = dict(describe(batch))
            tokens = described.pop("tokens", 0)
            self.tokens_seen += tokens * self.engine.planner.num_shares
            metrics |= {**described, "tokens_seen": self.tokens_seen}
        self.num_skipped += metrics["skipped"]

    def evaluate(self, metrics: dict[str, Any]) -> None:
        if self.is_ending():
            return
        settings, step = self.settings, metrics["step"]
        self.group.say(f"evaluation after step {step}")
        metrics["evaluation_loss"] = mean_loss(
            self.engine,
            () if settings.evaluation_data is None else settings.evaluation_data,
            num_batches=settings.evaluate_batches,
            weights=settings.weights,
            say=self.output.say,
        )
        self.best = self.best.after(metrics["evaluation_loss"], step)
        if settings.keep_best and self.best.step == step:
            self.wants_save = True
            if settings.checkpoints is not None:
                settings.checkpoints.keep_best(step)

    def write(self, metrics: dict[str, Any]) -> None:
        if self.output.write(metrics, self.engine.last_step):
            # Of several processes only the first writes metrics, and all must save.
            self.wants_save |= self.group.count == 1
        self.group.report(metrics)
        totals = Totals.of(metrics)
        self.totals = totals if self.totals is None else self.totals + totals

    def want_save(self, metrics: dict[str, Any]) -> None:
        self.wants_save = True

    def keep(self, metrics: dict[str, Any]) -> None:
        """Save if that is wanted; the last step is saved when the run ends."""
        checkpoints = self.settings.checkpoints
        if self.wants_save and metrics["step"] != self.settings.steps:
            with self.surviving():
                self.save()
        self.output.go_on()
        if checkpoints is not None:
            with self.surviving():
                checkpoints.check()

    def is_ending(self) -> bool:
        """Whether any process was interrupted; the same on all."""
        # No timeout: the first process may take long to write a checkpoint.
        is_asked = self.interrupts.is_set() or self.group.is_asked_to_stop
        return self.group.any("interrupted", is_asked, timeout=None)

    def is_over(self) -> bool:
        """Whether all steps are done, or too many evaluations were no better."""
        patience = self.settings.patience
        has_patience = patience is None or self.best.num_worse < patience
        return self.engine.num_steps >= self.settings.steps or not has_patience

    @contextmanager
    def surviving(self) -> Generator[None, None, None]:
        """Print the error if a save in the `with` block fails; training continues.

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
            self.output.say("error: " + "\n".join(found))

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
        self.num_saves += 1
        self.saved_step = self.engine.num_steps

    def finish(self) -> None:
        """Save the last step if it is not saved yet, and print the summary."""
        if self.totals is None:
            self.output.say(f"Nothing to do: {self.engine.num_steps} steps are done.")
            return
        if self.saved_step != self.engine.num_steps:
            self.save()
        checkpoint = self.last_checkpoint()
        self.output.close_progress()
        saves = self.num_saves > 1  # The last one runs after all steps.
        self.output.say(summary(self.totals, self.engine.plan, saves=saves))
        self.output.say(f"\n{checkpoint}")
        if self.best.step:
            place, checkpoints = "", self.settings.checkpoints
            if self.settings.keep_best and checkpoints is not None:
                place = f": {checkpoints.folder(self.best.step)}"
            self.output.say(f"{self.best.in_words()}{place}.")

    def last_checkpoint(self) -> str:
        """Wait for the save that runs; a sentence that says where the last one is."""
        checkpoints = self.settings.checkpoints
        if checkpoints is not None:
            checkpoints.wait()
        if checkpoints is None or self.saved_step is None:
            return "No checkpoint was saved."
        folder = checkpoints.folder(self.saved_step)
        return f"The last checkpoint is {folder}, after step {self.saved_step}."
