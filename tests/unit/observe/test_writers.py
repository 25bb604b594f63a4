"""Writers of metrics: a file of lines, TensorBoard, the terminal, and the summary."""

import io
import json
import math
from collections import defaultdict
from functools import reduce
from operator import add
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.golden import Golden
from tests.unit.observe.cases import metrics_of, plan_of_a_step
from zinf.core.plan import Link
from zinf.core.program import Tier
from zinf.observe import CsvFiles, JsonLines, Progress, TensorBoard, Totals, summary
from zinf.observe.progress import Silence
from zinf.observe.writer import MAX_LISTED, lists, numbers

# Numbers that JSON can express.


def test_numbers_keep_their_order_and_kind() -> None:
    metrics = {"step": 1, "loss": np.float32(0.5), "skipped": False, "rate": None}
    found = numbers(metrics)
    assert list(found) == ["step", "loss", "skipped", "rate"]
    assert found == metrics
    assert [type(x) for x in found.values()] == [int, float, bool, type(None)]
    infinite = numbers({"loss": math.inf, "grad_norm": math.nan, "a": -math.inf})
    assert infinite == {"loss": None, "grad_norm": None, "a": None}


def test_auxiliary_outputs_are_named_by_their_path() -> None:
    aux = {"accuracy": jnp.float32(0.25), "parts": (np.int32(3), jnp.ones((1,)))}
    table = np.array([[1.0, math.inf]])
    metrics = {"aux": aux | {"table": table, "long": np.zeros(MAX_LISTED + 1)}}
    assert numbers(metrics) == {
        "aux/accuracy": 0.25,
        "aux/parts/0": 3,
        "aux/parts/1": 1.0,
    }
    assert lists(metrics) == {"aux/table": [[1.0, None]]}
    assert lists({"a": np.zeros(MAX_LISTED)}) == {"a": [0.0] * MAX_LISTED}


# The metrics file has each step once, also after a crash and a resume.


def write(path: Path, steps: range, *, after_step: int = 0) -> Path | None:
    writer = JsonLines(path, after_step=after_step)
    for step in steps:
        writer.write(metrics_of(step))
    writer.close()
    return writer.kept


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_complete_when_write_returns(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "new" / "metrics.jsonl")
    writer.write(metrics_of(1, shares=np.ones(2)))
    found = json.loads((tmp_path / "new" / "metrics.jsonl").read_text())
    assert found == metrics_of(1, shares=[1.0, 1.0])
    writer.close()


def test_a_resumed_run_replaces_the_steps_it_repeats_and_keeps_their_lines(
    tmp_path: Path,
) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "metrics.1.jsonl"
    assert write(path, range(1, 8)) is None
    assert write(path, range(6, 10), after_step=5) == kept
    assert steps_in(path) == list(range(1, 10))
    assert steps_in(kept) == [6, 7]
    # A run that repeats nothing leaves nothing to keep.
    assert write(path, range(10, 12), after_step=9) is None
    assert steps_in(path) == list(range(1, 12))
    assert len(list(tmp_path.iterdir())) == 2


