from dataclasses import replace
from functools import partial
from random import Random
from threading import Event, Thread, enumerate
from time import sleep
from types import SimpleNamespace

import jax
import pytest

from tests.clock import still
from zinf.core.memory import BudgetExceeded, open_stores
from zinf.core.optim.decision import Decision, Pending
from zinf.core.plan import Free, Instruction, Link, Pass, Run, Transfer
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.step.run import links
from zinf.core.step.run.links import Progress, run_links
from zinf.core.step.run.run import Work, run_alone

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


# Devices that are given programs ahead.


def program(copies: str = "", after: tuple[int, ...] = ()) -> Instruction:
    """One that makes new copies of arrays (lower case), and replaces others."""
    writes = [(ArrayId(Role.VALUE, x.lower()), Tier.DEVICE) for x in copies]
    creates = [c for c, x in zip(writes, copies, strict=True) if x.islower()]
    run = Run(0, "s", Pass.FORWARD, 0)
    return Instruction(
        run, Link.DEVICE, after, writes=tuple(writes), creates=tuple(creates)
    )


def free(*after: int, tier: Tier = Tier.DEVICE) -> Instruction:
    return Instruction(Free((), tier), Link.FREE_AFTER_DEVICE, after)


def fetch(*after: int) -> Instruction:
    arrays = (ArrayId(Role.PARAM, "w"),)
    return Instruction(Transfer(arrays, Tier.HOST, Tier.DEVICE), Link.H2D, after)


def offload(*after: int) -> Instruction:
    arrays = (ArrayId(Role.PARAM, "w"),)
    return Instruction(Transfer(arrays, Tier.DEVICE, Tier.HOST), Link.D2H, after)


class Device:
    """Completes each program when it is told to, and notes what begins and ends.

    Attributes:
        events: the numbers of instructions as they begin, and `~number` of programs as
            they are completed.
    """

    def __init__(self, plan, at_once=2):
        self.plan, self.at_once, self.events = plan, at_once, []
        self.may_end = {i: Event() for i in range(len(plan))}
        self.began = {i: Event() for i in range(len(plan))}
        self.errors = {}

    def __call__(self, instruction):
        index = next(i for i in range(len(self.plan)) if self.plan[i] is instruction)
        self.events.append(index)
        self.began[index].set()
        return partial(self.end, index) if instruction.link == Link.DEVICE else None

    def end(self, index):
        assert self.may_end[index].wait(timeout=60)
        self.events.append(~index)
        if index in self.errors:
            raise self.errors[index]

    def run(self, *steps):
        """Run the plan; each of `steps` waits for a beginning, or (~n) lets n end."""
        progress, found = Progress(len(self.plan)), []

        def work():
            try:
                run_links(self.plan, self, progress, programs_at_once=self.at_once)
            except Exception as error:
                found.append(error)

        thread = Thread(target=work)
        thread.start()
        for step in steps:
            if step < 0:
                self.may_end[~step].set()
            else:
                assert self.began[step].wait(timeout=60)
        thread.join(timeout=60)
        assert not thread.is_alive() and workers() == []
        return found


def test_a_program_is_given_while_the_one_before_it_runs():
    device = Device([program("a"), program("b", (0,)), program("c", (1,))])
    # Each ends only after the next has begun.
    assert device.run(0, 1, ~0, 2, ~1, ~2) == []
    assert device.events == [0, 1, ~0, 2, ~1, ~2]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_device_never_has_more_programs_than_it_may(at_once):
    device = Device([program("a", (i - 1,) if i else ()) for i in range(20)], at_once)
    for event in device.may_end.values():
        event.set()
    assert device.run() == []
    running = 0
    for event in device.events:
        running += 1 if event >= 0 else -1
        assert running <= at_once
    assert len(device.events) == 40


def test_memory_that_a_program_frees_is_given_to_the_next_but_to_no_transfer():
    """The transfer waits for the second free, and so for what the first waits for."""
    plan = [program("a"), program("b", (0,)), free(1), free(0)]
    plan += [program("c", (2, 3)), fetch(3)]
    device = Device(plan, 3)
    assert device.run(0, 1, 2, 3, 4, ~0, ~1, 5, ~4) == []
    assert device.events.index(5) > device.events.index(~1)


@pytest.mark.parametrize(
    "held_back",
    [
        # By a transfer that comes after the first program, and that the third needs:
        # it would get its memory after the second.
        [program("a"), fetch(0), program("b"), program("c", (1,))],
        # By the way of the result to the host and back.
        [program("a"), offload(0), free(1), program("b", (2,))],
        # It overwrites what the first computes.
        [program("a"), program("A", (0,))],
        # Memory of the host is not the device's.
        [program("a"), free(0, tier=Tier.HOST), program("b", (1,))],
    ],
)
def test_a_program_is_not_given_ahead_of(held_back):
    device = Device(held_back)
    for event in device.may_end.values():
        event.set()
    assert device.run() == []
    second = [i for i in device.events if i > 0 and held_back[i].link == C][0]
    assert device.events.index(~0) < device.events.index(second)


def test_the_error_of_a_program_that_was_given_ahead_has_its_name():
    """The next one has no inputs, and fails as it is given."""
    device = Device([program("a"), program("b", (0,)), offload(1)])
    device.errors = {0: OSError("broken"), 1: ValueError("no input")}
    (error,) = device.run(1, ~1, ~0)
    assert isinstance(error, OSError)
    assert error.__notes__ == ["in instruction #0 on the link device: forward s @0"]
    assert 2 not in device.events


def test_what_fails_as_it_is_given_waits_for_what_was_given_before():
    class Refusing(Device):
        def __call__(self, instruction):
            super().__call__(instruction)
            if self.events[-1] == 1:
                raise ValueError("the second")
            return partial(self.end, 0)

        def end(self, index):
            self.began[2].wait(timeout=0.1)  # Which the free would begin in.
            super().end(index)

    # The free of what the second would have made waits too.
    device = Refusing([program("a"), program("b"), free(1)])
    device.errors = {0: OSError("the first")}
    (error,) = device.run(1, ~0)
    assert str(error) == "the first"
    assert 2 not in device.events


def test_an_instruction_without_room_on_a_tier_counts_nothing_on_others():
    capacity = {Tier.DEVICE: 100, Tier.HOST: 10}
    stores = open_stores(jax.devices()[:1], capacity_bytes=capacity)
    work = Work(segments=(), layouts=None)
    room = (Tier.DEVICE, 50), (Tier.HOST, 20)
    (short,) = instructions((Link.H2D, ()))
    short = replace(short, workspace=room)
    decided = Pending(Decision(0.0, 0.0, 1.0, skips=False), ())
    plan = SimpleNamespace(shared=None)
    with pytest.raises(BudgetExceeded):
        run_alone(short, plan, work, stores, None, decided)
    assert [stores[tier].ledger.used_bytes for tier in capacity] == [0, 0]


def test_the_time_of_a_program_begins_when_the_one_before_it_ends():
    device = Device([program("a"), program("b", (0,))])

    def end(index):
        assert device.began[1].wait(timeout=60)
        clock.advance(5.0)

    device.end = end
    with still("perf_counter", links) as clock:
        progress = Progress(2)
        run_links(device.plan, device, progress, programs_at_once=2)
    timeline = progress.timeline
    assert (timeline.start, timeline.end) == ((0.0, 5.0), (5.0, 10.0))
