"""What may be in one memory on host and device."""

import pytest

from zinf.core.plan import Accumulate, Instruction, Link, Transfer, Update
from zinf.core.plan.shared import Shared, shared_arrays
from zinf.core.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
W, G = ArrayId(Role.PARAM, "w"), ArrayId(Role.GRADIENT, "w")
ROWS = ArrayId(Role.PARAM, "w", (0, 2))


def move(array: ArrayId, source: Tier, target: Tier) -> Instruction:
    ends = ((array, source),), ((array, target),)
    return Instruction(Transfer((array,), source, target), Link.H2D, (), *ends)


def make(array: ArrayId, tier: Tier = DEVICE) -> Instruction:
    operation = Accumulate((array,), ())
    return Instruction(operation, Link.DEVICE, (), (), ((array, tier),))


def update(array: ArrayId, tier: Tier) -> Instruction:
    copies = ((array, tier),)
    return Instruction(Update(0, "w", tier), Link.HOST, (), copies, copies)


UP, DOWN = move(W, HOST, DEVICE), (make(G), move(G, DEVICE, HOST))
# By name: the instructions, where w rests, and what is shared up and down.
CASES = {
    "updated on the host": ([UP, update(W, HOST)], NVME, {W}, set()),
    "updated on the device": ([UP, update(W, DEVICE)], NVME, set(), set()),
    "rows change on the device": ([UP, make(ROWS)], NVME, set(), set()),
    "at rest on the device": ([UP], DEVICE, set(), set()),
    "rows alone": ([move(ROWS, HOST, DEVICE)], NVME, {ROWS}, set()),
    "rows and their whole": ([move(ROWS, HOST, DEVICE), UP], NVME, set(), set()),
    "a complete gradient": (DOWN, NVME, set(), {G}),
    "a gradient that changes afterwards": ([*DOWN, make(G)], NVME, set(), set()),
    "changed on the host": ([*DOWN, update(G, HOST)], NVME, set(), set()),
    "sent to the drive": ([*DOWN, move(G, HOST, NVME)], NVME, set(), set()),
    # To its home on the host, where it is already.
    "moved home": ([make(W), move(W, DEVICE, HOST)], HOST, set(), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_these_arrays_may_share_memory(name: str) -> None:
    instructions, home, up, down = CASES[name]
    expected = Shared(frozenset(up), frozenset(down))
    assert shared_arrays(instructions, {W: home}) == expected
