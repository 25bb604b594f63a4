"""The host tier: NumPy arrays in this process's memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from zinf.core.memory.hold import Holds
from zinf.core.memory.host.aligned import ALIGNMENT, PAGE_BYTES, address
from zinf.core.memory.host.pages import PAGEABLE, AbstractPages
from zinf.core.memory.ledger import Ledger
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


class HostStore(AbstractStore):
    """Arrays in host memory, as 64-byte aligned `np.ndarray`s.

    `read` copies nothing: it returns a read-only view. An array changes only through
    `write` and `update`, and since `write` never adopts a read-only array, no two ids
    share memory unless somebody asked for it with `adopt`.

    `write` adopts an array (keeps it without a copy) if `is_adoptable` allows it, and
    copies any other. Rows, and replacements that cannot be adopted, are copied into the
    memory that the array has: views read earlier show the new content.

    Attributes:
        pages: where arrays get memory from, and how they cross to devices.
    """

    tier = Tier.HOST

    def __init__(
        self, capacity_bytes: int | None = None, pages: AbstractPages = PAGEABLE
    ) -> None:
        self.ledger = Ledger(Tier.HOST, capacity_bytes)
        self.pages = pages
        pages.count_in(self.ledger)
        self.holds = Holds()
        # No lock: one id is used by one thread at a time, and dict operations are
        # atomic.
        self._arrays: dict[ArrayId, np.ndarray] = {}

    def read(self, array: ArrayId) -> Future[np.ndarray]:
        view = self.memory(array).view()
        view.flags.writeable = False
        return completed(view)

    def write(self, array: ArrayId, value: np.ndarray) -> Future[None]:
        check_kind(array, value, self.tier, np.ndarray)
        self.holds.wait(array)
        stored = self._find(array)
        if stored is None:
            with self.ledger.holding(value.nbytes, str(array)):
                self._arrays[array] = (
                    value if is_adoptable(value, self.pages) else self.pages.copy(value)
                )
            return DONE
        check_replaces(array, value, shape=stored.shape, dtype=stored.dtype)
        if array in self._arrays and is_adoptable(value, self.pages):
            self._arrays[array] = value
        else:
            np.copyto(stored, value)
        return DONE

    def adopt(self, array: ArrayId, value: np.ndarray) -> Future[None]:
        """Keep a read-only `value` without a copy, as a new array that never changes.

        The memory stays the caller's, who must not change it until `array` is freed.
        """
        assert not value.flags.writeable and self._find(array) is None
        with self.ledger.holding(value.nbytes, str(array)):
            self._arrays[array] = value
        return DONE

    def update(self, arrays: Sequence[ArrayId], function: Callable[..., Any]) -> None:
        """Call `function` with the memory of `arrays`, for it to write them in place.

        For other users of the arrays this is a `write` of each, but it needs no memory
        for new content. The views are writeable and contiguous; `function` must not
        keep them. If it raises, arrays are left half-written.

        Raises:
            KeyError: an array, and its whole, is not kept here.
        """
        for array in arrays:
            self.holds.wait(array)
        function(*map(self.memory, arrays))

    def free(self, array: ArrayId) -> None:
        self.holds.wait(array)
        stored = self._arrays.pop(array, None)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        self.ledger.release(stored.nbytes)

    def contains(self, array: ArrayId) -> bool:
        return array in self._arrays or array.whole in self._arrays

    def close(self) -> None:
        for array in list(self._arrays):
            self.free(array)
        self.pages.close()

    def memory(self, array: ArrayId) -> np.ndarray:
        """The memory of `array`, not a copy: its own, or its rows of the whole.

        Raises:
            KeyError: neither `array` nor its whole is kept here.
        """
        stored = self._find(array)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        return stored

    def _find(self, array: ArrayId) -> np.ndarray | None:
        """The memory of `array`: its own, or its rows of the whole."""
        stored = self._arrays.get(array)
        if stored is not None or array.rows is None:
            return stored
        whole = self._arrays.get(array.whole)
        if whole is None:
            return None
        start, stop = check_rows(array, whole.shape)
        return whole[start:stop]


def is_adoptable(value: np.ndarray, pages: AbstractPages = PAGEABLE) -> bool:
    """Whether the host tier can keep `value` itself instead of a copy.

    It must be contiguous, aligned, writeable (a read-only array belongs to somebody
    else: a `read` of this tier, or a buffer of JAX, which must not change), alone in
    its memory (a slice would keep bytes alive that no ledger counts) and in memory as
    `pages` gives it.
    """
    owner = value if value.base is None else value.base
    return (
        value.flags.c_contiguous
        and value.flags.writeable
        and address(value) % ALIGNMENT == 0
        and pages.has_made(value, owner)
        and owner.nbytes <= value.nbytes + PAGE_BYTES
    )
