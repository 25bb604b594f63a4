"""A trace has every instruction on its link; it is whole whenever it is read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden import Golden
from tests.unit.observe.cases import plan_of_a_step, step_of, write_trace
from zinf.core.plan import (
    Accumulate,
    Decide,
    Free,
    FusedStep,
    Pass,
    Run,
    SumSquares,
    Transfer,
    Update,
)
from zinf.core.program import ArrayId, Role, Tier
from zinf.observe import TraceFile, read_trace
from zinf.observe.replay import busy_seconds, replay
from zinf.observe.trace import MARK, kind
from zinf.observe.traced import Span, predicted_step


def test_a_trace_has_every_instruction_as_measured_and_as_predicted(
    golden: Golden, tmp_path: Path
) -> None:
    """Names, arguments and times, one event a line; steps stand one after another."""
    write_trace(tmp_path / "trace.json", num_steps=2)
    golden.check("trace.json", (tmp_path / "trace.json").read_text())


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_steps_come_back_as_they_were_written(factor: float, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", num_steps=3, factor=factor)
    first, *later = read_trace(tmp_path / "trace.json")
    assert first == replace(step_of(factor), number=1)
    assert [step.number for step in later] == [2, 3]
    for step in later:
        pairs = zip(
            (*step.measured, *step.predicted),
            (*first.measured, *first.predicted),
            strict=True,
        )
        for found, expected in pairs:
            # Times were rounded to nanoseconds, at both ends.
            times = pytest.approx([expected.start, expected.end], abs=2e-9)
            assert [found.start, found.end] == times
            assert replace(found, start=0, end=0) == replace(expected, start=0, end=0)


def test_a_plan_is_a_step_that_was_not_measured() -> None:
    plan, step = plan_of_a_step(), step_of()
    assert predicted_step(plan) == replace(step, measured=())
    # At home, and what the step frees but does not make: 2 MB on the host.
    held = {"device": 0, "host": 3_000_000, "nvme": 9_000_000}
    assert step.held_bytes == held


def test_the_file_is_whole_after_every_step_and_ends_with_the_last_one(
    tmp_path: Path,
) -> None:
    path, plan = tmp_path / "new" / "trace.json", plan_of_a_step()
    trace = TraceFile(path, num_steps=2)
    for step, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2])):
        trace.add(step, plan, plan.timeline)
        assert isinstance(json.loads(path.read_text()), list)
        assert [step.number for step in read_trace(path)] == expected
    trace.close()
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]


def test_an_older_trace_stays_until_a_step_takes_its_place(tmp_path: Path) -> None:
    path, plan = tmp_path / "trace.json", plan_of_a_step()
    older = '[\n{"name": "zinf trace"}\n]\n'
    path.write_text(older)
    TraceFile(path).close()
    assert [p.read_text() for p in tmp_path.iterdir()] == [older]
    trace = TraceFile(path)
    assert path.read_text() == older
    trace.add(1, plan, plan.timeline)
    assert read_trace(path)
    trace.close()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        TraceFile(tmp_path)


def test_a_trace_that_was_cut_anywhere_gives_its_whole_steps(tmp_path: Path) -> None:
    path, cut = tmp_path / "trace.json", tmp_path / "cut.json"
    write_trace(path, num_steps=2)
    content, whole = path.read_bytes(), read_trace(path)
    # A step is whole when the line that names it is, which is its last.
    names = [content.rindex(f'"name":"step {n}"'.encode()) for n in (1, 2)]
    ends = [content.index(b"\n", name) for name in names]
    edges = [end + more for end in ends for more in (-1, 0, 1)]
    for length in sorted({*range(0, len(content), 97), *edges}):
        cut.write_bytes(content[:length])
        if length <= ends[0]:
            with pytest.raises(ValueError, match=r"damaged|has no whole step"):
                read_trace(cut)
        else:
            assert read_trace(cut) == whole[: sum(length > end for end in ends)]


FOREIGN = {
    "empty": (b"", "is not JSON"),
    "picture": (b"\x89PNG\r\n\x1a\n\x00\x00", "is not JSON"),
    "object": (b'{"traceEvents": []}', 'does not begin with "zinf trace"'),
    "other trace": (b'[{"name": "x", "ph": "M"}]', "does not begin with"),
    "no step": (json.dumps([MARK]).encode(), "has no whole step"),
    "no time": (
        json.dumps([MARK, {"name": "x", "ph": "X"}]).encode(),
        "KeyError: 'cat'",
    ),
    "no event": (json.dumps([MARK, 3]).encode(), "is damaged"),
}


def test_a_file_that_is_no_trace_is_named_in_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    write_trace(path)
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = content[:middle] + b"\0\n" + content[middle:], "or no trace of zinf"
    for found, words in (*FOREIGN.values(), damaged):
        path.write_bytes(found)
        with pytest.raises(ValueError, match=words) as caught:
            read_trace(path)
        assert str(path) in str(caught.value)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.json")


def test_a_trace_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, num_steps=1)
    events = json.loads(path.read_text())
    for event in events:
        for name in ("arrays", "allocates", "workspace", "frees", "held"):
            event.get("args", {}).pop(name, None)
    path.write_text(json.dumps(events))
    (step,) = read_trace(path)
    assert step.held_bytes == {}
    assert {span.arrays for span in step.measured} == {()}


PARAM, MASTER = ArrayId(Role.PARAM, "w"), ArrayId(Role.MASTER, "w")
STATE = ArrayId(Role.STATE, "w", slot=1)
GRADIENT, VALUE = ArrayId(Role.GRADIENT, "w"), ArrayId(Role.VALUE, "w")
NORM = ArrayId(Role.NORM, "w")


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Run(0, "s", Pass.BACKWARD, 0), "backward"),
        (Transfer((PARAM,), Tier.HOST, Tier.DEVICE), "parameters"),
        (Transfer((MASTER, STATE), Tier.HOST, Tier.NVME), "parameters and state"),
        (Transfer((STATE,), Tier.NVME, Tier.HOST), "optimizer state"),
        (Transfer((GRADIENT, NORM), Tier.DEVICE, Tier.HOST), "gradients"),
        (Transfer((NORM,), Tier.DEVICE, Tier.HOST), "norm"),
        (Transfer((VALUE,), Tier.HOST, Tier.DEVICE), "activations"),
        (Accumulate((GRADIENT,), (VALUE,)), "accumulate"),
        (SumSquares((GRADIENT,), NORM), "norm"),
        (Decide((), ()), "decide"),
        (Update(0, "w", Tier.HOST), "update"),
        (Free((PARAM,), Tier.HOST), "free"),
        (FusedStep(), "whole step"),
    ],
)
def test_the_kind_says_what_an_operation_is_for(operation, expected) -> None:
    assert kind(operation) == expected


# A step that is played again with faster links.


def span(number: int, link: str, start: float, end: float, *after: int) -> Span:
    return Span(number, link, "kind", f"#{number}", start, end, 0, after)


# Two reads of 2 s, each computed on for 3 s once it is there.
STEP = (
    span(0, "nvme read", 0, 2),
    span(1, "device", 2, 5, 0),
    span(2, "nvme read", 2, 4),
    span(3, "device", 5, 8, 2),
)


@pytest.mark.parametrize(
    ("speedups", "seconds"),
    [
        ({}, 8.0),
        # The first read takes 1 s, and nothing waits for the second one.
        ({"nvme read": 2.0}, 7.0),
        # The first computation ends at 3.5 s, before the second read.
        ({"device": 2.0}, 5.5),
        # A read that is slower than the computation before it holds that up.
        ({"nvme read": 0.5}, 11.0),
        ({"nvme read": 2.0, "device": 2.0}, 4.0),
        ({"absent": 9.0}, 8.0),
    ],
)
def test_a_faster_link_is_waited_for_less(speedups, seconds) -> None:
    assert replay(STEP, speedups) == replay(STEP[::-1], speedups) == seconds
    assert busy_seconds(STEP) == {"nvme read": 4.0, "device": 6.0}


@pytest.mark.parametrize("content", ["mine", "[1]", '[\n{"name": "another trace"}]'])
def test_a_file_that_is_no_trace_is_refused_untouched(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(FileExistsError, match="left as it is"):
        TraceFile(path)
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]
