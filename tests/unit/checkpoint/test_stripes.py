"""Arrays are moved in stripes that are small, complete and few at a time."""

from collections.abc import Callable

import jax
import pytest

from zinf.checkpoint.grid import Grid
from zinf.checkpoint.restore import stripes_to_restore
from zinf.checkpoint.share import Share, share_of
from zinf.checkpoint.stripes import held_bytes, move, stripe_bytes
from zinf.memory import open_stores
from zinf.memory.residents import Residents
from zinf.program import ArrayId, ArraySpec, Role, Tier

MIB = 2**20
ARRAY = ArrayId(Role.PARAM, "kernel")
SHAPES = [(), (3,), (7, 5), (100, MIB), (4 * MIB + 1,), (50 * MIB, 1), (3, 8 * MIB)]


def residents_of(spec: ArraySpec | None, home: Tier) -> Residents:
    """Residents that hold one array, or none; nothing is read."""
    specs = {} if spec is None else {ARRAY: spec}
    return Residents(open_stores(jax.devices()[0]), specs, dict.fromkeys(specs, home))


def share(spec: ArraySpec) -> Share:
    return share_of(residents_of(spec, Tier.HOST), ARRAY)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stripes_are_all_rows_in_order_and_within_16_mib(shape):
    spec = ArraySpec(shape, "float32", 4)
    found = list(share(spec).stripes)
    if found == [ARRAY]:
        assert spec.nbytes <= max(16 * MIB, 4)
        return
    rows = [stripe.rows for stripe in found]
    assert rows[0][0] == 0 and rows[-1][1] == shape[0]
    assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
    row_bytes = spec.rows(0, 1).nbytes
    largest = max(stripe_bytes(stripe, share(spec)) for stripe in found)
    assert largest <= max(16 * MIB, row_bytes)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s], ids=str)
def test_stripes_to_restore_are_all_rows_and_cross_no_saved_chunk(shape, length):
    spec = ArraySpec(shape, "float32", 4)
    if shape[0] > 100:
        length *= 2**18
    grid = Grid(spec, (length, *shape[1:]))
    residents = residents_of(spec, Tier.HOST)
    stripes = list(stripes_to_restore(share(spec), grid, residents))
    rows = [stripe.rows or (0, shape[0]) for stripe in stripes]
    assert rows[0][0] == 0 and rows[-1][1] == shape[0]
    assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
    for start, stop in rows:
        assert start % length == 0 and stop - start <= length


def test_an_array_without_entries_has_no_stripes():
    spec = ArraySpec((0, 3), "float32", 4)
    assert list(share(spec).stripes) == []
    residents = residents_of(spec, Tier.HOST)
    assert list(stripes_to_restore(share(spec), Grid(spec, (1, 3)), residents)) == []


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
    expected = device_bytes if home == Tier.DEVICE else 0
    residents = residents_of(spec, home)
    stripes = {}
    for array in residents.specs:
        own = share_of(residents, array)
        stripes |= dict.fromkeys(own.stripes, own)
    found = held_bytes(stripes, residents)
    assert found == {Tier.HOST: host_bytes, Tier.DEVICE: expected}


def test_moving_holds_at_most_the_capacity_and_ends_everything_in_order():
    sizes, log, held, peak = [3, 4, 10, 1, 1, 1, 9, 2], [], [0], [0]

    def begin(number: int, nbytes: int) -> Callable[[], None]:
        held[0] += nbytes
        peak[0] = max(peak[0], held[0])

        def finish() -> None:
            held[0] -= nbytes
            log.append(number)

        return finish

    def transfers():
        for number, nbytes in enumerate(sizes):
            yield nbytes, lambda n=number, b=nbytes: begin(n, b)

    move(transfers(), capacity_bytes=10)
    assert log == list(range(len(sizes)))
    assert held == [0] and peak == [10]
