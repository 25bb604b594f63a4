"""What exists where while a plan is written, and what may go."""

from tests.toy.program import LeafCase, chain
from zinf.plan import StepOptions, Update, value
from zinf.plan.copies import NEVER, Copies
from zinf.plan.schedule import schedule
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
W0, W1, W2 = (ArrayId(Role.PARAM, f"layer{i}/w") for i in range(3))
ROWS = ArrayId(Role.PARAM, "layer0/w", (0, 2))
MATRIX_BYTES = 4 * 4 * 64


def copies(param: Tier = NVME, state: Tier = NVME) -> Copies:
    """Three layers of four rows, updated by two rows: jobs are forward 0 to 2, ..."""
    toy = chain(3, leaf=LeafCase("w", num_rows=4), block_rows=2)
    homes = toy.homes(param, state)
    catalog = toy.catalog(homes)
    options = StepOptions(1, True, DEVICE, HOST)
    return Copies(schedule(catalog, toy.units(homes), options), catalog, ())


def first_update(found: Copies) -> int:
    """The number of the job that updates layer 0, the last to be updated."""
    updates = [n for n, j in enumerate(found.jobs) if isinstance(j.operation, Update)]
    return updates[-1]


def test_at_first_there_is_what_is_at_home() -> None:
    found = copies()
    assert found.exists((W0, NVME)) and found.exists((ROWS, NVME))
    assert not found.exists((W0, HOST))
    assert found.used[NVME] == found.peak[NVME] == 3 * 3 * MATRIX_BYTES


def test_rows_are_part_of_a_whole_that_is_there() -> None:
    found = copies()
    assert found.key((ROWS, NVME)) == (W0, NVME)
    assert found.key((ROWS, HOST)) == (ROWS, HOST)
    found.occupy([(W0, HOST)])
    assert found.exists((ROWS, HOST))
    assert found.key((ROWS, HOST)) == (W0, HOST)
    found.vacate([(W0, HOST)])
    found.occupy([(ROWS, HOST)])
    assert found.key((ROWS, HOST)) == (ROWS, HOST)
    assert not found.exists((W0, HOST))


def test_a_route_starts_at_the_nearest_copy_and_prefers_slower_tiers() -> None:
    found = copies()
    assert found.route((W0, DEVICE)) == [NVME, HOST, DEVICE]
    found.occupy([(W0, HOST)])
    assert found.route((W0, DEVICE)) == [HOST, DEVICE]
    on_device = copies(param=DEVICE)
    assert on_device.route((W0, HOST)) == [DEVICE, HOST]


def test_a_job_misses_what_is_neither_at_home_nor_fetched() -> None:
    found = copies()
    x = value("batch/x", 0)
    assert set(found.missing(0)) == {(W0, DEVICE), (x, DEVICE)}
    found.occupy([(W0, DEVICE)])
    assert found.missing(0) == [(x, DEVICE)]
    assert copies(param=DEVICE).missing(0) == [(x, DEVICE)]


def test_a_whole_is_needed_for_as_long_as_its_rows_are() -> None:
    found = copies()
    update = first_update(found)
    assert found.next_use((W0, HOST), update - 1) == update
    # The host would rather have it from the device than from the drive.
    assert found.next_use((W0, DEVICE), update - 1) == update
    found.occupy([(W0, HOST)])
    assert found.next_use((W0, DEVICE), update - 1) == NEVER


def test_the_host_has_from_the_device_what_else_the_drive_would_have_to_read() -> None:
    found = copies()
    assert found.route((W0, HOST)) == [NVME, HOST]
    found.occupy([(W0, DEVICE)])
    assert found.route((W0, HOST)) == [DEVICE, HOST]
    assert found.route((ROWS, HOST)) == [DEVICE, HOST]


