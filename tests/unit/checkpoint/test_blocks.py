"""Arrays are moved in blocks that are small, complete and few at a time."""

from collections.abc import Callable

import pytest

from zinf.checkpoint.blocks import block_bytes, blocks, held_bytes, move
from zinf.program import ArrayId, ArraySpec

MIB = 2**20
ARRAY = ArrayId("param", "kernel")


@pytest.mark.parametrize(
    "shape",
    [(), (3,), (7, 5), (100, MIB), (4 * MIB + 1,), (50 * MIB, 1), (3, 8 * MIB)],
    ids=str,
)
def test_blocks_are_all_rows_in_order_and_within_16_mib(shape):
    spec = ArraySpec(shape, "float32", 4)
    found = list(blocks(ARRAY, spec))
    if found == [ARRAY]:
        assert spec.nbytes <= max(16 * MIB, 4)
        return
    rows = [block.rows for block in found]
    assert rows[0][0] == 0 and rows[-1][1] == shape[0]
    assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
    row_bytes = spec.rows(0, 1).nbytes
    largest = max((stop - start) * row_bytes for start, stop in rows)
    assert largest == block_bytes(spec) <= max(16 * MIB, row_bytes)


def test_an_array_without_entries_has_no_blocks():
    assert list(blocks(ARRAY, ArraySpec((0, 3), "float32", 4))) == []


def test_two_blocks_are_held_but_never_more_than_there_is():
    large, small = ArraySpec((64, MIB), "float32", 4), ArraySpec((3,), "float32", 4)
    assert held_bytes({ARRAY: large}) == 2 * 16 * MIB
    assert held_bytes({ARRAY: small}) == small.nbytes
    assert held_bytes({}) == 0


def test_a_row_that_exceeds_two_blocks_is_held_alone():
    spec = ArraySpec((2, 16 * MIB), "float32", 4)
    assert held_bytes({ARRAY: spec}) == spec.rows(0, 1).nbytes == 64 * MIB


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
