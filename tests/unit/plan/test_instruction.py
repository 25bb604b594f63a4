"""Operations say in a few words what they do: they are lines of a printed plan."""

import pytest

from zinf.plan import (
    Accumulate,
    Decide,
    Free,
    FusedStep,
    Pass,
    Run,
    SumSquares,
    Transfer,
    Update,
)
from zinf.plan.instruction import TRANSFER_LINKS, summary
from zinf.program import ArrayId, Role, Tier

W = ArrayId(Role.PARAM, "w")
ROWS = ArrayId(Role.PARAM, "stack", (2, 3))
VALUE = ArrayId(Role.VALUE, "x", None, 1)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (Transfer((W,), Tier.NVME, Tier.HOST), "fetch param/w"),
        (Transfer((W, ROWS), Tier.HOST, Tier.DEVICE), "fetch param/w +1"),
        (Transfer((VALUE,), Tier.DEVICE, Tier.HOST), "offload value/x@1"),
        (Transfer((ROWS,), Tier.HOST, Tier.NVME), "offload param/stack[2:3]"),
        (Run(3, "blocks/3", Pass.BACKWARD, 1), "backward blocks/3 @1"),
        (Accumulate((W,), (ROWS,)), "accumulate param/w"),
        (SumSquares((W,), ArrayId(Role.NORM, "s")), "norm param/w"),
        (Decide((VALUE,), ()), "decide on the update: loss"),
        (Decide((VALUE,), (W,)), "decide on the update: gradient norm"),
        (Update(0, "blocks/3 1/2", Tier.HOST), "update blocks/3 1/2"),
        (Free((W, ROWS), Tier.HOST), "free param/w +1 on host"),
        (FusedStep(), "run the whole step"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_operation_names_what_it_does(operation: object, words: str) -> None:
    assert str(operation) == words


def test_a_group_of_arrays_is_the_first_and_how_many_more() -> None:
    assert summary((W,)) == "param/w"
    assert summary((ROWS, W, VALUE)) == "param/stack[2:3] +2"


def test_each_hop_between_neighbouring_tiers_is_a_link_of_its_own() -> None:
    tiers = list(Tier)
    neighbours = set(zip(tiers, tiers[1:], strict=False))
    neighbours |= {(slow, fast) for fast, slow in neighbours}
    assert TRANSFER_LINKS.keys() == neighbours
    assert len(set(TRANSFER_LINKS.values())) == len(neighbours)
    assert not any(link.only_frees for link in TRANSFER_LINKS.values())
