"""Homes: what the user asked for, else the fastest tier with room."""

import pytest

from zinf.plan import Resident, place
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = dict.fromkeys(Tier, 1 << 30)


def resident(
    name: str, nbytes: int = 100, tier: Tier | None = None, moves: int = 2
) -> Resident:
    return Resident(ArrayId(Role.PARAM, name), nbytes, tier, moves)


def homes(
    *residents: Resident, persistence_bytes: int = 0, **room: int
) -> dict[str, Tier]:
    rooms = {tier: room.get(tier.value, 0) for tier in Tier}
    found = place(residents, rooms, persistence_bytes=persistence_bytes)
    return {array.path: tier for array, tier in found.items()}


@pytest.mark.parametrize("tier", list(Tier))
def test_a_tier_that_was_asked_for_is_taken_whatever_its_room(tier: Tier) -> None:
    # If it does not fit, the plan says what is missing, where the user wanted it.
    assert homes(resident("w", tier=tier)) == {"w": tier}


def test_the_fastest_tier_with_room_is_taken() -> None:
    arrays = [resident(name) for name in "abc"]
    found = homes(*arrays, device=100, host=150, nvme=1000)
    assert found == {"a": DEVICE, "b": HOST, "c": NVME}


def test_only_what_does_not_fit_spills() -> None:
    arrays = resident("large", 300), resident("small", 50)
    found = homes(*arrays, device=100, host=1000, nvme=1000)
    assert found == {"large": HOST, "small": DEVICE}


def test_what_is_moved_most_is_kept_fastest() -> None:
    arrays = resident("state", moves=2), resident("param", moves=3)
    found = homes(*arrays, device=100, host=100, nvme=1000)
    assert found == {"param": DEVICE, "state": HOST}


def test_what_was_asked_for_has_its_room_first() -> None:
    arrays = resident("free", moves=3), resident("asked", tier=DEVICE, moves=2)
    found = homes(*arrays, device=100, host=100, nvme=1000)
    assert found == {"asked": DEVICE, "free": HOST}


def test_arrays_smaller_than_the_threshold_never_go_to_nvme() -> None:
    arrays = resident("small", 99, tier=NVME), resident("large", 100, tier=NVME)
    found = homes(*arrays, persistence_bytes=100, nvme=1000)
    assert found == {"small": HOST, "large": NVME}
    assert homes(resident("small", 99), persistence_bytes=100, nvme=1000) == {
        "small": HOST
    }


def test_an_array_without_bytes_never_goes_to_nvme() -> None:
    arrays = resident("empty", 0, tier=NVME), resident("scalar", 4, tier=NVME)
    assert homes(*arrays, persistence_bytes=0) == {"empty": HOST, "scalar": NVME}


def test_what_fits_nowhere_goes_to_the_slowest_tier() -> None:
    assert homes(resident("w"), device=1, host=1, nvme=1) == {"w": NVME}


def test_room_is_used_to_the_last_byte() -> None:
    arrays = [resident(name) for name in "ab"]
    assert set(homes(*arrays, device=200).values()) == {DEVICE}
    assert homes(*arrays, device=199, host=100)["b"] == HOST
