"""The device tier: jax arrays on the devices of a mesh."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zinf.core.memory.hold import Holds
from zinf.core.memory.host.alias import (
    SHARED_FROM_BYTES,
    exchanged,
    has_host_memory,
)
from zinf.core.memory.host.aligned import POOLED_FROM_BYTES, aligned_copy
from zinf.core.memory.ledger import Ledger
from zinf.core.memory.slots import Slots
from zinf.core.memory.store import (
    DONE,
    AbstractStore,
    check_kind,
    check_replaces,
    check_rows,
    completed,
    unknown_array,
)
from zinf.core.program import ArrayId, Tier


class DeviceStore(AbstractStore):
    """Arrays in the memory of some devices, as `jax.Array`s (typed keys included).

    `write` takes a NumPy array or a `jax.Array`. A `jax.Array` on the devices is kept
    as it is, computed or not. With one device, anything else is transferred, and the
    future is done when the transfer is. With several devices, nothing else may be
    written, since nothing would say how to shard it. `read` returns the array that is
    kept. Writing rows donates that array: values read before are deleted, so that they
    do not change.

    The ledger counts the bytes on one device; every device holds as many.
    """

    tier = Tier.DEVICE

    def __init__(
        self,
        device: jax.Device | Sequence[jax.Device],
        capacity_bytes: int | None = None,
    ) -> None:
        devices = [device] if isinstance(device, jax.Device) else list(device)
        self.devices = frozenset(devices)
        index = jax.process_index()
        self.local = [d for d in devices if d.process_index == index]
        self.device = self.local[0]
        self.ledger = Ledger(Tier.DEVICE, capacity_bytes, self.free_spare)
        self.holds = Holds()
        self._arrays: dict[ArrayId, jax.Array] = {}
        # By the arrays whose rows they are.
        self._slots: dict[tuple[ArrayId, ...], Slots] = {}
        self._spare_lock = Lock()
        # Several threads may use rows of one array, and writing rows replaces the array
        # that other threads take rows from.
        self._rows_lock = Lock()

    def read(self, array: ArrayId) -> Future[jax.Array]:
        stored = self._arrays.get(array)
        if stored is None:
            stored = self._read_rows(array)
        return completed(stored)

    def donate(self, array: ArrayId) -> jax.Array:
        """The array that is kept, for a computation that donates it.

        The next use of `array` must be to write the result of that computation.

        Raises:
            KeyError: `array` is not kept under exactly this id.
        """
        self.holds.wait(array)
        if array not in self._arrays:
            raise unknown_array(array, self.tier, list(self._arrays))
        return self._arrays[array]

    def write(self, array: ArrayId, value: np.ndarray | jax.Array) -> Future[None]:
        check_kind(array, value, self.tier, np.ndarray, jax.Array)
        self.holds.wait(array)
        if array in self._arrays:
            self._replace(array, value)
        elif array.rows is not None and array.whole in self._arrays:
            self._write_rows(array, value)
        else:
            with self.ledger.holding(self._kept_bytes(value), str(array)):
                self._arrays[array] = self._transfer(value)
        return DONE

    def free(self, array: ArrayId) -> None:
        self.holds.wait(array)
        stored = self._arrays.pop(array, None)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        self.ledger.release(_device_bytes(stored))

    def contains(self, array: ArrayId) -> bool:
        return array in self._arrays or array.whole in self._arrays

    def keeps_whole_of(self, array: ArrayId) -> bool:
        """Whether an array is some rows of one that is kept."""
        return array not in self._arrays and array.whole in self._arrays

    def close(self) -> None:
        for array in list(self._arrays):
            self.free(array)
        self._slots.clear()

    def hold_slots(
        self, arrays: Sequence[ArrayId], zeros: Sequence[Callable[[], jax.Array]]
    ) -> Slots:
        """The slots that are rows of some arrays, with what an earlier program left.

        Args:
            zeros: make the arrays, if they are not there.
        """
        key = tuple(arrays)
        with self._spare_lock:
            if key in self._slots:
                self._slots[key].is_spare = False
                return self._slots[key]
        for array, make in zip(arrays, zeros, strict=True):
            self.write(array, make())
        self._slots[key] = Slots(len(self._arrays[key[0]]))
        return self._slots[key]

    def release_slots(self, arrays: Sequence[ArrayId]) -> None:
        """Keep slots until their room is needed; those made in part are freed."""
        key = tuple(arrays)
        if key in self._slots:
            self._slots[key].is_spare = True
            return
        for array in filter(self.contains, arrays):
            self.free(array)

    def free_spare(self) -> None:
        """Free all slots that no program has."""
        with self._spare_lock:
            spare = [key for key, slots in self._slots.items() if slots.is_spare]
            for key in spare:
                del self._slots[key]
                for array in key:
                    self.free(array)

    def forget_rows(self, path: str) -> None:
        """Empty the slots that hold rows of an array, which is about to change."""
        for slots in self._slots.values():
            if slots.has_rows_of(path):
                slots.forget()

    def _replace(self, array: ArrayId, value: np.ndarray | jax.Array) -> None:
        stored = self._arrays[array]
        check_replaces(array, value, shape=stored.shape, dtype=stored.dtype)
        old_bytes, new_bytes = _device_bytes(stored), self._kept_bytes(value)
        # Drop the old content first: old and new together could exceed the budget.
        del stored, self._arrays[array]
        try:
            # A gathered array takes more bytes on each device than a sharded one.
            if new_bytes > old_bytes:
                self.ledger.reserve(new_bytes - old_bytes, str(array))
                old_bytes = new_bytes
            self._arrays[array] = self._transfer(value)
            self.ledger.release(old_bytes - new_bytes)
        except BaseException:
            self.ledger.release(old_bytes)
            raise

    def _read_rows(self, array: ArrayId) -> jax.Array:
        with self._rows_lock:
            whole = self._arrays.get(array.whole)
            if whole is None:
                raise unknown_array(array, self.tier, list(self._arrays))
            start, stop = check_rows(array, whole.shape)
            return _take_rows(
                whole, np.int32(start), num_rows=stop - start, sharding=_sharding(whole)
            )

    def _write_rows(self, array: ArrayId, value: np.ndarray | jax.Array) -> None:
        whole = self._arrays[array.whole]
        start, stop = check_rows(array, whole.shape)
        shape = (stop - start, *whole.shape[1:])
        check_replaces(array, value, shape=shape, dtype=whole.dtype)
        rows = self._transfer(value)
        with self._rows_lock:
            whole = self._arrays[array.whole]
            self._arrays[array.whole] = _put_rows(
                whole, rows, np.int32(start), sharding=_sharding(whole)
            )

    def _kept_bytes(self, value: np.ndarray | jax.Array) -> int:
        """Bytes that a device takes once `value` is transferred."""
        if isinstance(value, jax.Array) and value.devices() == self.devices:
            return _device_bytes(value)
        return value.nbytes

    def _transfer(self, value: np.ndarray | jax.Array) -> jax.Array:
        """`value` on the device, sharing no memory with a NumPy array of the caller."""
        if isinstance(value, jax.Array) and value.devices() == self.devices:
            return value
        assert len(self.devices) == 1, (
            "shares are assembled by zinf.core.memory.to_devices"
        )
        return to_device([value], self.device)[0]


def to_device(
    values: Sequence[np.ndarray | jax.Array],
    device: jax.Device | Sequence[jax.Device],
) -> list[jax.Array]:
    """Copy arrays to a device, or each to its own, sharing no memory with the caller's.

    All transfers begin before the first is waited for: an accelerator may provide the
    memory of each only after the computation that it runs at the time.

    Raises:
        ValueError: JAX would give an array another dtype on the device.
    """
    devices = [device] * len(values) if isinstance(device, jax.Device) else device
    if devices and has_host_memory(devices[0]):
        # The CPU backend aliases aligned NumPy memory, even when told not to, and would
        # show what the caller writes there later. It gets copies, which it may alias.
        values = [
            _released_at_once(aligned_copy(x), where)
            if isinstance(x, np.ndarray)
            else x
            for x, where in zip(values, devices, strict=True)
        ]
    moved = jax.block_until_ready(jax.device_put(list(values), list(devices)))
    for value, result in zip(values, moved, strict=True):
        if result.dtype != value.dtype:
            raise ValueError(
                f"An array of shape {list(value.shape)} is {value.dtype}, which JAX "
                f"would turn into {result.dtype} on the device. Cast the array first, "
                "or set jax_enable_x64."
            )
    return moved


def _released_at_once(value: np.ndarray, device: jax.Device) -> np.ndarray | jax.Array:
    """The same content, as an array whose memory returns to the pool without delay."""
    if value.nbytes < POOLED_FROM_BYTES:
        return value
    alias = exchanged(value, device)
    return value if alias is None else alias


def donatable(array: jax.Array) -> jax.Array:
    """The same content in memory that a computation can take over.

    The CPU backend cannot reuse memory that NumPy owns, such as that of `to_device`: a
    computation to which such an array is donated makes another one beside it.
    """
    if array.nbytes < SHARED_FROM_BYTES or not has_host_memory(_any_device(array)):
        return array
    return _copied(array)


def to_host(*values: jax.Array) -> list[np.ndarray]:
    """Copy device arrays to aligned host memory of their own, which the caller owns.

    Waits until they are computed. All transfers begin before the first is waited for.
    `HostStore.write` can adopt the results.
    """
    # np.asarray leaves a host copy in the array object that it gets, for as long as
    # that lives. So it gets temporary array objects over the same device memory.
    single = [x.addressable_data(0) if len(x.devices()) == 1 else x for x in values]
    for value in single:
        value.copy_to_host_async()
    return [aligned_copy(np.asarray(value)) for value in single]


def _device_bytes(value: jax.Array) -> int:
    """Bytes of an array on one device."""
    if value.sharding.num_devices == 1:
        return value.nbytes
    shape = value.sharding.shard_shape(value.shape)
    return prod(shape) * value.dtype.itemsize


def _any_device(array: jax.Array) -> jax.Device:
    return next(iter(array.devices()))


def _sharding(array: jax.Array) -> NamedSharding | None:
    """The sharding of an array on several devices; None on one device."""
    sharding = array.sharding
    return sharding if isinstance(sharding, NamedSharding) else None


def _constrained(array: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    if sharding is None:
        return array
    return jax.lax.with_sharding_constraint(array, sharding)


_copied = jax.jit(jnp.copy)


@partial(jax.jit, static_argnames=("num_rows", "sharding"))
def _take_rows(
    whole: jax.Array, start: Any, *, num_rows: int, sharding: NamedSharding | None
) -> jax.Array:
    rows = jax.lax.dynamic_slice_in_dim(whole, start, num_rows)
    return _constrained(rows, sharding)


@partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def _put_rows(
    whole: jax.Array, rows: jax.Array, start: Any, *, sharding: NamedSharding | None
) -> jax.Array:
    result = jax.lax.dynamic_update_slice_in_dim(whole, rows, start, axis=0)
    return _constrained(result, sharding)
