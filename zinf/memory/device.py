"""The device tier: jax arrays on one device."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock

import jax
import numpy as np

from zinf.memory.aligned import aligned_copy
from zinf.memory.ledger import Ledger
from zinf.memory.store import (
    AbstractStore,
    check_kind,
    check_replaces,
    check_rows,
    completed,
    unknown_array,
)
from zinf.program import ArrayId, Tier


class DeviceStore(AbstractStore):
    """Arrays in the memory of `device`, as `jax.Array`s (typed PRNG keys included).

    `write` takes a NumPy array or a jax array. A jax array on `device` is kept as it
    is, computed or not; anything else is transferred, and the future is done when the
    transfer is. `read` returns the array that is kept; writing rows donates it, so
    what was read before is deleted then, rather than left to change.
    """

    tier = Tier.DEVICE

    def __init__(self, device: jax.Device, capacity_bytes: int | None = None) -> None:
        self.device = device
        self.ledger = Ledger(Tier.DEVICE, capacity_bytes)
        self._arrays: dict[ArrayId, jax.Array] = {}
        # Rows of one array may be used from several threads, and writing some replaces
        # the array that the others are taken from.
        self._rows_lock = Lock()

    def read(self, array: ArrayId) -> Future[jax.Array]:
        stored = self._arrays.get(array)
        if stored is None:
            stored = self._read_rows(array)
        return completed(stored)

    def write(self, array: ArrayId, value: np.ndarray | jax.Array) -> Future[None]:
        check_kind(array, value, self.tier, np.ndarray, jax.Array)
        if array in self._arrays:
            self._replace(array, value)
        elif array.rows is not None and array.whole in self._arrays:
            self._write_rows(array, value)
        else:
            with self.ledger.holding(value.nbytes, str(array)):
                self._arrays[array] = self._transfer(value)
        return completed(None)

    def free(self, array: ArrayId) -> None:
        stored = self._arrays.pop(array, None)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        self.ledger.release(stored.nbytes)

    def contains(self, array: ArrayId) -> bool:
        return array in self._arrays or array.whole in self._arrays

    def close(self) -> None:
        for array in list(self._arrays):
            self.free(array)

    def _replace(self, array: ArrayId, value: np.ndarray | jax.Array) -> None:
        stored = self._arrays[array]
        check_replaces(array, value, shape=stored.shape, dtype=stored.dtype)
        nbytes = stored.nbytes
        # The old content goes first: the two together could exceed the budget.
        del stored, self._arrays[array]
        try:
            self._arrays[array] = self._transfer(value)
        except BaseException:
            self.ledger.release(nbytes)
            raise

    def _read_rows(self, array: ArrayId) -> jax.Array:
        with self._rows_lock:
            whole = self._arrays.get(array.whole)
            if whole is None:
                raise unknown_array(array, self.tier, list(self._arrays))
            start, stop = check_rows(array, whole.shape)
            return _take_rows(whole, np.int32(start), num_rows=stop - start)

    def _write_rows(self, array: ArrayId, value: np.ndarray | jax.Array) -> None:
        whole = self._arrays[array.whole]
        start, stop = check_rows(array, whole.shape)
        shape = (stop - start, *whole.shape[1:])
        check_replaces(array, value, shape=shape, dtype=whole.dtype)
        rows = self._transfer(value)
        with self._rows_lock:
            whole = self._arrays[array.whole]
            self._arrays[array.whole] = _put_rows(whole, rows, np.int32(start))

    def _transfer(self, value: np.ndarray | jax.Array) -> jax.Array:
        """`value` on the device, sharing no memory with a NumPy array of the caller."""
        if isinstance(value, jax.Array) and value.devices() == {self.device}:
            return value
        return to_device([value], self.device)[0]


def to_device(
    values: Sequence[np.ndarray | jax.Array], device: jax.Device
) -> list[jax.Array]:
    """Copy arrays to a device, sharing no memory with NumPy arrays of the caller.

    All transfers are begun before the first is waited for: an accelerator may give
    memory for each only behind what it computes at the time.

    Raises:
        ValueError: JAX would give an array another dtype there.
    """
    if device.platform == "cpu":
        # The CPU backend would alias aligned NumPy memory, even when told not to, and
        # show what the caller writes there later. It may alias these copies.
        values = [aligned_copy(x) if isinstance(x, np.ndarray) else x for x in values]
    moved = jax.block_until_ready(jax.device_put(list(values), device))
    for value, result in zip(values, moved, strict=True):
        if result.dtype != value.dtype:
            raise ValueError(
                f"An array of shape {list(value.shape)} is {value.dtype}, which JAX "
                f"would turn into {result.dtype} on the device. Cast it before, or set "
                "jax_enable_x64."
            )
    return moved


def to_host(*values: jax.Array) -> list[np.ndarray]:
    """Copy device arrays to aligned host memory of their own, which the caller owns.

    Waits until they are computed; all transfers are begun before the first is waited
    for. The results are what `HostStore.write` adopts.
    """
    # np.asarray leaves a host copy with the array it is given, for as long as that
    # lives: hence other array objects, over the same device memory, that go at once.
    single = [x.addressable_data(0) if len(x.devices()) == 1 else x for x in values]
    for value in single:
        value.copy_to_host_async()
    return [aligned_copy(np.asarray(value)) for value in single]


@partial(jax.jit, static_argnames="num_rows")
def _take_rows(whole: jax.Array, start: jax.Array, *, num_rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(whole, start, num_rows)


@partial(jax.jit, donate_argnums=0)
def _put_rows(whole: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, start, axis=0)
