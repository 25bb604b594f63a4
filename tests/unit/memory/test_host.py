import jax.numpy as jnp
import numpy as np
import pytest

from zinf.memory import HostStore, aligned_empty, to_host
from zinf.memory.host import is_adoptable
from zinf.program import ArrayId, Role

WHOLE = ArrayId(Role.STATE, "w", slot=0)
ROWS = ArrayId(Role.STATE, "w", rows=(2, 3), slot=0)


def aligned_zeros(*shape: int) -> np.ndarray:
    array = aligned_empty(shape, np.float32)
    array[...] = 0
    return array


def test_an_aligned_array_is_adopted_without_a_copy() -> None:
    store, value = HostStore(), aligned_zeros(4, 16)
    store.write(WHOLE, value)
    assert np.shares_memory(store.read(WHOLE).result(), value)
    other = aligned_zeros(4, 16)
    store.write(WHOLE, other)
    assert np.shares_memory(store.read(WHOLE).result(), other)


def test_an_array_of_the_wrong_alignment_is_copied_to_the_right_one() -> None:
    store = HostStore()
    value = aligned_zeros(17)[1:]
    store.write(WHOLE, value)
    kept = store.read(WHOLE).result()
    assert not np.shares_memory(kept, value)
    assert kept.ctypes.data % 64 == 0


def test_read_copies_nothing_and_cannot_be_written_through() -> None:
    store = HostStore()
    store.write(WHOLE, aligned_zeros(4, 16))
    whole, rows = store.read(WHOLE).result(), store.read(ROWS).result()
    assert np.shares_memory(whole, rows)
    for view in (whole, rows):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_rows_are_written_into_the_memory_that_is_there() -> None:
    store, value = HostStore(), aligned_zeros(4, 16)
    store.write(WHOLE, value)
    store.write(ROWS, np.ones((1, 16), np.float32))
    assert value[2].all() and not value[[0, 1, 3]].any()


def test_a_read_only_array_is_copied_so_that_its_rows_can_be_written() -> None:
    """A view of a jax array's buffer must not change when rows are written."""
    store, array = HostStore(), jnp.zeros((4, 1024))
    store.write(WHOLE, np.asarray(array))
    store.write(ROWS, np.ones((1, 1024), np.float32))
    assert store.read(ROWS).result().all()
    assert not np.asarray(array).any()


def test_two_ids_never_share_memory() -> None:
    store, other = HostStore(), ArrayId(Role.STATE, "w", slot=1)
    store.write(WHOLE, aligned_zeros(4, 16))
    store.write(other, store.read(WHOLE).result())
    store.write(ROWS, np.ones((1, 16), np.float32))
    assert not store.read(other).result().any()


def test_an_array_that_keeps_more_memory_alive_is_not_adopted() -> None:
    assert is_adoptable(aligned_zeros(64, 1024))
    assert not is_adoptable(aligned_zeros(64, 1024)[:16])
    assert not is_adoptable(np.frombuffer(bytearray(4096), np.float32))


def test_what_comes_from_a_device_is_adopted() -> None:
    assert is_adoptable(*to_host(jnp.zeros((4, 1024))))


def test_an_update_in_place_is_a_write_that_takes_no_memory() -> None:
    store, other = HostStore(), ArrayId(Role.STATE, "w", slot=1)
    store.write(WHOLE, aligned_zeros(4, 16))
    store.write(other, aligned_zeros(1, 16))
    before = store.read(WHOLE).result()
    store.ledger.reset_peak()

    def function(rows: np.ndarray, vector: np.ndarray) -> None:
        rows += 1
        vector += 2

    store.update([ROWS, other], function)
    assert before[2].all() and not before[[0, 1, 3]].any()
    assert (store.read(other).result() == 2).all()
    assert store.ledger.peak_bytes == store.ledger.used_bytes


def test_an_update_in_place_names_an_array_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="keeps no array state0/w"):
        HostStore().update([WHOLE], print)
