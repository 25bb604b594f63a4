"""Each allocation waits for the frees that it needs, and for no more."""

from dataclasses import replace

import pytest

from zinf.plan import Free, Instruction, Link, Rates, Transfer
from zinf.plan.fence import add_fences
from zinf.program import ArrayId, Role, Tier

NONE = dict.fromkeys(Tier, 0)


def allocate(nbytes: int, *after: int, link: Link = Link.H2D) -> Instruction:
    operation = Transfer((ArrayId(Role.PARAM, "w"),), Tier.HOST, Tier.DEVICE)
    taken = ((Tier.DEVICE, nbytes),)
    return Instruction(operation, link, after, allocates=taken, nbytes=nbytes)


def free(nbytes: int, *after: int) -> Instruction:
    operation = Free((ArrayId(Role.PARAM, "w"),), Tier.DEVICE)
    link = Link.FREE_AT_ONCE if not after else Link.FREE_AFTER_H2D
    return Instruction(operation, link, after, nbytes=nbytes)


def work(nbytes: int, link: Link = Link.DEVICE) -> Instruction:
    operation = Transfer((), Tier.HOST, Tier.DEVICE)
    return Instruction(operation, link, (), workspace=((Tier.DEVICE, nbytes),))


def fenced(
    *instructions: Instruction, limit: int, held: int = 0
) -> list[tuple[int, ...]]:
    limits = {**NONE, Tier.DEVICE: limit}
    start = {**NONE, Tier.DEVICE: held}
    fenced, _ = add_fences(instructions, limits, start, Rates())
    return [x.after for x in fenced]


def test_with_room_to_spare_nothing_waits() -> None:
    assert fenced(allocate(4), free(4), allocate(4), limit=8) == [(), (), ()]


def test_an_allocation_waits_for_the_free_that_makes_room() -> None:
    assert fenced(allocate(4), free(4), allocate(4), limit=7) == [(), (), (1,)]


def test_it_waits_for_no_more_frees_than_it_needs() -> None:
    plan = allocate(2), allocate(2), free(2), free(2), allocate(2)
    assert fenced(*plan, limit=4)[-1] == (2,)
    assert fenced(*plan[:-1], allocate(4), limit=4)[-1] == (3,)


def test_of_the_frees_it_waits_for_those_that_are_done_first() -> None:
    slow = allocate(10**9, link=Link.NVME_READ)
    quick, other = allocate(2), allocate(2)
    late, soon = free(2, 0), replace(free(2, 1), link=Link.FREE_AFTER_D2H)
    plan = slow, quick, other, late, soon, allocate(2)
    assert fenced(*plan, limit=10**9 + 4)[-1] == (4,)
    assert fenced(*plan[:-1], allocate(4), limit=10**9 + 4)[-1] == (3, 4)


def test_what_is_held_at_the_start_counts() -> None:
    assert fenced(allocate(4), free(4), allocate(4), limit=8)[-1] == ()
    assert fenced(allocate(4), free(4), allocate(4), limit=8, held=1)[-1] == (1,)


def test_workspace_is_given_back_by_the_instruction_itself() -> None:
    assert fenced(work(4), work(4), limit=4) == [(), (0,)]


def test_frees_of_other_tiers_do_not_help() -> None:
    operation = Free((ArrayId(Role.PARAM, "w"),), Tier.HOST)
    other = Instruction(operation, Link.FREE_AT_ONCE, ())
    plan = allocate(4), other, free(4), allocate(4)
    assert fenced(*plan, limit=4)[-1] == (2,)


def test_of_frees_on_several_links_the_last_of_each_is_waited_for() -> None:
    plan = work(1, Link.DEVICE), work(1, Link.HOST), work(1, Link.DEVICE), work(3)
    assert fenced(*plan, limit=3)[-1] == (1, 2)


def test_dependencies_that_were_there_stay() -> None:
    assert fenced(allocate(4), free(4, 0), allocate(4, 0), limit=4)[-1] == (0, 1)


def test_a_limit_below_the_peak_in_list_order_is_a_bug() -> None:
    with pytest.raises(IndexError):
        fenced(allocate(4), allocate(4), limit=7)