def test_the_copy_that_is_needed_last_goes_first() -> None:
    found = copies()
    found.occupy([(W0, HOST), (W1, HOST), (W2, HOST)])
    # Seen from the forward pass of layer 0, layer 1 comes first, then 2, then 0 again.
    order, freed = found.victims(HOST, 3 * MATRIX_BYTES, set(), NEVER)
    assert (order, freed) == ([(W0, HOST), (W2, HOST), (W1, HOST)], 3 * MATRIX_BYTES)
    one, freed = found.victims(HOST, 1, set(), NEVER)
    assert (one, freed) == ([(W0, HOST)], MATRIX_BYTES)
    kept, _ = found.victims(HOST, 1, {(W0, HOST)}, NEVER)
    assert kept == [(W2, HOST)]


def test_what_is_needed_by_then_stays() -> None:
    found = copies()
    found.occupy([(W1, HOST), (W2, HOST)])
    # Jobs 1 and 2 are the forward pass of layer 1 and the loss.
    assert found.victims(HOST, 2 * MATRIX_BYTES, set(), 1)[0] == [(W2, HOST)]
    assert found.victims(HOST, 2 * MATRIX_BYTES, set(), 2) == ([], 0)


def test_choosing_victims_changes_nothing() -> None:
    found = copies()
    found.occupy([(W0, HOST), (W1, HOST), (W2, HOST)])
    first = found.victims(HOST, 2 * MATRIX_BYTES, set(), NEVER)
    assert found.victims(HOST, 2 * MATRIX_BYTES, set(), NEVER) == first


def test_the_only_copy_never_goes() -> None:
    found = copies()
    x = value("layer0.0", 0)
    found.occupy([(x, DEVICE)])
    assert found.victims(DEVICE, 1, set(), NEVER) == ([], 0)
    found.occupy([(x, HOST)])
    # Now it can be had again from the host, whose own copy has to stay.
    assert found.victims(DEVICE, 1, set(), NEVER)[0] == [(x, DEVICE)]
    assert found.victims(HOST, 1, set(), NEVER) == ([], 0)


def test_copies_that_no_later_job_needs_are_dead() -> None:
    found = copies()
    found.occupy([(W0, DEVICE), (W0, HOST)])
    last = max(n for n, job in enumerate(found.jobs) if (W0, DEVICE) in job.reads)
    found.begin(last)
    # The backward pass is done with it; the update on the host is not.
    assert found.dead(found.jobs[last]) == {DEVICE: [W0]}


def test_the_peak_is_the_most_that_was_held() -> None:
    found = copies()
    found.occupy([(W0, HOST), (W1, HOST)])
    assert found.vacate([(W0, HOST)]) == MATRIX_BYTES
    found.use_bytes(HOST, 10)
    assert found.used[HOST] == MATRIX_BYTES + 10
    assert found.peak[HOST] == 2 * MATRIX_BYTES


def test_what_is_missed_is_looked_for_again_after_copies_came_or_went() -> None:
    found = copies()
    update = first_update(found)
    before = found.missing(update)
    assert (ROWS, HOST) in before
    found.occupy([(W0, HOST)])
    assert found.missing(update) == [c for c in before if c[0].whole != W0]
    found.vacate([(W0, HOST)])
    assert found.missing(update) == before


def test_only_what_no_job_makes_until_then_is_fetched_early() -> None:
    found = copies()
    reads_hidden = found.jobs[1].reads
    assert set(found.missing(1)) == set(reads_hidden)
    # The first layer's output is made by job 0, which is under way.
    assert found.early(1) == [(W1, DEVICE)]
    found.begin(1)
    hidden = next(c for c in reads_hidden if c[0] != W1)
    found.occupy([(hidden[0], HOST)])
    assert set(found.early(1)) == {(W1, DEVICE), hidden}


def test_what_is_nowhere_else_may_go_once_a_slower_tier_has_it() -> None:
    found = copies()
    x = value("batch/x", 0)
    found.occupy([(x, DEVICE)])
    assert found.victims(DEVICE, 1, set(), NEVER) == ([], 0)
    found.occupy([(x, HOST)])
    assert found.victims(DEVICE, 1, set(), NEVER)[0] == [(x, DEVICE)]
    found.vacate([(x, HOST)])
    assert found.victims(DEVICE, 1, set(), NEVER) == ([], 0)
    found.occupy([(x, HOST)])
    assert found.victims(DEVICE, 1, set(), NEVER)[0] == [(x, DEVICE)]
