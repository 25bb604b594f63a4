"""Blocks of a region never overlap, and what is idle is known to the page."""

from random import Random

import pytest

from zinf.memory.region import HUGE_PAGE_BYTES, UNIT_BYTES, Region


def test_addresses_run_out() -> None:
    region = Region(4 * HUGE_PAGE_BYTES)
    assert region.take(4 * HUGE_PAGE_BYTES + 1) is None
    first = region.take(4 * HUGE_PAGE_BYTES)
    assert first is not None and region.take(1) is None
    region.give_back(first, 4 * HUGE_PAGE_BYTES)
    assert region.take(1) is not None


def test_what_is_free_is_not_taken_back_again() -> None:
    region = Region(4 * HUGE_PAGE_BYTES)
    first = region.take(HUGE_PAGE_BYTES)
    assert first is not None
    region.give_back(first, HUGE_PAGE_BYTES)
    with pytest.raises(AssertionError, match="free already"):
        region.give_back(first, HUGE_PAGE_BYTES)


def test_blocks_share_a_huge_page_which_is_idle_when_both_are_gone() -> None:
    region = Region(4 * HUGE_PAGE_BYTES)
    both = [region.take(UNIT_BYTES), region.take(UNIT_BYTES)]
    assert both[0] is not None and both[1] == both[0] + UNIT_BYTES
    region.give_back(both[0], UNIT_BYTES)
    assert region.idle_pages == 0
    region.give_back(both[1], UNIT_BYTES)
    assert region.idle_pages == 1
    region.trim(2)
    assert region.idle_pages == 0


def test_a_page_that_was_given_back_is_new_memory() -> None:
    region = Region(4 * HUGE_PAGE_BYTES)
    start = region.take(HUGE_PAGE_BYTES)
    assert start is not None
    region.memory[start : start + 4] = b"abcd"
    region.give_back(start, HUGE_PAGE_BYTES)
    assert region.take(HUGE_PAGE_BYTES) == start
    assert region.memory[start : start + 4] == b"abcd"
    region.give_back(start, HUGE_PAGE_BYTES)
    region.trim(1)
    assert region.memory[start : start + 4] == bytes(4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
def test_no_block_loses_a_byte_to_another(seed: int) -> None:
    random, region = Random(seed), Region(64 * HUGE_PAGE_BYTES)
    held: dict[int, tuple[int, bytes]] = {}
    for turn in range(1500):
        if held and random.random() < 0.5:
            start = random.choice(list(held))
            nbytes, mark = held.pop(start)
            ends = region.memory[start : start + 8], _last(region, start, nbytes)
            assert ends == (mark, mark)
            region.give_back(start, nbytes)
        else:
            nbytes = random.randrange(16, 12 * HUGE_PAGE_BYTES)
            start = region.take(nbytes)
            if start is not None:
                mark = turn.to_bytes(8, "little")
                region.memory[start : start + 8] = mark
                region.memory[start + nbytes - 8 : start + nbytes] = mark
                held[start] = nbytes, mark
        if turn % 10 == 0:
            region.trim(random.randrange(8))
    for start, (nbytes, _) in held.items():
        region.give_back(start, nbytes)
    assert region.take(64 * HUGE_PAGE_BYTES) is not None, "it is whole again"


def _last(region: Region, start: int, nbytes: int) -> bytes:
    return region.memory[start + nbytes - 8 : start + nbytes]
