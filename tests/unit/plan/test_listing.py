"""Who waits for whom: readers for makers, those who change or free for readers."""

from tests.toy.program import LeafCase, chain
from zinf.plan import Copy, Link, Transfer, Update
from zinf.plan.copies import Copies
from zinf.plan.listing import Listing
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
W = ArrayId(Role.PARAM, "layer0/w")
ROWS = ArrayId(Role.PARAM, "layer0/w", (0, 2))
MATRIX_BYTES = 4 * 4 * 64


class Page:
    """A listing with the copies that it makes."""

    def __init__(self, param: Tier = NVME):
        toy = chain(1, leaf=LeafCase("w", num_rows=4))
        catalog = toy.catalog(toy.homes(param, NVME))
        self.copies = Copies((), catalog, ())
        self.listing = Listing(catalog, self.copies)

    def fetch(self, array: ArrayId, source: Tier, target: Tier) -> int:
        created: list[Copy] = []
        if not self.copies.exists((array, target)):
            created = [(array, target)]
            self.copies.occupy(created)
        self.listing.add(
            Transfer((array,), source, target),
            Link.H2D,
            reads=[(array, source)],
            writes=[(array, target)],
            created=created,
        )
        return self.last

    def update(self, array: ArrayId) -> int:
        copy = (array, HOST)
        self.listing.add(
            Update(0, "layer0", HOST),
            Link.HOST,
            reads=[copy],
            writes=[copy],
            created=[],
        )
        return self.last

    def free(self, array: ArrayId, tier: Tier) -> int:
        nbytes = self.copies.vacate([(array, tier)])
        self.listing.free([array], tier, nbytes)
        return self.last

    @property
    def last(self) -> int:
        return len(self.listing.instructions) - 1

    def after(self, index: int) -> set[int]:
        return set(self.listing.instructions[index].after) - {-1}


def test_a_reader_waits_for_who_made_what_it_reads() -> None:
    page = Page()
    made = page.fetch(W, NVME, HOST)
    assert page.after(page.fetch(W, HOST, DEVICE)) == {made}


def test_what_is_at_home_is_there_from_the_start() -> None:
    page = Page()
    assert page.after(page.fetch(W, NVME, HOST)) == set()


def test_who_changes_a_copy_waits_for_its_readers() -> None:
    page = Page()
    made = page.fetch(W, NVME, HOST)
    read = page.fetch(W, HOST, DEVICE)
    assert page.after(page.update(W)) == {made, read}


def test_who_reads_next_waits_for_the_change() -> None:
    page = Page()
    page.fetch(W, NVME, HOST)
    changed = page.update(W)
    assert page.after(page.fetch(W, HOST, NVME)) >= {changed}


def test_a_write_home_waits_for_those_who_read_from_home() -> None:
    page = Page()
    read = page.fetch(W, NVME, HOST)
    changed = page.update(W)
    assert page.after(page.fetch(W, HOST, NVME)) == {read, changed}


def test_a_free_waits_for_everyone_who_used_the_copy() -> None:
    page = Page()
    made = page.fetch(W, NVME, HOST)
    read = page.fetch(W, HOST, DEVICE)
    assert page.after(page.free(W, HOST)) == {made, read}


def test_a_copy_is_made_again_only_after_it_was_freed() -> None:
    page = Page()
    page.fetch(W, NVME, HOST)
    gone = page.free(W, HOST)
    assert gone in page.after(page.fetch(W, NVME, HOST))


def test_rows_are_made_only_after_their_whole_was_freed() -> None:
    page = Page()
    page.fetch(W, NVME, HOST)
    gone = page.free(W, HOST)
    # The store would write them into the whole, and lose them with it.
    assert gone in page.after(page.fetch(ROWS, NVME, HOST))


def test_a_change_of_rows_is_a_change_of_their_whole() -> None:
    page = Page()
    page.fetch(W, NVME, HOST)
    read = page.fetch(W, HOST, DEVICE)
    changed = page.update(ROWS)
    assert read in page.after(changed)
    assert page.after(page.free(W, HOST)) >= {changed}


def test_an_update_waits_for_the_decision() -> None:
    page = Page(param=HOST)
    assert page.listing.instructions == []
    index = page.update(W)
    # None was made yet, which the checker would find.
    assert page.listing.instructions[index].after == (-1,)


def test_bytes_are_those_that_move_are_made_or_are_given_back() -> None:
    page = Page()
    page.fetch(W, NVME, HOST)
    page.update(ROWS)
    page.fetch(ROWS, HOST, NVME)
    page.free(W, HOST)
    found = [(x.nbytes, dict(x.allocates)) for x in page.listing.instructions]
    half = MATRIX_BYTES // 2
    assert found == [(MATRIX_BYTES, {HOST: MATRIX_BYTES}), (half, {}), (half, {})] + [
        (MATRIX_BYTES, {})
    ]
