"""Host arrays in pinned memory that belongs to jax arrays of the kind `pinned_host`.

An accelerator copies pinned memory by itself, at the rate of the link. Other memory is
first copied by a core into buffers of the runtime.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import DTypeLike

from zinf.core.memory.host.aligned import ALIGNMENT, address
from zinf.core.memory.host.pages.abstract import (
    PAGEABLE,
    CountingPages,
    is_worth_pinning,
)
from zinf.core.memory.host.pages.limit import PINNED, check_pinned
from zinf.core.memory.host.pool import IDLE_BYTES
from zinf.core.memory.ledger import Ledger

T = TypeVar("T")


class PinnedMemory(np.ndarray):
    """The bytes of a jax array in host memory, as uint8; it keeps that array alive."""

    array: jax.Array


class PinnedArrays(CountingPages):
    """Each array of `PINNED_FROM_BYTES` or more is a jax array in `pinned_host` memory.

    NumPy reads and writes that memory in place. A fetch is a `device_put` of the jax
    array. An offload is a `device_put` to the kind, whose result becomes the host's
    array. Memory from `empty` that nothing refers to any more is reused for an array of
    the same shape and dtype, within the budget. XLA's own pool keeps the rest: it grows
    to the peak, and does not shrink.

    Rows of an array, and arrays made elsewhere, are no jax arrays: they cross as
    pageable memory, and `pageable_bytes` counts them.

    On devices of the CPU backend the kind is the devices' own memory, but `device_put`
    between the kinds copies. So it runs there too, and saves nothing.
    """

    name = "arrays"
    may_alias = False

    def __init__(self, devices: Sequence[jax.Device], needed_bytes: int = 0) -> None:
        """Raises as `check_pinned` does, and if NumPy cannot use the memory in place.

        Args:
            devices: the devices of this process.
            needed_bytes: the most bytes that the arrays will have at once.

        Raises:
            NotImplementedError: this process has several devices, or memory of the kind
                is not laid out as NumPy has it.
        """
        asked = "memory.pinned: arrays"
        check_pinned(devices, needed_bytes, asked=asked, instead="memory.pinned: off")
        if len(devices) > 1:
            raise NotImplementedError(
                f"{asked} needs one device in each process, because pinned arrays "
                f"belong to a device; this process has {len(devices)}. Start a process "
                "for each device, or use memory.pinned: off."
            )
        self.device = devices[0]
        super().__init__()
        self._kinds = {
            kind: SingleDeviceSharding(self.device, memory_kind=kind)
            for kind in ("device", PINNED)
        }
        self._ledger: Ledger | None = None
        # By shape and dtype. The garbage collector may return memory in any thread at
        # any time: appending to a deque needs no lock.
        self._idle: dict[Any, deque[jax.Array]] = {}
        self._check_in_place(asked)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        dtype = np.dtype(dtype)
        if not is_worth_pinning(prod(shape) * dtype.itemsize, dtype):
            return PAGEABLE.empty(shape, dtype)
        key = tuple(shape), dtype
        try:
            array = self._idle[key].pop()
        except (KeyError, IndexError):
            self._drop_idle(self._room() - prod(shape) * dtype.itemsize)
            array = self._made(np.empty(shape, dtype))
        memory = _memory(array)
        returns = weakref.finalize(memory, self._take_back, key, array)
        returns.atexit = False  # pyrefly: ignore
        return _as_numpy(memory)

    def has_made(self, value: np.ndarray, owner: object) -> bool:
        if is_worth_pinning(value.nbytes, value.dtype):
            return isinstance(owner, PinnedMemory)
        return PAGEABLE.has_made(value, owner)

    def to_device(
        self,
        values: Sequence[np.ndarray],
        devices: jax.Device | Sequence[jax.Device],
    ) -> list[jax.Array]:
        sources = [_array_of(value) for value in values]
        rest = [n for n, source in enumerate(sources) if source is None]
        moved = self._put(sources, "device")
        copied = PAGEABLE.to_device([values[n] for n in rest], self.device)
        self._count(values, rest)
        return jax.block_until_ready(_merged(moved, copied))

    def to_host(self, *values: jax.Array) -> list[np.ndarray]:
        # From new array objects: an array keeps the view that np.asarray makes of it.
        single = [x.addressable_data(0) for x in values]
        wanted = [x if is_worth_pinning(x.nbytes, x.dtype) else None for x in single]
        rest = [n for n, value in enumerate(wanted) if value is None]
        moved = self._put(wanted, PINNED)
        copied = PAGEABLE.to_host(*[single[n] for n in rest])
        self._count(single, rest)
        jax.block_until_ready([x for x in moved if x is not None])
        pinned = [None if x is None else _as_numpy(_memory(x)) for x in moved]
        return _merged(pinned, copied)

    def count_in(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def close(self) -> None:
        self._idle.clear()
        self._ledger = None

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return sum(len(some) * _nbytes(key) for key, some in list(self._idle.items()))

    def _put(
        self, arrays: Sequence[jax.Array | None], kind: str
    ) -> list[jax.Array | None]:
        """Each array, not complete yet, in memory of `kind`; None for None."""
        given = [x for x in arrays if x is not None]
        moved = iter(jax.device_put(given, self._kinds[kind]))
        return [None if x is None else next(moved) for x in arrays]

    def _made(self, content: np.ndarray) -> jax.Array:
        """A pinned array with this content, which the CPU backend may alias."""
        array = jax.device_put(content, self._kinds[PINNED])
        return jax.block_until_ready(array)

    def _room(self) -> int:
        """Bytes that may be idle: what the arrays of the tier leave of its budget."""
        ledger = self._ledger
        if ledger is None:
            return 0
        if ledger.capacity_bytes is None:
            return IDLE_BYTES
        return ledger.capacity_bytes - ledger.used_bytes

    def _take_back(self, key: Any, array: jax.Array) -> None:
        if self.idle_bytes + _nbytes(key) <= self._room():
            self._idle.setdefault(key, deque()).append(array)

    def _drop_idle(self, nbytes: int) -> None:
        """Drop idle arrays until they have at most `nbytes`."""
        for key, some in list(self._idle.items()):
            while some and self.idle_bytes > nbytes:
                try:
                    some.pop()
                except IndexError:  # another thread took the last one
                    break
            if not some:
                self._idle.pop(key, None)

    def _check_in_place(self, asked: str) -> None:
        """Raise unless NumPy sees the memory as it is, and devices see its writes."""
        array = self._made(np.zeros((3, 5), np.float32))
        seen, content = np.asarray(array), np.arange(15.0).reshape(3, 5)
        if address(seen) == _address(array) and not address(seen) % ALIGNMENT:
            _as_numpy(_memory(array))[:] = content
            moved = jax.device_put(array, self._kinds["device"])
            if np.array_equal(np.asarray(moved), content):
                return
        raise NotImplementedError(
            f"{asked} needs pinned memory that NumPy can write in place, and jax keeps "
            f"arrays of {self.device} in memory of another layout. Use memory.pinned: "
            "off."
        )


def _memory(array: jax.Array) -> PinnedMemory:
    raw: Any = (ctypes.c_ubyte * array.nbytes).from_address(_address(array))
    memory = PinnedMemory((array.nbytes,), np.uint8, buffer=raw)
    memory.array = array
    return memory


def _as_numpy(memory: PinnedMemory) -> np.ndarray:
    array = memory.array
    return np.ndarray(array.shape, array.dtype, buffer=memory)


def _array_of(value: np.ndarray) -> jax.Array | None:
    """The jax array whose memory is exactly `value`."""
    owner: Any = value
    while owner is not None and not isinstance(owner, PinnedMemory):
        owner = getattr(owner, "base", None)
    if owner is None or not value.flags.c_contiguous:
        return None
    array = owner.array
    is_whole = value.shape == array.shape and value.dtype == array.dtype
    return array if is_whole and address(value) == _address(array) else None


def _merged(found: Sequence[T | None], others: Sequence[T]) -> list[T]:
    """`found` with each None replaced by the next of `others`."""
    rest = iter(others)
    return [next(rest) if x is None else x for x in found]


def _address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def _nbytes(key: Any) -> int:
    shape, dtype = key
    return prod(shape) * dtype.itemsize
