"""The metrics file holds each step once, also after a crash and a resume."""

import json
from pathlib import Path

import pytest

from tests.unit.observe.cases import metrics_of
from zinf.observe import JsonLines


def write(path: Path, steps: range, *, after_step: int = 0) -> None:
    writer = JsonLines(path, after_step=after_step)
    for step in steps:
        writer.write(metrics_of(step))
    writer.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_complete_when_write_returns(tmp_path):
    writer = JsonLines(tmp_path / "new" / "metrics.jsonl")
    writer.write(metrics_of(1))
    assert json.loads((tmp_path / "new" / "metrics.jsonl").read_text()) == metrics_of(1)
    writer.close()


def test_a_resumed_run_replaces_the_steps_it_repeats_and_keeps_their_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    write(path, range(6, 10), after_step=5)
    assert steps_in(path) == list(range(1, 10))
    assert steps_in(tmp_path / "metrics.1.jsonl") == [6, 7]
    # One that repeats nothing leaves nothing to keep.
    write(path, range(10, 12), after_step=9)
    assert steps_in(path) == list(range(1, 12))
    assert len(list(tmp_path.iterdir())) == 2


def test_new_runs_begin_the_file_anew_and_number_those_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for last in (4, 3, 2):
        write(path, range(1, last))
    assert steps_in(path) == [1]
    assert steps_in(tmp_path / "metrics.1.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "metrics.2.jsonl") == [1, 2]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', "not json\n", "[1]\n"])
def test_what_a_crash_left_behind_is_cut_off(rest, tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    with path.open("a") as file:
        file.write(rest)
    write(path, range(3, 5), after_step=4)
    assert steps_in(path) == [1, 2, 3, 4]
