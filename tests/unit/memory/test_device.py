import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zinf.memory import DeviceStore, aligned_empty, to_host
from zinf.memory import device as device_module
from zinf.memory.aligned import POOLED_FROM_BYTES
from zinf.memory.device import to_device
from zinf.memory.pool import POOL
from zinf.program import ArrayId, Role

WHOLE = ArrayId(Role.PARAM, "w")
ROWS = ArrayId(Role.PARAM, "w", rows=(2, 3))


@pytest.fixture
def store() -> DeviceStore:
    return DeviceStore(jax.devices()[0])


@pytest.mark.parametrize("offset", [0, 1, 4, 16])
@pytest.mark.parametrize("numel", [3, 1000, 300_000])
def test_changing_the_source_does_not_change_the_device_array(
    store: DeviceStore, offset: int, numel: int
) -> None:
    """JAX's own device_put aliases 64-byte aligned NumPy memory on CPU."""
    source = aligned_empty((numel + offset,), np.float32)[offset:]
    source[...] = 1
    store.write(WHOLE, source).result()
    source[...] = 2
    assert (np.asarray(store.read(WHOLE).result()) == 1).all()


def test_changing_the_source_of_rows_does_not_change_the_device_array(
    store: DeviceStore,
) -> None:
    store.write(WHOLE, np.zeros((4, 1024), np.float32)).result()
    source = aligned_empty((1, 1024), np.float32)
    source[...] = 1
    store.write(ROWS, source).result()
    source[...] = 2
    assert (np.asarray(store.read(ROWS).result()) == 1).all()


def test_arrays_are_on_the_device_of_the_store() -> None:
    device = jax.devices()[-1]
    store = DeviceStore(device)
    store.write(WHOLE, np.zeros((4, 2), np.float32))
    store.write(ArrayId(Role.PARAM, "b"), jnp.zeros(3))
    for array in (WHOLE, ROWS, ArrayId(Role.PARAM, "b")):
        assert store.read(array).result().devices() == {device}


def test_a_jax_array_on_the_device_is_kept_as_it_is(store: DeviceStore) -> None:
    value = jnp.arange(4.0)
    store.write(WHOLE, value)
    assert store.read(WHOLE).result() is value


def test_a_sharded_array_is_gathered_on_the_device(store: DeviceStore) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    numel = 2 * len(jax.devices())
    store.write(WHOLE, jax.device_put(jnp.arange(numel), sharding))
    kept = store.read(WHOLE).result()
    assert kept.devices() == {store.device}
    np.testing.assert_array_equal(kept, np.arange(numel))


def test_prng_keys_pass_through(store: DeviceStore) -> None:
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


def test_writing_rows_updates_in_place(store: DeviceStore) -> None:
    store.write(WHOLE, jnp.zeros((4, 1024)))
    before = store.read(WHOLE).result()
    address = before.unsafe_buffer_pointer()
    store.write(ROWS, np.ones((1, 1024), np.float32)).result()
    after = store.read(WHOLE).result()
    assert before.is_deleted()
    assert after.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(after[:, 0], [0, 0, 1, 0])


def test_rows_of_all_layers_share_an_executable(store: DeviceStore) -> None:
    store.write(WHOLE, np.zeros((6, 7), np.float32))
    functions = (device_module._put_rows, device_module._take_rows)
    before = [function._cache_size() for function in functions]
    for row in range(6):
        array = ArrayId(Role.PARAM, "w", rows=(row, row + 1))
        store.write(array, np.ones((1, 7), np.float32)).result()
        store.read(array).result()
    assert [function._cache_size() for function in functions] == [
        size + 1 for size in before
    ]


def test_what_was_donated_can_be_replaced_and_freed(store: DeviceStore) -> None:
    """An update donates what it read from the store, then writes the result."""
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    store.write(WHOLE, np.zeros((4, 1024), np.float32))
    new = update(store.donate(WHOLE))
    store.write(WHOLE, new)
    assert store.ledger.used_bytes == store.ledger.peak_bytes == 4 * 4 * 1024
    update(store.donate(WHOLE))
    store.free(WHOLE)
    assert store.ledger.used_bytes == 0


def test_what_is_to_be_donated_is_waited_for_while_it_is_held(
    store: DeviceStore,
) -> None:
    store.write(WHOLE, np.ones((4, 4), np.float32)).result()
    store.holds.hold([WHOLE])
    taken = threading.Event()

    def donate() -> None:
        store.donate(WHOLE)
        taken.set()

    thread = threading.Thread(target=donate)
    thread.start()
    assert not taken.wait(0.05)
    store.holds.release(WHOLE)
    thread.join(10)
    assert taken.is_set()


def test_rows_of_a_whole_are_not_donated(store: DeviceStore) -> None:
    store.write(WHOLE, np.ones((4, 4), np.float32)).result()
    with pytest.raises(KeyError, match="w"):
        store.donate(ROWS)


def test_a_dtype_that_jax_would_change_is_refused(store: DeviceStore) -> None:
    with pytest.raises(ValueError, match="float64.*float32.*jax_enable_x64"):
        store.write(WHOLE, np.zeros(3))
    assert store.ledger.used_bytes == 0
    assert not store.contains(WHOLE)


def test_the_old_content_goes_before_the_new_comes(
    store: DeviceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(WHOLE, np.zeros(3, np.float32))
    old = weakref.ref(store.read(WHOLE).result())
    device_put = jax.device_put

    def put(value: np.ndarray, device: jax.Device) -> jax.Array:
        assert old() is None
        return device_put(value, device)

    monkeypatch.setattr(jax, "device_put", put)
    store.write(WHOLE, np.ones(3, np.float32))
    assert store.read(WHOLE).result().all()


def test_a_failed_replacement_gives_the_bytes_back(
    store: DeviceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(WHOLE, np.zeros(3, np.float32))

    def fail(*_: object) -> None:
        raise MemoryError("the device is full")

    monkeypatch.setattr(jax, "device_put", fail)
    with pytest.raises(MemoryError):
        store.write(WHOLE, np.zeros(3, np.float32))
    assert store.ledger.used_bytes == 0
    assert not store.contains(WHOLE)


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (4, 300_000)])
def test_to_host_copies_to_aligned_memory_of_its_own(shape: tuple[int, ...]) -> None:
    value = jnp.ones(shape, jnp.bfloat16)
    (result,) = to_host(value)
    assert (result.shape, result.dtype) == (shape, value.dtype)
    assert result.ctypes.data % 64 == 0
    result[...] = 2
    assert (np.asarray(value) == 1).all()


def test_to_host_leaves_the_device_array_free_to_be_donated() -> None:
    value = jnp.zeros((4, 1024))
    address = value.unsafe_buffer_pointer()
    to_host(value)
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(value)
    assert result.unsafe_buffer_pointer() == address


def test_to_host_gathers_a_sharded_array() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    value = np.arange(2 * len(jax.devices()))
    (found,) = to_host(jax.device_put(value, sharding))
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16, np.bool_])
def test_large_arrays_pass_bit_for_bit_and_leave_their_memory_in_time(dtype) -> None:
    POOL.trim()
    source = np.arange(POOLED_FROM_BYTES).astype(dtype)
    (array,) = to_device([source], jax.devices()[0])
    assert array.dtype == source.dtype
    np.testing.assert_array_equal(to_host(array)[0], source)
    source[:] = 0
    assert np.asarray(array[1:100]).any(), "memory of the caller is aliased"
    POOL.trim()
    del array
    if source.dtype.kind in "fi" and jax.devices()[0].platform == "cpu":
        assert POOL.idle_bytes == source.nbytes, "it waits for the next call of JAX"
