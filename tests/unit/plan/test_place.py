"""Homes: what the user asked for, else the fastest tier with room; or the error."""

import pytest

from tests.golden import Golden
from zinf.core.plan import InfeasibleError, Resident, Shortage, place
from zinf.core.plan.place import may_rest
from zinf.core.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier


def resident(
    name: str, nbytes: int = 100, tier: Tier | None = None, moves: int = 2
) -> Resident:
    return Resident(ArrayId(Role.PARAM, name), nbytes, tier, moves)


A, B, C = map(resident, "abc")
STATE, PARAM = resident("state"), resident("param", moves=3)
LARGE, SMALL = resident("large", 300), resident("small", 50)
ASKED = resident("asked", tier=DEVICE)
ON_NVME = resident("99", 99, NVME), resident("100", 100, NVME)
EMPTY = resident("empty", 0, NVME), resident("scalar", 4, NVME)
# By name: the arrays, the room of each tier, the threshold, and their homes.
CASES = {
    "the fastest with room": ((A, B, C), (100, 150, 1000), 0, (DEVICE, HOST, NVME)),
    "to the last byte": ((A, B), (200, 0, 0), 0, (DEVICE, DEVICE)),
    "but one": ((A, B), (199, 100, 0), 0, (DEVICE, HOST)),
    "only what does not fit": ((LARGE, SMALL), (100, 1000, 1000), 0, (HOST, DEVICE)),
    "what moves most first": ((STATE, PARAM), (100, 100, 1000), 0, (HOST, DEVICE)),
    "what is asked for first": ((PARAM, ASKED), (100, 100, 1000), 0, (HOST, DEVICE)),
    "what fits nowhere": ((A,), (1, 1, 1), 0, (NVME,)),
    "below the threshold": (ON_NVME, (0, 0, 1000), 100, (HOST, NVME)),
    "small and nothing asked": ((SMALL,), (0, 0, 1000), 51, (HOST,)),
    "no elements": (EMPTY, (0, 0, 1000), 0, (HOST, NVME)),
    # If it does not fit, the plan says what is missing, where the user wanted it.
    "asked for, without room": ((ASKED,), (0, 0, 0), 0, (DEVICE,)),
}


@pytest.mark.parametrize("name", CASES)
def test_arrays_rest_on(name: str) -> None:
    arrays, room, threshold, homes = CASES[name]
    rooms = dict(zip(Tier, room, strict=True))
    found = place(arrays, rooms, persistence_bytes=threshold)
    assert [found[x.array] for x in arrays] == list(homes)


@pytest.mark.parametrize("ratio", [1, 4])
def test_whether_state_has_room_anywhere_counts_one_device_s_part(ratio: int) -> None:
    array = ArrayId(Role.PARAM, "w")
    part = Resident(array, 400, None, 3, device_bytes=400 // ratio)
    room = {DEVICE: 50, HOST: 100, NVME: 300 - 50 * ratio}
    assert may_rest([part], room)
    assert not may_rest([part], {**room, NVME: room[NVME] - 1})
    assert may_rest([part, resident("empty", 0)], room)


def test_an_error_says_what_was_asked_found_and_to_change(golden: Golden) -> None:
    capacity = {DEVICE: 1000, HOST: 2000, NVME: 3000}
    short = {
        NVME: Shortage(3000, 4000, "the state placed there"),
        HOST: Shortage(2000, 5000, "`update layer0`"),
        DEVICE: Shortage(1000, 1500, "`forward layer0 @0`"),
    }
    every = InfeasibleError(short, capacity)
    one = InfeasibleError({HOST: short[HOST]}, capacity, ["It is whole."])
    one.may_rest = False
    one = one.because(["It reads tiles."])
    assert every.because([]).may_rest and not one.may_rest
    golden.check("infeasible.txt", f"{every}\n{one}")
    assert list(every.shortages) == [DEVICE, HOST, NVME]
    assert every.missing_bytes == (500, 3000, 1000)
    assert one.missing_bytes == (0, 3000, 0)
    assert every.capacity_bytes == capacity
