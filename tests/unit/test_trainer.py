"""A run trains, saves, evaluates and reports, and goes on where it was stopped."""

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import sleep
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from tensorboardX.event_file_writer import EventsWriter

import zinf
from tests.robustness.small import on_nvme
from zinf.checkpoint import Checkpoints, durable
from zinf.checkpoint.save import Save
from zinf.core.memory import BudgetExceeded, StorageError
from zinf.core.memory.nvme import System
from zinf.core.optim.decision import NonFiniteError
from zinf.core.plan import Link
from zinf.core.process.termination import Terminated
from zinf.core.program import Tier
from zinf.core.trainer import Hook, Trainer
from zinf.distributed import AbstractGroup, Alone
from zinf.distributed.agreement import differences
from zinf.observe import CsvFiles, JsonLines, Progress, TraceFile, read_trace

WIDTH, BATCH = 6, 4
SCHEDULE = optax.linear_schedule(0.1, 0.0, 8)


def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["first"])
    hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
    return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)


def dataset(*, shuffled: bool = True) -> grain.IterDataset:
    x = np.random.default_rng(0).standard_normal((64, WIDTH), np.float32)
    data = grain.MapDataset.source([{"x": row, "y": np.sin(row)} for row in x])
    if shuffled:
        data = data.shuffle(3).repeat(None)
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return data.to_iter_dataset(reading).batch(BATCH, drop_remainder=True)


def plain_data() -> Iterable[Any]:
    """An iterator whose position cannot be set."""
    return (batch for batch in list(dataset(shuffled=False)))


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Callable[..., zinf.Engine]]:
    opened: list[zinf.Engine] = []

    def open_(
        *, offloaded: bool = False, group: AbstractGroup | None = None
    ) -> zinf.Engine:
        folder = tmp_path / f"nvme{len(opened)}"
        config = on_nvme(folder, gradient_clipping=1.0) if offloaded else {}
        draw = np.random.default_rng(1).standard_normal
        params = {
            name: draw((WIDTH, WIDTH), np.float32) for name in ("first", "second")
        }
        named = {"rng": jax.random.key(2), "group": group}
        tx = optax.adamw(SCHEDULE)
        opened.append(zinf.initialize(loss_fn, params, tx, config, **named))
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "saved", keep=10) as opened:
        yield opened


def train(
    engine: zinf.Engine, steps: int, data: Iterable[Any] | None = None, **rest: Any
) -> dict[str, Any]:
    data = dataset() if data is None else data
    return Trainer(engine, data, steps=steps, **rest).run()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[tuple[float, ...]]:
    names = ("loss", "grad_norm", "learning_rate")
    return [tuple(line[name] for name in names) for line in lines(path)]


def saved_steps(checkpoints: Checkpoints) -> set[str]:
    return {path.name for path in checkpoints.directory.iterdir()}


def test_hooks_are_called_every_so_many_steps_and_add_to_the_metrics(
    open_engine, tmp_path
):
    called: dict[str, list[int]] = {"each": [], "third": [], "end": [], "never": []}

    def note(name: str, metrics: dict[str, Any]) -> None:
        called[name].append(metrics["step"])
        metrics[name] = len(called[name])

    hooks = [
        Hook(partial(note, "each")),
        Hook(partial(note, "third"), every=3),
        Hook(partial(note, "end"), every=3, at_end=True),
        Hook(partial(note, "never"), every=None, at_end=True),
    ]
    path = tmp_path / "metrics.jsonl"
    train(open_engine(), 7, metrics=path, hooks=hooks)
    steps = [*range(1, 8)]
    assert called == {"each": steps, "third": [3, 6], "end": [3, 6, 7], "never": []}
    assert [line["each"] for line in lines(path)] == steps
    assert [line.get("end") for line in lines(path)][-2:] == [2, 3]


@pytest.mark.parametrize(
    ("offloaded", "make_data"),
    [(False, plain_data), (True, dataset)],
    ids=["fused", "nvme"],
)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_stopped(
    offloaded, make_data, open_engine, tmp_path
):
    def run(name: str, steps: int) -> Path:
        path = tmp_path / f"{name}.jsonl"
        with Checkpoints(tmp_path / name) as checkpoints:
            rest = {"checkpoints": checkpoints, "checkpoint_every": 3}
            engine = open_engine(offloaded=offloaded)
            named = {"metrics": path, "learning_rate": SCHEDULE}
            train(engine, steps, make_data(), **rest, **named)
        return path

    whole = run("whole", 8)
    run("stopped", 4)
    assert losses(run("stopped", 8)) == losses(whole)
    assert len(losses(whole)) == 8


