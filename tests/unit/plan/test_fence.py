"""Each allocation waits for the frees that it needs, and for no more."""

from dataclasses import replace

import pytest

from zinf.core.plan import Free, Instruction, Link, Rates, Transfer
from zinf.core.plan.fence import add_fences
from zinf.core.program import ArrayId, Role, Tier

NONE = dict.fromkeys(Tier, 0)
W = (ArrayId(Role.PARAM, "w"),)


def allocate(nbytes: int, *after: int, link: Link = Link.H2D) -> Instruction:
    operation = Transfer(W, Tier.HOST, Tier.DEVICE)
    taken = ((Tier.DEVICE, nbytes),)
    return Instruction(operation, link, after, allocates=taken, nbytes=nbytes)


def free(nbytes: int, *after: int, tier: Tier = Tier.DEVICE) -> Instruction:
    link = Link.FREE_AT_ONCE if not after else Link.FREE_AFTER_H2D
    return Instruction(Free(W, tier), link, after, nbytes=nbytes)


def work(nbytes: int, link: Link = Link.DEVICE) -> Instruction:
    operation = Transfer((), Tier.HOST, Tier.DEVICE)
    return Instruction(operation, link, (), workspace=((Tier.DEVICE, nbytes),))


SLOW = allocate(10**9, link=Link.NVME_READ)
LATE, SOON = free(2, 0), replace(free(2, 1), link=Link.FREE_AFTER_D2H)
OF_BOTH = [SLOW, allocate(2), allocate(2), LATE, SOON]
TWICE = [allocate(4), free(4), allocate(4)]
HALVES = [allocate(2), allocate(2), free(2), free(2)]
LINKS = [work(1), work(1, Link.HOST), work(1), work(3)]
# The limit, the bytes held at the start, the instructions, what the last waits for.
CASES = {
    "room to spare": (8, 0, TWICE, ()),
    "the free that makes room": (7, 0, TWICE, (1,)),
    "what is held at the start counts": (8, 1, TWICE, (1,)),
    "no more frees than needed": (4, 0, [*HALVES, allocate(2)], (2,)),
    "as many frees as needed": (4, 0, [*HALVES, allocate(4)], (3,)),
    "the free that is done first": (10**9 + 4, 0, [*OF_BOTH, allocate(2)], (4,)),
    "frees of two links": (10**9 + 4, 0, [*OF_BOTH, allocate(4)], (3, 4)),
    "workspace is given back": (4, 0, [work(4), work(4)], (0,)),
    "frees of other tiers do not help": (
        4,
        0,
        [allocate(4), free(4, tier=Tier.HOST), free(4), allocate(4)],
        (2,),
    ),
    "of each link the last": (3, 0, LINKS, (1, 2)),
    "dependencies stay": (4, 0, [allocate(4), free(4, 0), allocate(4, 0)], (0, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_allocation_waits_for(name: str) -> None:
    limit, held, instructions, after = CASES[name]
    limits, start = {**NONE, Tier.DEVICE: limit}, {**NONE, Tier.DEVICE: held}
    fenced, peak = add_fences(instructions, limits, start, Rates())
    assert fenced[-1].after == after
    if after:
        assert peak[Tier.DEVICE] <= limit
    else:
        assert peak[Tier.DEVICE] == 8


def test_a_limit_below_the_peak_in_list_order_is_a_bug() -> None:
    with pytest.raises(IndexError):
        add_fences([allocate(4), allocate(4)], {**NONE, Tier.DEVICE: 7}, NONE, Rates())
