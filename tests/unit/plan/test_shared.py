"""What may be in one memory on host and device."""

from zinf.plan import Accumulate, Instruction, Link, Transfer, Update
from zinf.plan.shared import shared_arrays
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
W, G = ArrayId(Role.PARAM, "w"), ArrayId(Role.GRADIENT, "w")
ROWS = ArrayId(Role.PARAM, "w", (0, 2))


def move(array: ArrayId, source: Tier, target: Tier) -> Instruction:
    ends = ((array, source),), ((array, target),)
    return Instruction(Transfer((array,), source, target), Link.H2D, (), *ends)


def make(array: ArrayId, tier: Tier) -> Instruction:
    operation = Accumulate((array,), ())
    return Instruction(operation, Link.DEVICE, (), (), ((array, tier),))


def update(array: ArrayId, tier: Tier) -> Instruction:
    copies = ((array, tier),)
    return Instruction(Update(0, "w", tier), Link.HOST, (), copies, copies)


def shared(*instructions: Instruction, home: Tier = NVME) -> tuple[set, set]:
    found = shared_arrays(instructions, {W: home})
    return set(found.up), set(found.down)


def test_what_is_updated_on_the_host_goes_up_as_it_is() -> None:
    assert shared(move(W, HOST, DEVICE), update(W, HOST)) == ({W}, set())


def test_what_the_device_changes_or_keeps_is_its_own() -> None:
    assert shared(move(W, HOST, DEVICE), update(W, DEVICE)) == (set(), set())
    assert shared(move(W, HOST, DEVICE), make(ROWS, DEVICE)) == (set(), set())
    assert shared(move(W, HOST, DEVICE), home=DEVICE) == (set(), set())


def test_rows_and_their_whole_are_not_both_shared() -> None:
    assert shared(move(ROWS, HOST, DEVICE)) == ({ROWS}, set())
    assert shared(move(ROWS, HOST, DEVICE), move(W, HOST, DEVICE)) == (set(), set())


def test_a_complete_gradient_comes_down_as_it_is() -> None:
    assert shared(make(G, DEVICE), move(G, DEVICE, HOST)) == (set(), {G})


def test_what_changes_afterwards_or_goes_to_the_drive_is_copied_down() -> None:
    down = make(G, DEVICE), move(G, DEVICE, HOST)
    assert shared(*down, make(G, DEVICE)) == (set(), set())
    assert shared(*down, update(G, HOST)) == (set(), set())
    assert shared(*down, move(G, HOST, NVME)) == (set(), set())
    # To its home on the host, where it is already.
    assert shared(make(W, DEVICE), move(W, DEVICE, HOST), home=HOST) == (set(), set())