# What a run reports.


def test_every_line_of_the_metrics_has_every_figure(open_engine, tmp_path, capsys):
    engine, data = open_engine(), dataset(shuffled=False)
    metrics = train(
        engine,
        5,
        evaluation_data=data,
        evaluate_every=2,
        evaluate_batches=3,
        metrics=tmp_path / "metrics.jsonl",
        tensorboard=tmp_path / "events",
        learning_rate=SCHEDULE,
        log_every=2,
        describe=lambda batch: {"tokens": batch["x"].size, "rows": len(batch["x"])},
    )
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in found if "evaluation_loss" in line] == [2, 4, 5]
    # The mean over the first batches, which each evaluation begins with.
    first = [engine.evaluate(batch) for batch in list(data)[:3]]
    assert found[-1]["evaluation_loss"] == sum(first) / 3
    rates = [line["learning_rate"] for line in found]
    assert rates == [float(SCHEDULE(count)) for count in range(5)]
    seen = [line["tokens_seen"] for line in found]
    assert seen == [BATCH * WIDTH * count for count in range(1, 6)]
    assert {line["rows"] for line in found} == {BATCH}
    names = engine.step(next(iter(data))).keys() - {"skipped"}
    assert all(line.keys() >= names for line in found)
    assert metrics["step"] == 5 and metrics["loss"] == found[-1]["loss"]
    assert list((tmp_path / "events").iterdir())
    said = capsys.readouterr().out
    assert "step 2/5" in said and "step 3/5" not in said
    assert "5 steps in" in said and "No checkpoint was saved." in said


def test_a_trace_has_the_first_steps_of_a_run_in_the_order_of_the_plan(
    open_engine, tmp_path
):
    engine, path = open_engine(offloaded=True), tmp_path / "trace.json"
    engine.step(next(iter(dataset())))
    train(engine, 5, trace=path, trace_steps=2)
    steps = read_trace(path)
    assert [step.number for step in steps] == [2, 3]
    for step in steps:
        assert len(step.measured) == len(step.predicted)
        for spans in (step.measured, step.predicted):
            for instruction, span in zip(engine.plan.instructions, spans, strict=True):
                assert span.after == instruction.after
                # Two times that were each rounded to a nanosecond.
                assert all(spans[i].end <= span.start + 2e-9 for i in span.after)
            for link in Link:
                on_link = [span for span in spans if span.link == link]
                for earlier, later in pairwise(on_link):
                    assert earlier.end <= later.start + 2e-9
                moved_bytes = sum(span.nbytes for span in on_link)
                assert moved_bytes == engine.plan.link_bytes(link)


def test_steps_that_overflowed_do_not_advance_the_learning_rate(
    open_engine, checkpoints, tmp_path, monkeypatch
):
    """As optax counts: the rate of a skipped step is that of the next one too."""
    path = tmp_path / "metrics.jsonl"
    step = zinf.Engine.step

    def skipping(engine: zinf.Engine, batch: Any) -> dict[str, Any]:
        metrics = step(engine, batch)
        return {**metrics, "skipped": metrics["step"] in (1, 4)}

    monkeypatch.setattr(zinf.Engine, "step", skipping)
    rest = {"checkpoints": checkpoints, "metrics": path, "learning_rate": SCHEDULE}
    for steps in (3, 6):
        train(open_engine(), steps, **rest)
    rates = [line["learning_rate"] for line in lines(path)]
    assert rates == [float(SCHEDULE(count)) for count in (0, 0, 1, 2, 2, 3)]


# Checkpoints.


def test_checkpoints_come_at_their_steps_and_at_the_end(
    open_engine, checkpoints, tmp_path, capsys
):
    rest = {"checkpoints": checkpoints, "checkpoint_every": 2}
    train(open_engine(), 5, **rest)
    assert saved_steps(checkpoints) == {"2", "4", "5"}
    assert f"{checkpoints.folder(5)}, after step 5" in capsys.readouterr().out
    # A run that is done says so, changes nothing and leaves no trace.
    trace = tmp_path / "trace.json"
    assert train(open_engine(), 5, trace=trace, **rest) == {"step": 5}
    printed = capsys.readouterr().out
    assert "Resuming after step 5." in printed
    assert "Nothing to do: 5 steps are done." in printed
    assert saved_steps(checkpoints) == {"2", "4", "5"}
    assert not list(tmp_path.glob("trace*"))
    # A new run does not mix with an earlier one.
    with pytest.raises(ValueError, match="earlier run, up to step 5"):
        train(open_engine(), 6, resume=False, **rest)


