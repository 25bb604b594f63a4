"""Arrays are moved in stripes that are small, complete and few at a time."""

from collections.abc import Callable, Iterator

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf.checkpoint.grid import Grid
from zinf.checkpoint.restore import stripes_to_restore
from zinf.checkpoint.share import Share, share_of
from zinf.checkpoint.stripes import held_bytes, move, room, stripe_bytes
from zinf.core.memory import open_stores
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import layouts_on_one

MIB = 2**20
ARRAY = ArrayId(Role.PARAM, "kernel")
SHAPES = [(3,), (7, 5), (100, MIB), (4 * MIB + 1,), (50 * MIB, 1), (3, 8 * MIB)]


def residents_of(spec: ArraySpec | None, home: Tier) -> Residents:
    """Residents that hold one array, or none; nothing is read."""
    specs = {} if spec is None else {ARRAY: spec}
    (device, *_), homes = jax.devices(), dict.fromkeys(specs, home)
    return Residents(open_stores(device), layouts_on_one(device, specs), homes)


def share(spec: ArraySpec) -> Share:
    return share_of(residents_of(spec, Tier.HOST), ARRAY)


def rows_in_order(stripes: list[ArrayId], num_rows: int) -> list[tuple[int, int]]:
    """The rows of stripes, which are all rows of the array, each once."""
    rows = [stripe.rows or (0, num_rows) for stripe in stripes]
    assert rows[0][0] == 0 and rows[-1][1] == num_rows
    assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
    return rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stripes_are_all_rows_within_16_mib_and_cross_no_saved_chunk(shape):
    spec = ArraySpec(shape, "float32", 4)
    found = list(share(spec).stripes)
    rows_in_order(found, shape[0])
    largest = max(stripe_bytes(stripe, share(spec)) for stripe in found)
    assert largest <= max(16 * MIB, spec.piece((0, 1)).nbytes)
    residents = residents_of(spec, Tier.HOST)
    for length in (1, 2, 3, 7, 100):
        length *= 2**18 if shape[0] > 100 else 1
        grid = Grid(spec, (length, *shape[1:]))
        stripes = list(stripes_to_restore(share(spec), grid, residents))
        for start, stop in rows_in_order(stripes, shape[0]):
            assert start % length == 0 and stop - start <= length


def test_a_scalar_is_one_stripe_and_an_array_without_entries_has_none():
    scalar, empty = ArraySpec((), "float32", 4), ArraySpec((0, 3), "float32", 4)
    for spec, chunk, expected in ((scalar, (), [ARRAY]), (empty, (1, 3), [])):
        residents = residents_of(spec, Tier.HOST)
        assert list(share(spec).stripes) == expected
        found = stripes_to_restore(share(spec), Grid(spec, chunk), residents)
        assert list(found) == expected


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DEVICE])
@pytest.mark.parametrize(
    ("spec", "host_bytes", "device_bytes"),
    [
        (ArraySpec((64, MIB), "float32", 4), 2 * 16 * MIB, 16 * MIB),
        (ArraySpec((3,), "float32", 4), 12, 0),
        # Rows that exceed two stripes are moved alone.
        (ArraySpec((2, 16 * MIB), "float32", 4), 64 * MIB, 64 * MIB),
        (None, 0, 0),
    ],
    ids=str,
)
def test_two_stripes_are_held_but_never_more_than_there_is(
    spec, host_bytes, device_bytes, home
):
    residents = residents_of(spec, home)
    stripes = {}
    for array in residents.specs:
        own = share_of(residents, array)
        stripes |= dict.fromkeys(own.stripes, own)
    expected = device_bytes if home == Tier.DEVICE else 0
    found = held_bytes(stripes, residents, room(residents))
    assert found == {Tier.HOST: host_bytes, Tier.DEVICE: expected}


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), max_size=12))
def test_moving_holds_at_most_the_capacity_and_as_much_as_fits_in_order(sizes):
    """A transfer that exceeds the capacity of 10 is moved alone."""
    log: list[int] = []
    held: list[int] = []

    def begin(number: int) -> Callable[[], None]:
        # The one before it ended only if both had no room.
        ended = sum(sizes[len(log) - 1 : number]) if log else 0
        assert not log or ended + sizes[number] > 10
        held.append(sizes[number])
        assert sum(held) <= 10 or len(held) == 1

        def finish() -> None:
            log.append(number)
            held.remove(sizes[number])

        return finish

    def transfers() -> Iterator[tuple[int, Callable[[], Callable[[], None]]]]:
        for number, nbytes in enumerate(sizes):
            yield nbytes, lambda n=number: begin(n)

    move(transfers(), capacity_bytes=10)
    assert log == list(range(len(sizes))) and held == []
