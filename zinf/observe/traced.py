"""Reads a trace file: its steps, and the instructions that ran on each link."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zinf.core.plan import Plan, Timeline
from zinf.core.program import Tier
from zinf.core.text.json_text import from_json
from zinf.observe.trace import (
    MARK,
    PROCESSES,
    STEP_KIND,
    Event,
    event_times,
    held_before,
    instruction_events,
)


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction; `start` and `end` are seconds from the start of its step.

    Attributes:
        kind: see `zinf.observe.trace.kind`.
        after: numbers of the instructions that it waited for.
        arrays: names of the arrays that it reads, writes, moves or frees.
        allocates, workspace, frees: bytes by tier, see `zinf.core.plan.Instruction`.
    """

    instruction: int
    link: str
    kind: str
    name: str
    start: float
    end: float
    nbytes: int
    after: tuple[int, ...]
    arrays: tuple[str, ...] = ()
    allocates: Mapping[str, int] = field(default_factory=dict)
    workspace: Mapping[str, int] = field(default_factory=dict)
    frees: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The measured and the predicted instructions of a step, in the order of the plan.

    Attributes:
        measured: empty if the step was only planned.
        held_bytes: bytes by tier when the step begins; empty in traces of older
            versions.
    """

    number: int
    measured: tuple[Span, ...]
    predicted: tuple[Span, ...]
    held_bytes: Mapping[str, int] = field(default_factory=dict)


def predicted_step(plan: Plan) -> TracedStep:
    """A plan as a step that has not run, with the number 0."""
    return TracedStep(0, (), _spans(plan, plan.timeline), _held(plan))


def measured_step(plan: Plan, timeline: Timeline) -> TracedStep:
    """A step that ran, from the plan and timeline of `engine.last_step`; number 0."""
    spans = _spans(plan, timeline), _spans(plan, plan.timeline)
    return TracedStep(0, *spans, _held(plan))


def _held(plan: Plan) -> dict[str, int]:
    return {str(tier): nbytes for tier, nbytes in held_before(plan).items()}


def _spans(plan: Plan, timeline: Timeline) -> tuple[Span, ...]:
    events = instruction_events(0, plan)
    times = zip(events, plan.instructions, timeline.start, timeline.end, strict=True)
    return tuple(
        _span(event | event_times(start, end - start), str(instruction.link), 0.0)
        for event, instruction, start, end in times
    )


def read_trace(path: Path | str) -> list[TracedStep]:
    """The complete steps of a file that `TraceFile` wrote, in the order of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, is no trace of zinf, or has no complete step.
    """
    try:
        events = _parse(Path(path).read_bytes())
    except ValueError as error:
        raise _foreign(path, f"it is not JSON ({error})") from None
    if not isinstance(events, list) or events[:1] != [MARK]:
        raise _foreign(path, f"it does not begin with {json.dumps(MARK['name'])}")
    try:
        steps = _steps(events)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, in an event: {type(error).__name__}: {error}. Trace "
            "again with zinf train CONFIG --trace FILE."
        ) from error
    if not steps:
        raise ValueError(
            f"{path} has no whole step: the run ended before its first was written."
        )
    return steps


def _parse(content: bytes) -> Any:
    try:
        return from_json(content)
    except ValueError:
        # After a crash the last line is incomplete and the array has no end.
        lines, _, _ = content.rpartition(b"\n")
        return from_json(lines.rstrip(b",\n") + b"]")


def _steps(events: list[Event]) -> list[TracedStep]:
    links = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    complete = [event for event in events if event["ph"] == "X"]
    wholes = {
        (event["pid"], event["args"]["step"]): event
        for event in complete
        if event["cat"] == STEP_KIND
    }
    begun = {key: _number(event["ts"]) for key, event in wholes.items()}
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for event in complete:
        key = event["pid"], event["args"]["step"]
        if event["cat"] != STEP_KIND and key in begun:
            link = links[event["pid"], event["tid"]]
            spans[key].append(_span(event, link, begun[key]))
    measured, predicted = PROCESSES["measured"], PROCESSES["predicted"]
    return [
        TracedStep(
            step,
            tuple(spans[pid, step]),
            tuple(spans[predicted, step]),
            _amounts(whole["args"].get("held", {})),
        )
        for (pid, step), whole in wholes.items()
        if pid == measured and (predicted, step) in wholes
    ]


def _span(event: Event, link: str, begun: float) -> Span:
    args, start = event["args"], _number(event["ts"]) - begun
    return Span(
        instruction=_number(args["instruction"]),
        link=str(link),
        kind=str(event["cat"]),
        name=str(event["name"]),
        start=start / 1e6,
        end=(start + _number(event["dur"])) / 1e6,
        nbytes=_number(args["bytes"]),
        after=tuple(map(_number, args["waits for"])),
        # Traces of earlier versions do not have the following keys.
        arrays=tuple(map(str, args.get("arrays", ()))),
        allocates=_amounts(args.get("allocates", {})),
        workspace=_amounts(args.get("workspace", {})),
        frees=_amounts(args.get("frees", {})),
    )


def _number(value: Any) -> Any:
    """`value`, which is a number.

    Raises:
        TypeError, ValueError: it is not, or is too large or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no number")
    if not abs(value) < 2**63:
        raise ValueError(f"{value!r:.40} is too large or not finite")
    return value


def _amounts(found: Any) -> dict[str, int]:
    """Bytes by tier."""
    return {str(Tier(tier)): _number(nbytes) for tier, nbytes in found.items()}


def _foreign(path: Path | str, why: str) -> ValueError:
    return ValueError(
        f"{path} is damaged, or no trace of zinf: {why}. Make one with zinf train "
        "CONFIG --trace FILE. (zinf report FOLDER draws the metrics of a run.)"
    )