class WithoutFiles(Alone):
    """As if with another process, in whose folders there is nothing."""

    def agree(self, values: Mapping[str, Any]) -> None:
        found = differences([values, dict.fromkeys(values)])
        if found is not None:
            raise EOFError(found)


def test_a_folder_that_is_not_that_of_all_processes_ends_them(open_engine, checkpoints):
    train(open_engine(group=WithoutFiles()), 2, checkpoints=checkpoints)
    found = "newest checkpoint that is found: 2 on process 0; None on process 1"
    with pytest.raises(EOFError, match=found):
        train(open_engine(group=WithoutFiles()), 3, checkpoints=checkpoints)
    assert checkpoints.latest_step() == 2


@pytest.fixture
def full_at_second_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive is full in the middle of the second save, and only then."""
    numbers = count(1)
    finish, is_full = Save.finish, threading.Event()

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        if is_full.is_set() and "orbax" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "whatever")
        os.posix_fallocate(descriptor, offset, nbytes)

    def fill_up(save: Save) -> None:
        if next(numbers) == 2:
            is_full.set()
        try:
            finish(save)
        finally:
            is_full.clear()

    monkeypatch.setattr(Save, "finish", fill_up)
    full = System(allocate=allocate)
    monkeypatch.setattr("zinf.core.memory.nvme.drive.System", lambda: full)


def test_a_checkpoint_that_failed_is_reported_and_training_goes_on(
    open_engine, checkpoints, full_at_second_save, capsys
):
    engine = open_engine()
    train(engine, 8, checkpoints=checkpoints, checkpoint_every=2)
    assert engine.num_steps == 8
    printed = capsys.readouterr().out
    assert "error: [Errno 28] Cannot save " in printed
    assert "No space left on device. Free space on that drive, keep fewer" in printed
    assert f"{checkpoints.folder(2)}, after step 2." in printed
    complete = {p.parent.name for p in checkpoints.directory.glob("*/state")}
    assert complete == {"2", "6", "8"}


@contextmanager
def replaced_by_a_file(checkpoints: Checkpoints) -> Iterator[None]:
    folder = checkpoints.directory
    assert isinstance(folder, Path)
    aside = folder.rename(folder.with_name("aside"))
    folder.write_text("a file")
    yield
    folder.unlink()
    aside.rename(folder)


@contextmanager
def step_exists(checkpoints: Checkpoints) -> Iterator[None]:
    folder = checkpoints.folder(4)
    assert isinstance(folder, Path)
    folder.mkdir()
    yield
    folder.rmdir()


def failing_to_mark(code: int) -> Callable[[Checkpoints], AbstractContextManager]:
    """Orbax gets a plain OSError, as from a drive full to the last byte.

    The file that Orbax writes itself, in a thread, fails too.
    """

    @contextmanager
    def failing(checkpoints: Checkpoints) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "mark", raising)
            patch.setattr(type(epath.Path("")), "write_text", raising)
            yield

    def raising(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    return failing


@contextmanager
def over_budget(checkpoints: Checkpoints) -> Iterator[None]:
    def fail(save: Save) -> None:
        save.cancel()
        held = {"asked_bytes": 2, "used_bytes": 0, "capacity_bytes": 1}
        raise BudgetExceeded(Tier.HOST, what="saving", **held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "finish", fail)
        yield


FAILURES = {
    "the drive is full to the last byte": (failing_to_mark(errno.ENOSPC), "Free space"),
    "the drive became read-only": (failing_to_mark(errno.EROFS), "can be written"),
    "the quota is used up": (failing_to_mark(errno.EDQUOT), "Raise the quota"),
    "the folder became a file": (replaced_by_a_file, "Move the file away"),
    "the step has a folder": (step_exists, "has a folder for step 4 already"),
    "no memory for a stripe": (over_budget, "saving needs 2 bytes on tier host"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_fails_a_save_is_reported_and_training_goes_on(
    failure, open_engine, checkpoints, capsys
):
    failing, advice = FAILURES[failure]
    with ExitStack() as fails:

        def batches() -> Iterator[Any]:
            for number, batch in enumerate(dataset(), start=1):
                if number == 4:
                    checkpoints.wait()
                    fails.enter_context(failing(checkpoints))
                if number == 6:
                    fails.close()
                yield batch

        engine = open_engine()
        train(engine, 8, batches(), checkpoints=checkpoints, checkpoint_every=2)
    assert engine.num_steps == 8
    printed = capsys.readouterr().out
    assert printed.count("error: ") == 1
    assert advice in printed
    assert saved_steps(checkpoints) == {"2", "6", "8"}


def test_a_name_that_the_drive_does_not_take_is_refused_before_the_first_step(
    checkpoints,
):
    longest = os.pathconf(checkpoints.directory, "PC_NAME_MAX")
    for length in (longest, longest + 1):
        params = {"a" * length: np.ones((WIDTH, WIDTH), np.float32)}

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((batch["x"] @ next(iter(params.values()))) ** 2)

        with zinf.initialize(loss, params, optax.sgd(0.1)) as engine:
            if length == longest:
                train(engine, 1, checkpoints=checkpoints)
                shutil.rmtree(checkpoints.folder(1))
                continue
            with pytest.raises(
                StorageError, match=f"{length} bytes, and {longest} are"
            ):
                train(engine, 1, checkpoints=checkpoints)
            assert engine.num_steps == 0


def unwritable(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What each is called in the error; and the call that fails, at step 3 of 5.
LINES = {
    "The metrics in": (JsonLines, "write"),
    "The TensorBoard events in": (EventsWriter, "write_event"),
    "The trace in": (TraceFile, "add"),
    "The CSV files in": (CsvFiles, "write"),
    "The lines on standard output": (Progress, "write"),
}


@pytest.mark.parametrize("target", LINES)
def test_a_line_that_cannot_be_written_saves_the_step_and_training_goes_on(
    target, open_engine, checkpoints, tmp_path, capsys
):
    with pytest.MonkeyPatch.context() as patch:

        def batches() -> Iterator[Any]:
            for number, batch in enumerate(dataset(), start=1):
                if number == 3:
                    patch.setattr(*LINES[target], unwritable)
                yield batch

        engine = open_engine(offloaded=True)
        folder = {"metrics": tmp_path / "m.jsonl", "tensorboard": tmp_path / "events"}
        folder["csv"] = tmp_path / "csv"
        paths = folder | {"trace": tmp_path / "trace.json", "trace_steps": 5}
        train(engine, 5, batches(), checkpoints=checkpoints, log_every=1, **paths)
    assert engine.num_steps == 5
    assert saved_steps(checkpoints) == {"3", "5"}
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert f"error: {target}" in said
    assert "cannot be written: No space left on device" in said
    steps = [line["step"] for line in lines(paths["metrics"])]
    assert steps == list(range(1, 3 if target == "The metrics in" else 6))


def test_a_run_without_standard_output_trains(open_engine, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    engine = open_engine()
    train(engine, 2)
    assert engine.num_steps == 2


def test_a_last_checkpoint_that_failed_fails_the_run(
    open_engine, checkpoints, full_at_second_save
):
    with pytest.raises(StorageError, match="Cannot save .*No space left on device"):
        train(open_engine(), 4, checkpoints=checkpoints, checkpoint_every=2)
    assert checkpoints.latest_step() == 2
    again = open_engine()
    train(again, 2, checkpoints=checkpoints)
    assert again.num_steps == 2


def test_a_drive_too_small_for_a_checkpoint_is_found_before_the_first_step(
    open_engine, checkpoints, monkeypatch
):
    room = shutil.disk_usage(checkpoints.directory)._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    engine = open_engine()
    with pytest.raises(StorageError, match="3 are free"):
        train(engine, 2, checkpoints=checkpoints)
    assert engine.num_steps == 0


# How a run ends.


class Interrupting(grain.transforms.Map):
    """Presses Ctrl-C `times` times while batch number `at` is read."""

    def __init__(self, at: int, times: int) -> None:
        self.left, self.times = at, times

    def map(self, element: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            for number in range(self.times):
                asked = signal.getsignal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                # Two signals that are not handled yet are one to the main thread. The
                # first one's handler installs that of the second.
                while number == 0 and signal.getsignal(signal.SIGINT) is asked:
                    sleep(0.001)
        return element


def test_an_interrupted_run_completes_its_step_and_can_be_resumed(
    open_engine, checkpoints, tmp_path, capfd
):
    handler = signal.getsignal(signal.SIGINT)
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    train(open_engine(), 6, metrics=whole)
    rest = {"checkpoints": checkpoints, "metrics": stopped}
    with pytest.raises(KeyboardInterrupt):
        train(open_engine(), 6, dataset().map(Interrupting(at=3, times=1)), **rest)
    assert signal.getsignal(signal.SIGINT) is handler
    assert saved_steps(checkpoints) == {"3"}
    captured = capfd.readouterr()
    assert "this step will be completed and saved" in captured.err
    assert f"{checkpoints.folder(3)}, after step 3" in captured.out
    train(open_engine(), 6, **rest)
    assert losses(stopped) == losses(whole)


def test_a_second_interrupt_stops_at_once_without_saving(open_engine, checkpoints):
    handler = signal.getsignal(signal.SIGINT)
    data, engine = dataset().map(Interrupting(at=3, times=2)), open_engine()
    with pytest.raises(KeyboardInterrupt):
        train(engine, 6, data, checkpoints=checkpoints)
    assert engine.num_steps == 2
    assert saved_steps(checkpoints) == set()
    assert signal.getsignal(signal.SIGINT) is handler


class Terminating(grain.transforms.Map):
    """Sends a signal while batch number `at` is read, then waits for `until`."""

    def __init__(self, at: int, signum: int, until: threading.Event) -> None:
        self.left, self.signum, self.until = at, signum, until

    def map(self, element: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.signum)
            assert self.until.wait(60)
        return element


@pytest.fixture(params=["SIGTERM", "SIGHUP"])
def signum(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that ends a process, whatever pytest's parent made of it."""
    number = signal.Signals[request.param]
    before = signal.signal(number, signal.SIG_DFL)
    yield number
    assert signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, before)


