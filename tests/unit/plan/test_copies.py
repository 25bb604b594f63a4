"""What exists where while a plan is written, what may go, and who waits for whom."""

from collections.abc import Sequence

import pytest

from tests.toy.program import LeafCase, chain
from zinf.core.plan import Copy, Link, StepOptions, Transfer, Update, value
from zinf.core.plan.copies import NEVER, Copies
from zinf.core.plan.job import Job
from zinf.core.plan.listing import Listing
from zinf.core.plan.schedule import schedule
from zinf.core.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
W0, W1, W2 = (ArrayId(Role.PARAM, f"layer{i}/w") for i in range(3))
ROWS = ArrayId(Role.PARAM, "layer0/w", (0, 2))
MATRIX_BYTES = 4 * 4 * 64


def copies(param: Tier = NVME) -> Copies:
    """Three layers of four rows, updated by two rows: jobs are forward 0 to 2, ..."""
    toy = chain(3, leaf=LeafCase("w", num_rows=4), block_rows=2)
    homes = toy.homes(param, NVME)
    catalog = toy.catalog(homes)
    options = StepOptions(1, True, DEVICE, HOST)
    return Copies(schedule(catalog, toy.units(homes), options), catalog, ())


def victims(
    found: Copies,
    tier: Tier,
    nbytes: int,
    protected: Sequence[Copy] = (),
    spare_until: int = NEVER,
) -> list[ArrayId]:
    return [a for a, _ in found.victims(tier, nbytes, set(protected), spare_until)[0]]


def test_rows_are_part_of_a_whole_that_is_there() -> None:
    found = copies()
    assert found.exists((W0, NVME)) and found.exists((ROWS, NVME))
    assert found.used[NVME] == found.peak[NVME] == 3 * 3 * MATRIX_BYTES
    assert found.key((ROWS, NVME)) == (W0, NVME)
    assert found.key((ROWS, HOST)) == (ROWS, HOST)
    found.occupy([(W0, HOST)])
    assert found.exists((ROWS, HOST)) and found.key((ROWS, HOST)) == (W0, HOST)
    assert found.vacate([(W0, HOST)]) == MATRIX_BYTES
    found.occupy([(ROWS, HOST)])
    assert found.key((ROWS, HOST)) == (ROWS, HOST)
    assert not found.exists((W0, HOST))
    found.use_bytes(HOST, 10)
    assert found.used[HOST] == MATRIX_BYTES // 2 + 10
    assert found.peak[HOST] == MATRIX_BYTES


def test_the_copy_that_is_needed_last_goes_first() -> None:
    found = copies()
    found.occupy([(W0, HOST), (W1, HOST), (W2, HOST)])
    for _ in range(2):  # Choosing victims changes nothing.
        # Seen from the forward pass of layer 0, layer 1 is next, then 2, then 0 again.
        assert victims(found, HOST, 3 * MATRIX_BYTES) == [W0, W2, W1]
        assert victims(found, HOST, MATRIX_BYTES + 1) == [W0, W2]
        assert victims(found, HOST, MATRIX_BYTES) == [W0]
        assert victims(found, HOST, 1, [(W0, HOST)]) == [W2]
        # Jobs 1 and 2 are the forward pass of layer 1 and the loss.
        assert victims(found, HOST, 3 * MATRIX_BYTES, spare_until=1) == [W0, W2]
        assert victims(found, HOST, 3 * MATRIX_BYTES, spare_until=2) == [W0]


def test_the_only_copy_never_goes() -> None:
    for array in (value("batch/x", 0), value("layer0.0", 0)):
        found = copies()
        found.occupy([(array, DEVICE)])
        assert victims(found, DEVICE, 1) == []
        found.occupy([(array, HOST)])
        # Now it can be had again from the host, whose own copy has to stay.
        assert victims(found, DEVICE, 1) == [array]
        assert victims(found, HOST, 1) == []
        found.vacate([(array, HOST)])
        assert victims(found, DEVICE, 1) == []


# What happens to arrays, and what the last instruction waits for. An update of the host
# waits for the decision, which is -1 here: there is none.
FETCH, UP, HOME = (NVME, HOST), (HOST, DEVICE), (HOST, NVME)
OTHERS = ArrayId(Role.PARAM, W0.path, (2, 4))
SCRIPTS = [
    ([(FETCH, W0), (UP, W0), ("update", W0)], {0, 1, -1}),
    ([(FETCH, W0), ("update", ROWS), ("update", OTHERS)], {0, -1}),
    ([(FETCH, W0), ("update", W0), (HOME, W0)], {0, 1}),
    ([(FETCH, W0), ("free", W0), (FETCH, W0)], {1}),
    # The store would write rows into the whole, and lose them with it.
    ([(FETCH, W0), ("free", W0), (FETCH, ROWS)], {1}),
    ([(FETCH, W0), (UP, W0), ("update", ROWS), ("free", W0)], {0, 1, 2}),
]


@pytest.mark.parametrize(("script", "after"), SCRIPTS)
def test_an_instruction_waits_for_these(
    script: Sequence[tuple[object, ArrayId]], after: set[int]
) -> None:
    toy = chain(1, leaf=LeafCase("w", num_rows=4))
    catalog = toy.catalog(toy.homes(NVME, NVME))
    present = Copies((), catalog, ())
    listing = Listing(catalog, present)
    for act, array in script:
        if act == "free":
            listing.free([array], HOST, present.vacate([(array, HOST)]))
            continue
        source, target = (HOST, HOST) if act == "update" else act
        operation = Transfer((array,), source, target)
        if act == "update":
            operation = Update(0, "layer0", HOST)
        ends = ((array, source),), ((array, target),)
        created = [c for c in ends[1] if not present.exists(c)]
        present.occupy(created)
        listing.add(Job(operation, Link.HOST, *ends), created)
    assert set(listing.instructions[-1].after) == after
