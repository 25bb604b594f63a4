"""The memory of the host tier, and how its arrays cross to devices and back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from zinf.core.memory.device import to_device, to_host
from zinf.core.memory.host.aligned import aligned_copy, aligned_empty
from zinf.core.memory.host.pool import PooledMemory
from zinf.core.memory.ledger import Ledger

# Below this, a transfer takes about as long as its call, in whatever memory.
PINNED_FROM_BYTES = 64 * 2**10
# Elements that NumPy keeps one to a byte, and an accelerator several.
PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


class AbstractPages(ABC):
    """Where the host tier's arrays get memory from. Safe to call from several threads.

    Attributes:
        name: the value of `memory.pinned` that asks for it.
        may_alias: whether an array may share memory with its copy on a device that
            computes in host memory (`zinf.core.memory.host.alias`).
        is_taken_at_once: whether memory for all arrays is taken when this is made, and
            kept until `close`.
    """

    name: str
    may_alias: bool
    is_taken_at_once = False

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """An uninitialised array, contiguous and at a 64-byte boundary."""

    def copy(self, value: np.ndarray) -> np.ndarray:
        """A copy of `value` in memory of its own from `empty`."""
        copy = self.empty(value.shape, value.dtype)
        np.copyto(copy, value)
        return copy

    @abstractmethod
    def has_made(self, value: np.ndarray, owner: object) -> bool:
        """Whether `value` is in memory as `empty` would give it.

        Args:
            owner: the object that `value` has its memory from.
        """

    @abstractmethod
    def to_device(
        self,
        values: Sequence[np.ndarray],
        devices: jax.Device | Sequence[jax.Device],
    ) -> list[jax.Array]:
        """Copy arrays to a device, or each to its own; complete on return.

        The results share no memory with `values`. All transfers begin before the first
        is waited for.
        """

    @abstractmethod
    def to_host(self, *values: jax.Array) -> list[np.ndarray]:
        """Copy device arrays to memory as from `empty`, which the caller owns.

        Waits until they are computed. All transfers begin before the first is waited
        for.
        """

    @abstractmethod
    def count_in(self, ledger: Ledger) -> None:
        """Keep idle memory for reuse only as far as the budget of `ledger` has room."""

    @abstractmethod
    def close(self) -> None:
        """Give memory kept for reuse back."""


class CountingPages(AbstractPages):
    """Pages that are pinned, and count what crosses from them and from others.

    Attributes:
        pinned_bytes: what crossed from pinned memory, or to it.
        pageable_bytes: what crossed from other memory, or to it.
    """

    def __init__(self) -> None:
        self.pageable_bytes = self.pinned_bytes = 0
        self._lock = Lock()  # For the counters.

    def _count(self, values: Sequence[Any], pageable: Sequence[int]) -> None:
        """Counts bytes of values; those with indices in `pageable` were not pinned."""
        nbytes = [value.nbytes for value in values]
        without = sum(nbytes[n] for n in pageable)
        with self._lock:
            self.pageable_bytes += without
            self.pinned_bytes += sum(nbytes) - without


def is_worth_pinning(nbytes: int, dtype: np.dtype) -> bool:
    """Whether an array gains from pinned memory, and devices have it as NumPy does."""
    return (
        nbytes >= PINNED_FROM_BYTES
        and dtype.name not in PACKED
        and jax.dtypes.canonicalize_dtype(dtype) == dtype
    )


class Pageable(AbstractPages):
    """Memory of malloc and of the pool. An accelerator copies it by way of buffers."""

    name = "off"
    may_alias = True

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return aligned_empty(shape, dtype)

    def copy(self, value: np.ndarray) -> np.ndarray:
        return aligned_copy(value)

    def has_made(self, value: np.ndarray, owner: object) -> bool:
        return type(owner) in (np.ndarray, PooledMemory)

    def to_device(
        self,
        values: Sequence[np.ndarray],
        devices: jax.Device | Sequence[jax.Device],
    ) -> list[jax.Array]:
        return to_device(values, devices)

    def to_host(self, *values: jax.Array) -> list[np.ndarray]:
        return to_host(*values)

    def count_in(self, ledger: Ledger) -> None:
        """The pool is limited by `Heap`."""

    def close(self) -> None:
        """The pool is one for the process, and `Heap` trims it."""


PAGEABLE = Pageable()