def test_a_scheduler_that_ends_a_run_has_its_step_saved(
    signum, open_engine, checkpoints, tmp_path, capfd
):
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    train(open_engine(), 6, metrics=whole)
    rest = {"checkpoints": checkpoints, "metrics": stopped}
    now = threading.Event()
    now.set()
    with pytest.raises(Terminated) as ended:
        train(open_engine(), 6, dataset().map(Terminating(3, signum, now)), **rest)
    assert ended.value.signum == signum
    assert saved_steps(checkpoints) == {"3"}
    assert signal.Signals(signum).name in capfd.readouterr().err
    train(open_engine(), 6, **rest)
    assert losses(stopped) == losses(whole)


def test_a_run_that_hangs_ends_when_its_grace_is_over(signum, open_engine, monkeypatch):
    codes: list[int] = []
    is_over = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        is_over.set()

    monkeypatch.setattr("zinf.core.process.termination.os._exit", leave)
    data = dataset().map(Terminating(2, signum, is_over))
    with pytest.raises(Terminated):
        train(open_engine(), 6, data, grace_seconds=0.01)
    assert codes == [128 + signum]


def test_a_signal_that_is_ignored_stays_ignored(open_engine):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    now = threading.Event()
    now.set()
    engine = open_engine()
    try:
        train(engine, 3, dataset().map(Terminating(2, signal.SIGHUP, now)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert engine.num_steps == 3


def test_a_run_outside_the_main_thread_leaves_signals_alone(open_engine):
    engine = open_engine()
    thread = threading.Thread(target=train, args=(engine, 2))
    thread.start()
    thread.join()
    assert engine.num_steps == 2


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(
    open_engine, checkpoints
):
    batches = list(dataset(shuffled=False))[:5]
    batches[4] = jax.tree.map(lambda x: x * np.nan, batches[4])
    rest = {"checkpoints": checkpoints, "checkpoint_every": 2}
    with pytest.raises(NonFiniteError) as stopped:
        train(open_engine(), 9, batches, **rest)
    said = f"The last checkpoint is {checkpoints.folder(4)}, after step 4."
    assert said in stopped.value.__notes__
    assert saved_steps(checkpoints) == {"2", "4"}


def test_data_that_ends_early_ends_the_run_with_a_checkpoint(
    open_engine, checkpoints, capsys
):
    batches = list(dataset(shuffled=False))[:3]
    assert train(open_engine(), 5, batches, checkpoints=checkpoints)["step"] == 3
    assert "The training data ended." in capsys.readouterr().out
    assert saved_steps(checkpoints) == {"3"}


def test_no_data_at_all_is_an_error(open_engine):
    with pytest.raises(ValueError, match="train_data has no batch"):
        train(open_engine(), 1, [])
    with pytest.raises(ValueError, match="evaluation_data has no batch"):
        train(open_engine(), 1, evaluate_every=1)
