"""Copies on host and device in one memory."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zinf.memory import HostStore, aligned_empty, device_alias, host_alias
from zinf.memory.aligned import POOLED_FROM_BYTES, address
from zinf.memory.pool import POOL
from zinf.program import ArrayId, Role

NUMEL = 2**17
W, G = ArrayId(Role.PARAM, "w"), ArrayId(Role.GRADIENT, "w")


@pytest.fixture
def device() -> jax.Device:
    return jax.devices("cpu")[0]


def filled(numel: int = NUMEL, dtype: type = np.float32) -> np.ndarray:
    memory = aligned_empty((numel,), dtype)
    memory[...] = 1
    return memory


def test_a_device_has_an_array_where_the_host_has_it(device: jax.Device) -> None:
    memory = filled()
    alias = device_alias(memory, device)
    assert alias is not None
    assert alias.unsafe_buffer_pointer() == address(memory)
    assert alias.sharding.device_set == {device}
    assert float(alias.sum()) == NUMEL


def test_rows_are_shared_too(device: jax.Device) -> None:
    memory = filled().reshape(4, -1)
    alias = device_alias(memory[1:3], device)
    assert alias is not None and alias.shape == (2, NUMEL // 4)
    assert alias.unsafe_buffer_pointer() == address(memory[1:])


def test_memory_stays_until_the_last_of_both_is_gone(device: jax.Device) -> None:
    POOL.trim()
    memory = filled(POOLED_FROM_BYTES)
    alias = device_alias(memory, device)
    assert alias is not None
    del memory
    assert POOL.idle_bytes == 0 and float(alias[-1]) == 1
    del alias
    assert POOL.idle_bytes > 0


def test_what_jax_cannot_take_as_it_is_is_not_shared(device: jax.Device) -> None:
    assert device_alias(filled(16), device) is None
    assert device_alias(filled()[1:], device) is None
    read_only = filled()
    read_only.flags.writeable = False
    assert device_alias(read_only, device) is None
    assert device_alias(filled().reshape(-1, 2)[:, :1], device) is None
    assert device_alias(filled(dtype=ml_dtypes.bfloat16), device) is None
    assert device_alias(filled(dtype=np.float64), device) is None  # without x64
    assert device_alias(filled(), jax.devices("cpu")[-1]) is None


def test_the_host_has_a_gradient_where_the_device_left_it() -> None:
    gradient = jnp.arange(NUMEL, dtype=jnp.float32)
    view = host_alias(gradient)
    assert view is not None and not view.flags.writeable
    assert address(view) == gradient.unsafe_buffer_pointer()
    del gradient
    assert view[-1] == NUMEL - 1
    assert host_alias(jnp.zeros(16)) is None


def test_the_host_tier_keeps_it_and_never_changes_it() -> None:
    store = HostStore(capacity_bytes=4 * NUMEL)
    view = host_alias(jnp.ones(NUMEL))
    assert view is not None
    store.adopt(G, view).result()
    assert store.ledger.used_bytes == 4 * NUMEL
    assert address(store.read(G).result()) == address(view)

    def double(memory: np.ndarray) -> None:
        memory *= 2

    with pytest.raises(ValueError, match="read-only"):
        store.update([G], double)
    store.free(G)
    assert store.ledger.used_bytes == 0
