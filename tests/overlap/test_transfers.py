"""How busy the order in which transfers are issued keeps the link that binds.

The executor's own threads run the plan, on devices that move and compute nothing: each
instruction takes the time that its bytes need at a given bandwidth, on a virtual clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Event, Lock

import pytest

from tests.toy.program import Layer, LeafCase, Toy, make_toy
from zinf.core.plan import (
    Choices,
    Instruction,
    Link,
    Plan,
    Rates,
    StepOptions,
    build_at_home,
)
from zinf.core.plan.cost import duration
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.step.run.links import Progress, Wait, run_links

# What a step waits for at its turn, and at its end, does not grow with depth: up to six
# transfers here, while the gradients of the layers that stayed make room.
NUM_LAYERS = 64
NUMEL = 4000
KB = 1e3
LAYER_BYTES = NUMEL * 4
PLENTY = dict.fromkeys(Tier, 10**9)


@dataclass
class FakeMachine:
    """Links that take the time of given rates, and remember when they were busy.

    `run_links` calls `execute` for the instructions of a link in its order, and after
    those that they wait for. So the ends of all that one waits for are known then.
    """

    rates: Rates
    plan: Plan
    ends: dict[int, float] = field(default_factory=dict)
    free_at: dict[Link, float] = field(default_factory=dict)
    busy: dict[Link, float] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def execute(self, instruction: Instruction) -> None:
        with self.lock:
            waits = [self.ends[k] for k in map(self.number, instruction.after)]
            start = max([self.free_at.get(instruction.link, 0.0), *waits])
            seconds = duration(instruction, self.rates)
            end = self.ends[id(instruction)] = start + seconds
            self.free_at[instruction.link] = end
            link = instruction.link
            self.busy[link] = self.busy.get(link, 0.0) + seconds

    def number(self, index: int) -> int:
        return id(self.plan.instructions[index])

    def run(self) -> None:
        progress = Progress(len(self.plan.instructions))
        run_links(self.plan.instructions, self.execute, progress)

    def share(self, link: Link) -> float:
        """The share of the step in which a link is busy."""
        return self.busy[link] / max(self.ends.values())


def chain() -> Toy:
    """Layers with one matrix each, all in host memory."""
    names = range(NUM_LAYERS)
    leaves = [LeafCase(f"w{i}", num_rows=4, row_numel=NUMEL // 4) for i in names]
    layers = [
        Layer(
            f"s{i}",
            (ArrayId(Role.PARAM, f"w{i}"),),
            (f"s{i - 1}.0" if i else "batch/x",),
            (f"s{i}.0",),
        )
        for i in names
    ]
    return make_toy(leaves, layers, value_numel=8, block_rows=4, is_fine=True)


@cache
def machine(room: int, clips: bool, bandwidths: tuple[float, float]) -> Plan:
    """The plan of the chain; `room` is the device's, in layers."""
    toy = chain()
    there, back = bandwidths
    links = {
        Link.NVME_READ: KB,
        Link.NVME_WRITE: KB,
        Link.H2D: there * KB,
        Link.D2H: back * KB,
    }
    updates = {Tier.HOST: 1000 * KB, Tier.DEVICE: 1000 * KB}
    rates = Rates(links, 1e9, updates, 1e-6)
    capacity = PLENTY | {Tier.DEVICE: room * LAYER_BYTES}
    homes: Mapping[ArrayId, Tier] = toy.homes(Tier.HOST, Tier.HOST)
    catalog = replace(toy.catalog(homes), rates=rates)
    return build_at_home(
        catalog,
        toy.units_for,
        capacity,
        StepOptions(1, not clips, Tier.DEVICE, Tier.HOST),
        Choices((Tier.DEVICE,), (Tier.HOST,), 0, defers=True),
    ).plan


@pytest.mark.parametrize(("room", "clips"), [(8, True), (5, False)])
def test_the_link_that_binds_is_busy_for_95_percent_of_a_step(room, clips):
    """Parameters move to the device twice, except the last ones; gradients back."""
    plan = machine(room, clips, (8.0, 8.0))
    found = FakeMachine(plan.rates, plan)
    found.run()
    moved = sum(i.nbytes for i in plan.instructions if i.link == Link.H2D)
    assert moved >= (2 * NUM_LAYERS - room) * LAYER_BYTES
    assert found.share(Link.H2D) >= 0.95


def test_so_is_the_way_back_where_it_is_slower():
    plan = machine(8, False, (32.0, 8.0))
    found = FakeMachine(plan.rates, plan)
    found.run()
    # The first gradient is there after the forward pass, which the other link binds.
    passes = NUM_LAYERS * LAYER_BYTES / (32.0 * KB)
    step = max(found.ends.values())
    assert found.busy[Link.D2H] >= 0.95 * (step - passes)


def test_a_link_that_is_issued_one_transfer_at_a_time_is_not():
    """What the measure says of a machine that waits for each layer before the next."""
    plan = machine(8, True, (8.0, 8.0))
    before: dict[Link, int] = {}
    waiting = []
    for index, instruction in enumerate(plan.instructions):
        others = [i for link, i in before.items() if link != instruction.link]
        after = tuple(sorted({*instruction.after, *others}))
        waiting.append(replace(instruction, after=after))
        before[instruction.link] = index
    slow = replace(plan, instructions=tuple(waiting))
    found = FakeMachine(slow.rates, slow)
    found.run()
    assert found.share(Link.H2D) < 0.9


@pytest.mark.parametrize(("room", "clips"), [(5, False), (5, True), (16, False)])
def test_a_device_with_room_for_five_layers_always_has_a_program_waiting(room, clips):
    """Each program is complete only after the next was given, however long that takes.

    So a device never waits for the time that Python needs to launch a program. With
    room for fewer layers, transfers would be late.
    """
    plan = machine(room, clips, (8.0, 8.0))
    programs = [i for i in plan.instructions if i.link == Link.DEVICE]
    given = {id(program): Event() for program in programs}
    after = dict(zip(map(id, programs), map(id, programs[1:]), strict=False))

    def complete(program: int) -> None:
        assert program not in after or given[after[program]].wait(timeout=60)

    def execute(instruction: Instruction) -> Wait | None:
        if instruction.link != Link.DEVICE:
            return None
        given[id(instruction)].set()
        return partial(complete, id(instruction))

    progress = Progress(len(plan.instructions))
    run_links(plan.instructions, execute, progress, programs_at_once=2)
    assert len(programs) > 2 * NUM_LAYERS
    assert all(map(progress.is_complete, range(len(plan.instructions))))
