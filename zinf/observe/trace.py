"""Writes steps to a trace file: the measured and predicted time of each instruction.

The file has the JSON array form of Chrome's trace event format, which
https://ui.perfetto.dev and `zinf plot` open. It has the processes "measured" and
"predicted", one thread per link in each, and one event per line.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from zinf.core.plan import (
    Accumulate,
    Decide,
    FetchChosen,
    Free,
    FusedStep,
    Instruction,
    Link,
    OffloadedStep,
    Plan,
    Run,
    SumParts,
    SumSquares,
    Timeline,
    Transfer,
    Update,
)
from zinf.core.plan.instruction import Operation
from zinf.core.program import Role, Tier

Event = dict[str, Any]

# The first event identifies the format. Viewers ignore metadata that they do not know.
MARK = {"name": "zinf trace", "ph": "M", "pid": 1, "args": {"version": 1}}
PROCESSES = {"measured": 1, "predicted": 2}
# Thread 0 has one event for each whole step; viewers show it above the links.
STEP_THREAD, STEP_KIND = 0, "step"
THREADS = {link: number for number, link in enumerate(Link, start=1)}
MARK_BYTES = 200  # The mark is within so many bytes at the start.
BEGIN, BETWEEN, END = b"[\n", b",\n", b"\n]\n"


class TraceFile:
    """Writes the first `num_steps` steps that are added and ignores all later ones.

    A few steps are enough, as all steps are alike; an instruction takes about 800 bytes
    per step, and large files slow viewers down. The time between steps is left out.

    The file gets its name with the first step; it replaces an earlier trace. After each
    step it is a complete JSON array. A crash during a write leaves an array without its
    end, which viewers and `read_trace` accept.

    Raises:
        FileExistsError: there is another file of that name, which is left as it is.
    """

    def __init__(self, path: Path | str, *, num_steps: int = 3) -> None:
        self.path = Path(path)
        self.target = f"The trace in {self.path}"
        if self.path.is_dir():
            raise IsADirectoryError(f"The trace cannot be written: {path} is a folder.")
        if self.path.exists() and not _is_trace(self.path):
            raise FileExistsError(
                f"The trace would replace {path}, which is no trace by zinf. It is "
                "left as it is. Name another file."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._file: IO[bytes] = self._partial.open("wb")
        self._file.write(BEGIN + _line(MARK) + END)
        self._left, self._is_new = num_steps, True
        self._named: set[tuple[int, int]] = set()
        self._offset_seconds = 0.0

    def add(self, step: int, plan: Plan, timeline: Timeline) -> None:
        """Writes a step with its measured `timeline` and the plan's predicted times."""
        if self._left == 0:
            return
        self._left -= 1
        events = list(self._events(step, plan, timeline))
        self._file.seek(-len(END), os.SEEK_END)
        self._file.write(b"".join(BETWEEN + _line(event) for event in events) + END)
        self._file.flush()
        self._offset_seconds += max(timeline.seconds, plan.timeline.seconds)
        if self._is_new:
            # Windows cannot rename an open file.
            self._file.close()
            self._partial.replace(self.path)
            self._file = self.path.open("r+b")
            self._is_new = False
        if self._left == 0:
            self._file.close()

    def close(self) -> None:
        self._file.close()
        if self._is_new:
            self._partial.unlink(missing_ok=True)

    def _events(self, step: int, plan: Plan, measured: Timeline) -> Iterator[Event]:
        used = {instruction.link for instruction in plan.instructions}
        timelines = {"measured": measured, "predicted": plan.timeline}
        for process in PROCESSES:
            yield from self._names(process, used)
        common = instruction_events(step, plan)
        for process, timeline in timelines.items():
            place = {"pid": PROCESSES[process]}
            spans = zip(common, timeline.start, timeline.end, strict=True)
            for event, start, end in spans:
                yield event | place | self._span(start, end)
        # The event of the whole step comes last: if it is in the file, all instructions
        # of the step are too.
        whole = {"name": f"step {step}", "cat": STEP_KIND, "ph": "X"}
        held = _by_tier(held_before(plan))
        for process, timeline in timelines.items():
            place = {"pid": PROCESSES[process], "tid": STEP_THREAD}
            span = self._span(0.0, timeline.seconds)
            yield whole | place | span | {"args": {"step": step, "held": held}}

    def _names(self, process: str, used: set[Link]) -> Iterator[Event]:
        """Events that name a process and its threads, unless they are in the file."""
        pid = PROCESSES[process]
        threads = {STEP_THREAD: STEP_KIND} | {THREADS[x]: str(x) for x in used}
        for tid, name in sorted(threads.items()):
            if (pid, tid) in self._named:
                continue
            self._named.add((pid, tid))
            if tid == STEP_THREAD:
                yield _metadata("process_name", pid, tid, name=process)
                yield _metadata("process_sort_index", pid, tid, sort_index=pid)
            yield _metadata("thread_name", pid, tid, name=name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)

    def _span(self, start: float, end: float) -> Event:
        """Times of an event, counted from the start of the first step in the file."""
        return event_times(self._offset_seconds + start, end - start)


