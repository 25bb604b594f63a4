import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.unit.memory.test_store import assert_waits
from zinf.core.memory import BudgetExceeded, DeviceStore, aligned_empty, to_host
from zinf.core.memory import device as device_module
from zinf.core.memory.device import to_device
from zinf.core.memory.host.pool import POOL
from zinf.core.memory.host.region import HUGE_PAGE_BYTES
from zinf.core.program import ArrayId, Role

WHOLE = ArrayId(Role.PARAM, "w")
ROWS = ArrayId(Role.PARAM, "w", rows=(2, 3))


@pytest.fixture
def store() -> DeviceStore:
    return DeviceStore(jax.devices()[0])


def sharded(numel: int, *axes: str) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.device_put(jnp.arange(numel), sharding)


@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("numel", [3, 1000, 300_000])
def test_changing_the_source_does_not_change_the_device_array(store, offset, numel):
    """JAX's own device_put aliases 64-byte aligned NumPy memory on CPU."""
    source = aligned_empty((numel + offset,), np.float32)[offset:]
    source[...] = 1
    store.write(WHOLE, source).result()
    source[...] = 2
    assert (np.asarray(store.read(WHOLE).result()) == 1).all()


def test_writing_rows_updates_in_place_and_keeps_no_part_of_their_source(store):
    store.write(WHOLE, jnp.zeros((4, 1024)))
    before = store.read(WHOLE).result()
    address = before.unsafe_buffer_pointer()
    source = aligned_empty((1, 1024), np.float32)
    source[...] = 1
    store.write(ROWS, source).result()
    source[...] = 2
    after = store.read(WHOLE).result()
    assert before.is_deleted()
    assert after.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(after[:, 0], [0, 0, 1, 0])


def test_arrays_are_on_the_device_of_the_store_gathered_if_they_were_sharded():
    device, numel = jax.devices()[-1], 2 * len(jax.devices())
    store, gathered = DeviceStore(device), np.arange(numel, dtype=np.int32)
    for n, value in enumerate((jnp.arange(numel), gathered, sharded(numel, "fsdp"))):
        array = ArrayId(Role.PARAM, str(n))
        store.write(array, value)
        assert store.ledger.used_bytes == 4 * numel * (n + 1)
        for found in (array, array.piece((2, 3))):
            assert store.read(found).result().devices() == {device}
        np.testing.assert_array_equal(store.read(array).result(), gathered)
    np.testing.assert_array_equal(to_host(sharded(numel, "fsdp"))[0], gathered)
    store.write(array, sharded(numel, "fsdp"))
    store.close()
    assert store.ledger.used_bytes == 0


def test_a_replacement_may_take_more_bytes_on_each_device_within_the_budget():
    """A gathered array takes more of each device than a sharded one."""
    numel = 2 * len(jax.devices())
    store = DeviceStore(jax.devices(), capacity_bytes=4 * numel)
    small, large = sharded(numel, "fsdp"), sharded(numel)
    store.write(WHOLE, small)
    assert store.ledger.used_bytes == 4 * 2
    store.write(WHOLE, large)
    assert store.ledger.used_bytes == store.ledger.peak_bytes == 4 * numel
    store.write(WHOLE, small)
    assert store.ledger.used_bytes == 4 * 2
    store.write(ArrayId(Role.PARAM, "b"), small)
    with pytest.raises(BudgetExceeded):
        store.write(WHOLE, large)
    assert store.ledger.used_bytes == 4 * 2
    assert not store.contains(WHOLE)


def test_arrays_of_jax_are_kept_as_they_are_keys_too(store):
    keys = jax.random.split(jax.random.key(0), 4)
    store.write(WHOLE, keys)
    assert store.ledger.used_bytes == keys.nbytes
    assert store.read(WHOLE).result() is keys
    third = store.read(ROWS).result()
    data = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.random.key_data(third), data[2:3])
    store.write(ArrayId(Role.PARAM, "w", rows=(0, 1)), third)
    written = jax.random.key_data(store.read(WHOLE).result())
    np.testing.assert_array_equal(written, data[[2, 1, 2, 3]])


def test_rows_of_all_layers_share_an_executable(store):
    store.write(WHOLE, np.zeros((6, 7), np.float32))
    functions = (device_module._put_rows, device_module._take_rows)
    before = [function._cache_size() for function in functions]
    for row in range(6):
        array = ArrayId(Role.PARAM, "w", rows=(row, row + 1))
        store.write(array, np.ones((1, 7), np.float32)).result()
        store.read(array).result()
    after = [function._cache_size() for function in functions]
    assert after == [size + 1 for size in before]


def test_what_was_donated_can_be_replaced_and_freed(store):
    """An update donates what it read from the store, then writes the result."""
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    store.write(WHOLE, np.zeros((4, 1024), np.float32))
    new = update(store.donate(WHOLE))
    store.write(WHOLE, new)
    assert store.ledger.used_bytes == store.ledger.peak_bytes == 4 * 4 * 1024
    store.holds.hold([WHOLE])
    assert_waits(lambda: store.donate(WHOLE), lambda: store.holds.release(WHOLE))
    with pytest.raises(KeyError, match="w"):
        store.donate(ROWS)
    update(store.donate(WHOLE))
    store.free(WHOLE)
    assert store.ledger.used_bytes == 0


def test_the_old_content_goes_before_the_new_comes_or_fails_to(store, monkeypatch):
    with pytest.raises(ValueError, match="float64.*float32.*jax_enable_x64"):
        store.write(WHOLE, np.zeros(3))
    assert store.ledger.used_bytes == 0 and not store.contains(WHOLE)
    store.write(WHOLE, np.zeros(3, np.float32))
    old: Callable[[], object] = weakref.ref(store.read(WHOLE).result())

    def fail(*_: object) -> None:
        assert old() is None
        raise MemoryError("the device is full")

    monkeypatch.setattr(jax, "device_put", fail)
    with pytest.raises(MemoryError):
        store.write(WHOLE, np.zeros(3, np.float32))
    assert store.ledger.used_bytes == 0 and not store.contains(WHOLE)


@pytest.mark.parametrize("shape", [(), (0,), (4, 300_000)])
def test_to_host_copies_to_aligned_memory_of_its_own(shape):
    value = jnp.ones(shape, jnp.bfloat16)
    pointer = value.unsafe_buffer_pointer()
    (result,) = to_host(value)
    assert (result.shape, result.dtype) == (shape, value.dtype)
    assert result.ctypes.data % 64 == 0
    result[...] = 2
    assert (np.asarray(value.copy()) == 1).all()
    # The device array is free to be donated.
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(value)
    assert donated.unsafe_buffer_pointer() == pointer or not value.size


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
def test_large_arrays_pass_bit_for_bit_and_leave_their_memory_in_time(dtype):
    POOL.trim()
    source = np.arange(HUGE_PAGE_BYTES).astype(dtype)
    (array,) = to_device([source], jax.devices()[0])
    assert array.dtype == source.dtype
    np.testing.assert_array_equal(to_host(array)[0], source)
    source[:] = 0
    assert np.asarray(array[1:100]).any(), "memory of the caller is aliased"
    POOL.trim()
    del array
    if source.dtype.kind in "fi" and jax.devices()[0].platform == "cpu":
        assert POOL.idle_bytes == source.nbytes, "it waits for the next call of JAX"
