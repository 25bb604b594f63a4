"""The same verbs mean the same on every tier."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zinf.memory import AbstractStore, BudgetExceeded
from zinf.program import ArrayId, Role

WHOLE = ArrayId(Role.PARAM, "blocks/0/kernel")
SPILLED = ArrayId(Role.GRADIENT, "blocks/0/kernel", rows=(1, 2), microbatch=3)


def rows_of(array: ArrayId, start: int, stop: int) -> ArrayId:
    return replace(array, rows=(start, stop))


def counted(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array whose entries differ, as far as the dtype can tell them apart."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def write(store: AbstractStore, array: ArrayId, value: np.ndarray) -> None:
    # The store owns what it is given; tests go on comparing with theirs.
    assert store.write(array, np.array(value)).result() is None


def read(store: AbstractStore, array: ArrayId) -> np.ndarray:
    return np.asarray(store.read(array).result())


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)


def test_read_gives_what_was_written(store: AbstractStore, dtype: np.dtype) -> None:
    value = counted(5, 3, dtype=dtype)
    write(store, WHOLE, value)
    assert_same(read(store, WHOLE), value)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (3, 0, 2), (2, 3, 4, 5)])
def test_any_shape_can_be_kept(store: AbstractStore, shape: tuple[int, ...]) -> None:
    value = counted(*shape)
    write(store, WHOLE, value)
    assert_same(read(store, WHOLE), value)
    write(store, WHOLE, value + 1)
    assert_same(read(store, WHOLE), value + 1)
    store.free(WHOLE)
    assert store.ledger.used_bytes == 0


def test_zeros_are_kept_like_other_values(store: AbstractStore) -> None:
    write(store, WHOLE, np.zeros((4, 2), np.float32))
    assert_same(read(store, WHOLE), np.zeros((4, 2), np.float32))


def test_special_floats_keep_their_bits(store: AbstractStore) -> None:
    bits = np.array([0x7FC00001, 0x80000000, 0x7F800000, 1], np.uint32)
    write(store, WHOLE, bits.view(np.float32))
    assert_same(read(store, WHOLE).view(np.uint32), bits)


def test_arrays_that_are_not_contiguous_can_be_written(store: AbstractStore) -> None:
    value = counted(4, 6)[::2, ::-1].T
    assert store.write(WHOLE, value).result() is None
    assert_same(read(store, WHOLE), value.copy())


def test_writing_again_replaces_the_content(store: AbstractStore) -> None:
    write(store, WHOLE, counted(4))
    write(store, WHOLE, -counted(4))
    assert_same(read(store, WHOLE), -counted(4))
    assert store.ledger.used_bytes == store.ledger.peak_bytes == 4 * 4


@pytest.mark.parametrize(
    "other", [np.zeros((5,), np.float32), np.zeros((4,), np.float16)]
)
def test_replacing_with_another_shape_or_dtype_is_refused(
    store: AbstractStore, other: np.ndarray
) -> None:
    write(store, WHOLE, counted(4))
    with pytest.raises(ValueError) as error:
        store.write(WHOLE, other).result()
    for spec in ("float32[4]", f"{other.dtype}[{other.shape[0]}]", str(WHOLE)):
        assert spec in str(error.value)
    assert_same(read(store, WHOLE), counted(4))


def test_a_freed_id_can_be_used_for_another_shape(store: AbstractStore) -> None:
    for shape in [(4,), (2, 3), (), (5, 1, 2)]:
        write(store, WHOLE, counted(*shape))
        assert_same(read(store, WHOLE), counted(*shape))
        store.free(WHOLE)


@pytest.mark.sampled(3)
def test_rows_of_a_whole_are_read_from_it(
    store: AbstractStore, dtype: np.dtype
) -> None:
    value = counted(5, 2, dtype=dtype)
    write(store, WHOLE, value)
    assert_same(read(store, rows_of(WHOLE, 1, 4)), value[1:4])
    assert_same(read(store, rows_of(WHOLE, 0, 5)), value)


def test_rows_of_a_whole_are_written_into_it(
    store: AbstractStore, dtype: np.dtype
) -> None:
    value = counted(5, 2, dtype=dtype)
    write(store, WHOLE, value)
    write(store, rows_of(WHOLE, 1, 3), value[3:5])
    expected = value.copy()
    expected[1:3] = value[3:5]
    assert_same(read(store, WHOLE), expected)
    assert store.ledger.used_bytes == value.nbytes


@pytest.mark.parametrize(
    "rows", [(2, 2), (3, 2), (0, 5), (4, 5), (-1, 2)], ids=lambda rows: str(rows)
)
def test_rows_outside_of_the_whole_are_refused(
    store: AbstractStore, rows: tuple[int, int]
) -> None:
    write(store, WHOLE, counted(4, 2))
    array = rows_of(WHOLE, *rows)
    message = rf"rows {rows[0]}:{rows[1]}, but .*\[4, 2\]"
    with pytest.raises(ValueError, match=message):
        store.read(array)
    with pytest.raises(ValueError, match=message):
        store.write(array, counted(1, 2))


def test_rows_of_a_scalar_are_refused(store: AbstractStore) -> None:
    write(store, WHOLE, counted())
    with pytest.raises(ValueError, match="rows 0:1"):
        store.read(rows_of(WHOLE, 0, 1))


def test_rows_of_another_shape_or_dtype_are_refused(store: AbstractStore) -> None:
    write(store, WHOLE, counted(4, 2))
    array = rows_of(WHOLE, 0, 2)
    with pytest.raises(ValueError, match=r"float32\[3, 2\].*float32\[2, 2\]"):
        store.write(array, counted(3, 2))
    with pytest.raises(ValueError, match=r"int32\[2, 2\].*float32\[2, 2\]"):
        store.write(array, counted(2, 2, dtype=np.int32))
    assert_same(read(store, WHOLE), counted(4, 2))


def test_rows_without_a_whole_are_an_array_of_their_own(store: AbstractStore) -> None:
    write(store, SPILLED, counted(1, 3))
    assert store.contains(SPILLED)
    assert not store.contains(SPILLED.whole)
    assert_same(read(store, SPILLED), counted(1, 3))
    store.free(SPILLED)
    assert not store.contains(SPILLED)


def test_an_array_of_the_exact_id_comes_before_rows_of_the_whole(
    store: AbstractStore,
) -> None:
    write(store, SPILLED, counted(1, 3))
    write(store, SPILLED.whole, np.zeros((2, 3), np.float32))
    write(store, SPILLED, counted(1, 3) + 7)
    assert_same(read(store, SPILLED), counted(1, 3) + 7)
    assert_same(read(store, SPILLED.whole), np.zeros((2, 3), np.float32))


def test_role_path_rows_and_microbatch_all_tell_arrays_apart(
    store: AbstractStore,
) -> None:
    arrays = [
        WHOLE,
        replace(WHOLE, role=Role.MASTER),
        replace(WHOLE, path="blocks/1/kernel"),
        replace(WHOLE, microbatch=0),
        replace(WHOLE, microbatch=1),
        SPILLED,
        replace(SPILLED, rows=(0, 1)),
    ]
    for number, array in enumerate(arrays):
        write(store, array, np.full((1,), number, np.float32))
    for number, array in enumerate(arrays):
        assert read(store, array) == number
    store.free(arrays[3])
    assert [store.contains(array) for array in arrays].count(False) == 1


def test_bytes_are_counted_from_the_first_write_to_the_free(
    store: AbstractStore,
) -> None:
    other = ArrayId(Role.MASTER, "b")
    write(store, WHOLE, counted(4, 2))
    write(store, other, counted(3))
    write(store, other, counted(3))
    assert store.ledger.used_bytes == 4 * (4 * 2 + 3)
    store.free(WHOLE)
    assert store.ledger.used_bytes == 4 * 3
    store.free(other)
    assert store.ledger.used_bytes == 0
    assert store.ledger.peak_bytes == 4 * (4 * 2 + 3)
    assert store.ledger.tier is store.tier


def test_an_array_over_the_budget_is_refused_and_leaves_nothing(open_store) -> None:
    store = open_store(4 * 4)
    write(store, WHOLE, counted(3))
    other = ArrayId(Role.MASTER, "b")
    with pytest.raises(BudgetExceeded, match=r"master/b needs 8 bytes"):
        store.write(other, counted(2))
    assert not store.contains(other)
    assert store.ledger.used_bytes == 4 * 3
    write(store, WHOLE, counted(3))  # What is there can still be replaced.
    store.free(WHOLE)
    write(store, other, counted(2))


@pytest.mark.parametrize("array", [WHOLE, SPILLED], ids=str)
def test_an_unknown_id_is_named_with_the_nearest_that_is_kept(
    store: AbstractStore, array: ArrayId
) -> None:
    write(store, ArrayId(Role.PARAM, "blocks/1/kernel"), counted(2))
    for verb in (store.read, store.free):
        with pytest.raises(KeyError) as error:
            verb(array)
        for part in (str(array), str(store.tier), "param/blocks/1/kernel"):
            assert part in str(error.value)


def test_rows_of_a_whole_cannot_be_freed(store: AbstractStore) -> None:
    write(store, WHOLE, counted(4))
    with pytest.raises(KeyError):
        store.free(rows_of(WHOLE, 0, 2))
    assert_same(read(store, WHOLE), counted(4))


def test_contains_is_whether_read_would_find_it(store: AbstractStore) -> None:
    assert not store.contains(WHOLE)
    write(store, WHOLE, counted(4))
    assert store.contains(WHOLE)
    assert store.contains(rows_of(WHOLE, 1, 2))
    assert not store.contains(replace(WHOLE, microbatch=0))
    store.free(WHOLE)
    assert not store.contains(WHOLE)
    assert not store.contains(rows_of(WHOLE, 1, 2))


def test_what_is_no_array_is_refused(store: AbstractStore) -> None:
    with pytest.raises(TypeError, match=f"{store.tier} takes .*float"):
        store.write(WHOLE, 1.0)
    assert store.ledger.used_bytes == 0


def test_threads_may_use_different_arrays_at_once(store: AbstractStore) -> None:
    def work(number: int) -> None:
        array = ArrayId(Role.VALUE, "x", microbatch=number)
        for step in range(5):
            write(store, array, np.full((3, 4), number * 10 + step, np.float32))
            assert (read(store, array) == number * 10 + step).all()
        if number % 2:
            store.free(array)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert store.ledger.used_bytes == 8 * 3 * 4 * 4


def test_threads_may_use_different_rows_of_one_array_at_once(
    store: AbstractStore,
) -> None:
    num_rows = 8
    write(store, WHOLE, np.zeros((num_rows, 16), np.float32))

    def work(row: int) -> None:
        array = rows_of(WHOLE, row, row + 1)
        for step in range(1, 6):
            write(store, array, np.full((1, 16), row * 10 + step, np.float32))
            assert (read(store, array) == row * 10 + step).all()

    with ThreadPoolExecutor(num_rows) as pool:
        list(pool.map(work, range(num_rows)))
    last = np.arange(num_rows, dtype=np.float32)[:, None] * 10 + 5
    assert_same(read(store, WHOLE), np.repeat(last, 16, axis=1))