def test_new_runs_begin_the_file_anew_and_number_those_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in (4, 3, 2):
        write(path, range(1, last))
    assert steps_in(path) == [1]
    assert steps_in(tmp_path / "metrics.1.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "metrics.2.jsonl") == [1, 2]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', "not json\n", "[1]\n"])
def test_what_a_crash_left_behind_is_cut_off(rest: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    with path.open("a") as file:
        file.write(rest)
    write(path, range(3, 5), after_step=4)
    assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("after_step", [0, 4])
@pytest.mark.parametrize("content", ['{"mine": 1}', "mine", "mine\nand more"])
def test_a_file_of_another_kind_is_moved_and_not_lost(
    content: str, after_step: int, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    kept = write(path, range(5, 7), after_step=after_step)
    assert kept is not None and kept.read_text() == content
    assert steps_in(path) == [5, 6]


# CSV files have each step once too, in a file for each number.


def write_csv(folder: Path, steps: range, *, after_step: int = 0) -> Path | None:
    writer = CsvFiles(folder, after_step=after_step)
    for step in steps:
        aux = {"the share": step / 2}
        writer.write({"step": step, "loss": float(step), "rate": None, "aux": aux})
    writer.close()
    return writer.kept


def test_a_number_is_a_file_of_rows_as_deepspeed_writes_them(tmp_path: Path) -> None:
    assert write_csv(tmp_path / "job", range(1, 3)) is None
    files = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert files == {
        "loss.csv": "step,loss\n1,1.0\n2,2.0\n",
        "aux_the_share.csv": "step,the share\n1,0.5\n2,1.0\n",
    }


# Steps before a run, the step it goes on after, and the steps that it repeats.
REPEATED = [(3, 3, []), (4, 2, [1, 2, 3, 4]), (3, 0, [1, 2, 3])]


@pytest.mark.parametrize(("before", "after_step", "copied"), REPEATED)
def test_rows_of_repeated_steps_are_replaced_and_copied(
    before: int, after_step: int, copied: list[int], tmp_path: Path
) -> None:
    def steps(folder: Path) -> list[int]:
        rows = (folder / "loss.csv").read_text().splitlines()
        assert rows[0] == "step,loss"
        return [int(row.partition(",")[0]) for row in rows[1:]]

    write_csv(tmp_path, range(1, before + 1))
    other = tmp_path / "mine.csv"
    other.write_text("name,size\na,9\n")
    kept = write_csv(tmp_path, range(after_step + 1, 6), after_step=after_step)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert kept == (tmp_path / "run.1" if copied else None)
    assert not copied or steps(tmp_path / "run.1") == copied
    assert other.read_text() == "name,size\na,9\n"


def test_a_row_that_was_cut_short_is_written_anew(tmp_path: Path) -> None:
    write_csv(tmp_path, range(1, 3))
    with (tmp_path / "loss.csv").open("a") as file:
        file.write("3,3.")
    write_csv(tmp_path, range(3, 4), after_step=2)
    assert (tmp_path / "loss.csv").read_text() == "step,loss\n1,1.0\n2,2.0\n3,3.0\n"


# TensorBoard gets every number of every step.


def events_in(directory: Path) -> list[Event]:
    """The records of the event files: length, its checksum, content, checksum."""
    found = []
    for path in sorted(directory.glob("events*")):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_each_number_is_a_scalar_of_its_step(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path)
    for step in (1, 2):
        writer.write(metrics_of(step, grad_norm=None))
    writer.close()
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    for event in events_in(tmp_path):
        for value in event.summary.value:
            scalars[value.tag][event.step] = value.simple_value
    assert scalars["loss"] == {1: 4.0, 2: 3.0}
    assert scalars["host_bytes"] == {1: 20.0, 2: 40.0}
    assert set(scalars) == set(metrics_of(1)) - {"step", "grad_norm"}


@pytest.mark.parametrize("after_step", [0, 7])
def test_steps_that_are_repeated_are_hidden(after_step: int, tmp_path: Path) -> None:
    TensorBoard(tmp_path, after_step=after_step).close()
    starts = [e.step for e in events_in(tmp_path) if e.HasField("session_log")]
    assert starts == [after_step + 1]


def test_events_of_an_earlier_run_are_kept_as_a_run_of_their_own(
    tmp_path: Path,
) -> None:
    for run in range(3):
        writer = TensorBoard(tmp_path)
        writer.write(metrics_of(run + 1))
        writer.close()
        assert writer.kept == (tmp_path / f"run.{run}" if run else None)
    # A run that is resumed goes on beside what it wrote before.
    TensorBoard(tmp_path, after_step=3).close()
    assert len([p for p in tmp_path.iterdir() if p.is_file()]) == 2
    for run in (1, 2):
        found = events_in(tmp_path / f"run.{run}")
        assert {e.step for e in found if e.summary.value} == {run}


# A bar on a terminal, and a few plain lines anywhere else.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_plain_line_comes_every_few_steps(golden: Golden) -> None:
    runs = {
        "every third step": (range(1, 9), {"num_steps": 8, "log_every": 3}, {}),
        "resumed": (range(6, 9), {"num_steps": 8, "log_every": 9, "after_step": 5}, {}),
        "an evaluation": (range(1, 3), {"num_steps": 9, "log_every": 9}, {2: 1.5}),
        "samples": (range(1, 2), {"num_steps": 2}, {}),
        "rewards": (range(1, 2), {"num_steps": 2}, {}),
    }
    texts = []
    for name, (steps, settings, evaluated) in runs.items():
        file = io.StringIO()
        progress = Progress(file=file, **settings)
        for step in steps:
            loss = {"evaluation_loss": evaluated[step]} if step in evaluated else {}
            rate = {"samples_per_second": 9.0} if name == "samples" else {}
            reward = {"reward": -8.25} if name == "rewards" else {}
            progress.write(metrics_of(step) | loss | rate | reward)
        progress.write(metrics_of(8, grad_norm=None, learning_rate=None, skipped=True))
        progress.close()
        texts.append(f"{name}\n{file.getvalue()}")
    golden.check("progress.txt", "\n".join(texts))


def test_on_a_terminal_there_is_a_bar_and_text_goes_above_it(capsys) -> None:
    file = Terminal()
    progress = Progress(num_steps=4, after_step=1, file=file)
    progress.write(metrics_of(2, evaluation_loss=0.125, reward=0.5))
    progress.say("saved")
    progress.close()
    shown = file.getvalue()
    assert (
        "2/4" in shown
        and "loss 3.0000, reward 0.5, 200 tokens/s, evaluation 0.1250" in shown
    )
    assert "\nsaved\n" in shown.replace("\r", "\n")
    quiet = Silence()
    quiet.write(metrics_of(1))
    quiet.say("saved")
    quiet.close()
    assert capsys.readouterr().out == ""


# Totals, and the summary at the end of a run.


def test_totals_add_what_adds_up_and_keep_the_largest_of_what_does_not() -> None:
    losses = [None, 0.75, None]
    steps = [metrics_of(i + 1, evaluation_loss=x) for i, x in enumerate(losses)]
    total = reduce(add, map(Totals.of, steps))
    assert total.num_steps == 3
    assert (total.first_loss, total.last_loss) == (4.0, 2.0)
    assert total.evaluation_loss == 0.75
    assert total.seconds == 6.0
    assert total.tokens == 2.0 * (100 + 200 + 300)
    assert total.peak_bytes == {Tier.DEVICE: 10, Tier.HOST: 60, Tier.NVME: 30}
    links = Link.NVME_READ, Link.NVME_WRITE, Link.H2D, Link.D2H
    assert total.moved_bytes == dict(zip(links, (3, 6, 9, 12), strict=True))


def test_measured_and_planned_stand_side_by_side(golden: Golden) -> None:
    plan = plan_of_a_step()
    first = metrics_of(1, device_bytes=2**19, h2d_bytes=4096)
    second = metrics_of(2, device_bytes=2**18, h2d_bytes=4097, evaluation_loss=3.25)
    alone, both = Totals.of(first), Totals.of(first) + Totals.of(second)
    golden.check("summary.txt", f"{summary(alone, plan)}\n\n{summary(both, plan)}")
    large = Totals.of(metrics_of(1, host_bytes=plan.peak_bytes[Tier.HOST] + 1))
    for totals, saves in ((large, True), (large, False), (alone, True)):
        says = "More than planned: saves" in summary(totals, plan, saves=saves)
        assert says == (totals is large and saves)
    samples = Totals.of(metrics_of(1, samples_per_second=100.0))
    assert "4.0 s: 100 samples/s, " in summary(samples + samples, plan)
