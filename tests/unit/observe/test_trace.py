"""A trace has every instruction on its link, and is whole whenever it is looked at."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.observe.cases import plan_of_a_step, slower, write_trace
from zinf.observe import TraceFile
from zinf.observe.trace import kind
from zinf.plan import (
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
from zinf.program import ArrayId, Role, Tier

Event = dict[str, Any]


def events_in(path: Path, phase: str = "X") -> list[Event]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def names_in(path: Path, what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events_in(path, "M")
        if event["name"] == what
    }


def test_every_instruction_is_on_its_link_as_measured_and_as_predicted(tmp_path):
    plan = write_trace(tmp_path / "trace.json", num_steps=1, factor=2.0)
    processes = names_in(tmp_path / "trace.json", "process_name")
    threads = names_in(tmp_path / "trace.json", "thread_name")
    timelines = {"measured": slower(plan.timeline, 2.0), "predicted": plan.timeline}
    for (pid, _), process in processes.items():
        events = [e for e in events_in(tmp_path / "trace.json") if e["pid"] == pid]
        *found, whole = events
        timeline = timelines.pop(process)
        assert whole["name"] == "step 1"
        assert (whole["ts"], whole["dur"]) == (0, round(timeline.seconds * 1e6, 3))
        assert threads[pid, whole["tid"]] == "step"
        for index, (event, instruction) in enumerate(
            zip(found, plan.instructions, strict=True)
        ):
            assert threads[pid, event["tid"]] == instruction.link
            assert event["name"] == str(instruction.operation)
            assert event["args"]["instruction"] == index
            # Times are rounded to a nanosecond.
            start, end = timeline.start[index] * 1e6, timeline.end[index] * 1e6
            assert event["ts"] == pytest.approx(start, abs=1e-3)
            assert event["dur"] == pytest.approx(end - start, abs=1e-3)
    assert timelines == {}


def test_arguments_are_those_of_the_plan(tmp_path):
    plan = write_trace(tmp_path / "trace.json", num_steps=2)
    events = events_in(tmp_path / "trace.json")
    found = [e["args"] for e in events if not e["name"].startswith("step ")]
    count = len(plan.instructions)
    assert len(found) == 2 * 2 * count
    for number, args in enumerate(found):
        instruction = plan.instructions[number % count]
        assert args["step"] == 1 + number // (2 * count)
        assert args["bytes"] == instruction.nbytes
        assert args["flops"] == instruction.flops
        assert args["waits for"] == list(instruction.after)
        waiting = [
            i for i, x in enumerate(plan.instructions) if number % count in x.after
        ]
        assert args["waited for by"] == waiting


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_steps_stand_one_after_another(factor, tmp_path):
    write_trace(tmp_path / "trace.json", num_steps=3, factor=factor)
    for pid in (1, 2):
        events = events_in(tmp_path / "trace.json")
        steps = [e for e in events if e["pid"] == pid and e["tid"] == 0]
        assert [e["name"] for e in steps] == ["step 1", "step 2", "step 3"]
        for earlier, later in pairwise(steps):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3


def test_the_file_is_whole_after_every_step_and_ends_with_the_last_one(tmp_path):
    path, plan = tmp_path / "new" / "trace.json", plan_of_a_step()
    trace = TraceFile(path, num_steps=2)
    for step, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2])):
        trace.add(step, plan, plan.timeline)
        whole = [e for e in events_in(path) if e["tid"] == 0 and e["pid"] == 1]
        assert [e["args"]["step"] for e in whole] == expected
    trace.close()
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]


def test_an_older_trace_stays_until_a_step_takes_its_place(tmp_path):
    path, plan = tmp_path / "trace.json", plan_of_a_step()
    path.write_text("older")
    trace = TraceFile(path)
    trace.close()
    assert [p.read_text() for p in tmp_path.iterdir()] == ["older"]
    trace = TraceFile(path)
    assert path.read_text() == "older"
    trace.add(1, plan, plan.timeline)
    assert events_in(path)
    trace.close()


def test_a_folder_in_its_place_is_refused_at_once(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        TraceFile(tmp_path)


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
def test_the_kind_says_what_an_operation_is_for(operation, expected):
    assert kind(operation) == expected
