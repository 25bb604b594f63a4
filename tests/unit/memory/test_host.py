"""Arrays on the host are kept, shared and changed without a copy where that is safe."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zinf.core.memory import HostStore, aligned_empty, device_alias, host_alias, to_host
from zinf.core.memory.host.alias import SHARED_FROM_BYTES
from zinf.core.memory.host.aligned import PAGED_FROM_BYTES, address, aligned_copy
from zinf.core.memory.host.pool import POOL
from zinf.core.memory.host.region import HUGE_PAGE_BYTES
from zinf.core.memory.host.store import is_adoptable
from zinf.core.program import ArrayId, Role

WHOLE = ArrayId(Role.STATE, "w", slot=0)
ROWS = ArrayId(Role.STATE, "w", rows=(2, 3), slot=0)
OTHER = ArrayId(Role.STATE, "w", slot=1)
NUMEL = SHARED_FROM_BYTES // 4


def filled(*shape: int, dtype: type = np.float32, value: int = 0) -> np.ndarray:
    array = aligned_empty(shape, dtype)
    array[...] = value
    return array


def test_arrays_start_at_64_bytes_and_large_ones_at_a_page():
    for shape in ((), (0,), (3, 5), (1000,)):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            array = aligned_empty(shape, dtype)
            assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
            assert address(array) % 64 == 0
            assert array.flags.c_contiguous and array.flags.writeable
    assert address(aligned_empty((PAGED_FROM_BYTES,), np.uint8)) % 4096 == 0
    source = np.arange(12.0).reshape(3, 4)
    copy = aligned_copy(source.T)
    np.testing.assert_array_equal(copy, source.T, strict=True)
    assert not np.shares_memory(copy, source) and address(copy) % 64 == 0


def test_an_aligned_array_is_adopted_without_a_copy_and_read_only():
    store = HostStore()
    for value in (filled(4, 16), filled(4, 16)):
        store.write(WHOLE, value)
        assert np.shares_memory(store.read(WHOLE).result(), value)
    whole, rows = store.read(WHOLE).result(), store.read(ROWS).result()
    assert np.shares_memory(whole, rows)
    for view in (whole, rows):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    store.write(ROWS, np.ones((1, 16), np.float32))  # into the memory that is there
    assert value[2].all() and not value[[0, 1, 3]].any()


def test_two_ids_never_share_memory_nor_one_with_an_array_of_jax():
    store, array = HostStore(), jnp.zeros((4, 1024))
    store.write(WHOLE, np.asarray(array))
    store.write(OTHER, store.read(WHOLE).result())
    store.write(ROWS, np.ones((1, 1024), np.float32))
    assert store.read(ROWS).result().all()
    assert not np.asarray(array).any()
    assert not store.read(OTHER).result().any()


def test_what_is_not_aligned_or_keeps_more_memory_alive_is_not_adopted():
    assert is_adoptable(filled(64, 1024))
    assert is_adoptable(*to_host(jnp.zeros((4, 1024))))
    assert not is_adoptable(filled(64, 1024)[:16])
    assert not is_adoptable(filled(64, 1024).T)
    assert not is_adoptable(np.frombuffer(bytearray(4096), np.float32))
    store, value = HostStore(), filled(17)[1:]
    store.write(WHOLE, value)
    kept = store.read(WHOLE).result()
    assert not np.shares_memory(kept, value) and address(kept) % 64 == 0


def test_an_update_in_place_is_a_write_that_takes_no_memory():
    store = HostStore()
    store.write(WHOLE, filled(4, 16))
    store.write(OTHER, filled(1, 16))
    before = store.read(WHOLE).result()
    store.ledger.reset_peak()

    def function(rows: np.ndarray, vector: np.ndarray) -> None:
        rows += 1
        vector += 2

    store.update([ROWS, OTHER], function)
    assert before[2].all() and not before[[0, 1, 3]].any()
    assert (store.read(OTHER).result() == 2).all()
    assert store.ledger.peak_bytes == store.ledger.used_bytes
    with pytest.raises(KeyError, match="keeps no array state0/x"):
        store.update([ArrayId(Role.STATE, "x", slot=0)], print)


# One memory for the host and the device.


@pytest.fixture
def device() -> jax.Device:
    return jax.devices("cpu")[0]


def test_a_device_has_an_array_and_its_rows_where_the_host_has_them(device):
    memory = filled(4, NUMEL, value=1)
    for part in (memory, memory[1:3], memory[3]):
        alias = device_alias(part, device)
        assert alias is not None and alias.shape == part.shape
        assert alias.unsafe_buffer_pointer() == address(part)
        assert alias.sharding.device_set == {device}
        assert float(alias.sum()) == part.size


def test_memory_stays_until_the_last_of_both_is_gone(device):
    POOL.trim()
    memory = filled(HUGE_PAGE_BYTES, value=1)
    alias = device_alias(memory, device)
    assert alias is not None
    del memory
    assert POOL.idle_bytes == 0 and float(alias[-1]) == 1
    del alias
    assert POOL.idle_bytes > 0


def test_what_jax_cannot_take_as_it_is_is_not_shared(device):
    read_only = filled(NUMEL)
    read_only.flags.writeable = False
    assert device_alias(read_only, device) is None
    assert device_alias(filled(NUMEL - 1), device) is None
    assert device_alias(filled(NUMEL + 1)[1:], device) is None
    assert device_alias(filled(NUMEL, 2)[:, :1], device) is None
    assert device_alias(filled(2 * NUMEL, dtype=ml_dtypes.bfloat16), device) is None
    assert device_alias(filled(NUMEL, dtype=np.float64), device) is None  # without x64
    assert device_alias(filled(NUMEL), jax.devices("cpu")[-1]) is None


def test_the_host_keeps_a_gradient_where_the_device_left_it():
    gradient = jnp.arange(NUMEL, dtype=jnp.float32)
    view = host_alias(gradient)
    assert view is not None and not view.flags.writeable
    assert address(view) == gradient.unsafe_buffer_pointer()
    del gradient
    assert view[-1] == NUMEL - 1
    assert host_alias(jnp.zeros(NUMEL - 1)) is None
    store = HostStore(capacity_bytes=4 * NUMEL)
    store.adopt(WHOLE, view).result()
    assert store.ledger.used_bytes == 4 * NUMEL
    assert address(store.read(WHOLE).result()) == address(view)
    with pytest.raises(ValueError, match="read-only"):
        store.update([WHOLE], lambda memory: np.negative(memory, out=memory))
    store.free(WHOLE)
    assert store.ledger.used_bytes == 0