def kind(operation: Operation) -> str:
    """What an operation does: the pass that it runs, or what it moves."""
    match operation:
        case Run():
            return str(operation.kind)
        case Transfer():
            return _moved(operation)
        case FetchChosen():
            return "chosen experts"
        case Accumulate():
            return "accumulate"
        case SumParts():
            return "exchange"
        case SumSquares():
            return "norm"
        case Decide():
            return "decide"
        case Update():
            return "update"
        case Free():
            return "free"
        case FusedStep() | OffloadedStep():
            return "whole step"
        case _:
            raise AssertionError(f"no kind for {operation}")


def _moved(transfer: Transfer) -> str:
    roles = {array.role for array in transfer.arrays}
    has_state = Role.STATE in roles
    if roles & {Role.PARAM, Role.MASTER}:
        return "parameters and state" if has_state else "parameters"
    if has_state:
        return "optimizer state"
    if any(role.layout_role in (Role.GRADIENT, Role.SUM) for role in roles):
        return "gradients"
    if Role.CACHE in roles:
        return "caches"
    return "norm" if Role.NORM in roles else "activations"


def array_names(instruction: Instruction) -> list[str]:
    """The arrays that an instruction reads, writes, moves or frees, each once."""
    operation = instruction.operation
    if isinstance(operation, Transfer | Free):
        return [str(array) for array in operation.arrays]
    copies = (*instruction.reads, *instruction.writes)
    return list(dict.fromkeys(str(array) for array, _ in copies))


def held_before(plan: Plan) -> dict[Tier, int]:
    """Bytes that each tier holds when a step begins.

    These are the arrays at home, the batch, and the gradients of updates that the
    previous step deferred to this one. Batch and gradients are found as copies that the
    step frees but does not make.
    """
    held = dict(plan.home_bytes)
    made = set()
    for instruction in plan.instructions:
        operation = instruction.operation
        if isinstance(operation, Free):
            copies = {(array, operation.tier) for array in operation.arrays}
            if not copies & made:
                held[operation.tier] += instruction.nbytes
            made -= copies
        made.update(instruction.writes)
    return held


def _freed(instruction: Instruction) -> dict[Tier, int]:
    operation = instruction.operation
    return {operation.tier: instruction.nbytes} if isinstance(operation, Free) else {}


def _by_tier(amounts: Mapping[Tier, int]) -> dict[str, int]:
    return {str(tier): nbytes for tier, nbytes in amounts.items()}


def event_times(start: float, seconds: float) -> Event:
    """Start and duration in microseconds, rounded to nanoseconds."""
    return {"ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3)}


def instruction_events(step: int, plan: Plan) -> list[Event]:
    """One event per instruction of a plan, without process and times."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, instruction in enumerate(plan.instructions):
        for earlier in instruction.after:
            waiting[earlier].append(index)
    return [
        {
            "name": str(instruction.operation),
            "cat": kind(instruction.operation),
            "ph": "X",
            "tid": THREADS[instruction.link],
            "args": {
                "step": step,
                "instruction": index,
                "bytes": instruction.nbytes,
                "flops": instruction.flops,
                "waits for": instruction.after,
                "waited for by": waiting[index],
                "arrays": array_names(instruction),
                "allocates": _by_tier(dict(instruction.allocates)),
                "workspace": _by_tier(dict(instruction.workspace)),
                "frees": _by_tier(_freed(instruction)),
            },
        }
        for index, instruction in enumerate(plan.instructions)
    ]


def _metadata(event: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"name": event, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _is_trace(path: Path) -> bool:
    """Whether a file is empty, or begins as those of `TraceFile` do."""
    with path.open("rb") as file:
        start = file.read(MARK_BYTES)
    return not start or start.startswith(BEGIN) and b"zinf trace" in start


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()
