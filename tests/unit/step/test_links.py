from random import Random
from threading import Event, Thread, enumerate
from time import sleep

import pytest

from tests.clock import still
from zinf.core.plan import Free, Instruction, Link
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.step.run import links
from zinf.core.step.run.links import Progress, run_links

A, B, C = Link.NVME_READ, Link.HOST, Link.DEVICE


def instructions(*steps: tuple[Link, tuple[int, ...]]) -> list[Instruction]:
    """Each on a link, after others; its operation is named by its number."""
    return [
        Instruction(Free((ArrayId(Role.PARAM, f"n{i}"),), Tier.HOST), link, after)
        for i, (link, after) in zip(range(len(steps)), steps, strict=True)
    ]


def number(instruction: Instruction) -> int:
    return int(instruction.operation.arrays[0].path[1:])


def workers() -> list[str]:
    return [t.name for t in enumerate() if t.name.startswith("zinf ")]


def run(plan, execute):
    progress = Progress(len(plan))
    run_links(plan, execute, progress)
    return progress


def test_a_link_keeps_the_order_of_the_plan():
    done = []
    plan = instructions(*[(A, ())] * 50)
    run(plan, lambda i: done.append(number(i)))
    assert done == list(range(50))
    assert workers() == []


def test_no_wait_is_missed_among_many_links():
    """Each waits for some of the last dozen, which are done in any order."""
    random, ended = Random(1), set()
    steps = []
    for i in range(2000):
        earlier = range(max(0, i - 12), i)
        after = tuple(random.sample(earlier, min(i % 4, len(earlier))))
        steps.append((random.choice(list(Link)), after))
    plan = instructions(*steps)

    def execute(instruction):
        # Sets are changed by one operation of the interpreter.
        assert all(j in ended for j in instruction.after)
        if random.random() < 0.1:
            sleep(1e-5)
        ended.add(number(instruction))

    run(plan, execute)
    assert len(ended) == len(plan)


def test_links_run_at_the_same_time():
    met = {A: Event(), B: Event()}

    def execute(instruction):
        met[instruction.link].set()
        other = B if instruction.link == A else A
        assert met[other].wait(timeout=60)

    run(instructions((A, ()), (B, ())), execute)


def test_an_error_is_raised_with_the_name_of_its_instruction_and_stops_all():
    done = []

    def execute(instruction):
        if number(instruction) == 2:
            raise OSError("broken")
        done.append(number(instruction))

    plan = instructions((A, ()), (B, (0,)), (A, (1,)), (B, (2,)), (C, (3,)), (A, ()))
    with pytest.raises(OSError, match="broken") as caught:
        run(plan, execute)
    assert caught.value.__notes__ == [
        "in instruction #2 on the link nvme read: free param/n2 on host"
    ]
    assert done == [0, 1]
    assert workers() == []


def test_the_first_of_two_errors_is_raised():
    progress = Progress(2)

    def execute(instruction):
        if instruction.link == A:
            raise ValueError("the first")
        while progress.error is None:
            sleep(0.001)
        raise ValueError("the second")

    with pytest.raises(ValueError, match="the first"):
        run_links(instructions((A, ()), (B, ())), execute, progress)
    assert workers() == []


def test_the_time_of_each_link_is_measured_without_its_waits():
    plan = instructions((A, ()), (B, (0,)))
    taken = {A: 5.0, B: 2.0}
    with still("perf_counter", links) as clock:
        progress = run(plan, lambda i: clock.advance(taken[i.link]))
    timeline = progress.timeline
    assert (timeline.start, timeline.end) == ((0.0, 5.0), (5.0, 7.0))
    assert timeline.busy_seconds(plan) == taken
    assert not progress.interrupted


def test_a_plan_runs_outside_of_the_main_thread():
    done = []
    plan = instructions((A, ()), (B, (0,)))
    thread = Thread(target=run, args=(plan, done.append))
    thread.start()
    thread.join(timeout=60)
    assert done == plan
