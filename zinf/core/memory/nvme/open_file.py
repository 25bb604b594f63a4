"""One open file: moves whole byte ranges past the page cache, or says why it cannot."""

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Self

import numpy as np

from zinf.core.memory.host.aligned import address, aligned_empty
from zinf.core.memory.nvme.system import O_BINARY, O_DIRECT, RWF_NOWAIT, System
from zinf.core.memory.storage_error import NVME_TIER, Advice, StorageError

PAGE_BYTES = mmap.PAGESIZE
# Shorter ranges go through the page cache, which answers in 10 us where a drive takes
# 100 us. Longer ones would cost a copy there, and pages are written back at a fraction
# of the drive's speed.
DIRECT_FROM_BYTES = 256 * 1024
# A thread's buffer for memory that is not aligned like the file: small enough to stay
# in a processor cache between the copy and the drive.
STAGING_BYTES = 2 * 2**20
# A read or write fails after this many calls in a row without progress (by O_DIRECT:
# of less than a page).
MAX_STANDSTILLS = 3

Bytes = np.ndarray
"""Contiguous uint8 of one dim."""
Each = Callable[[Any], None]
"""Called with each part of a range as it is moved, for example to sum it."""


class Mover:
    """What one thread uses to move bytes: the system calls, and one buffer.

    With `only_cached`, an operation that would wait for a drive fails instead (EAGAIN,
    or EOPNOTSUPP where the file system cannot tell): for threads of callers.

    Errors begin with `what`, such as "Cannot read param/w". `is_wanted` says whether a
    caller still waits for the result. `busy_since` is the `time.monotonic` at which the
    system call in flight began, or None.
    """

    def __init__(
        self,
        system: System,
        block_bytes: int,
        *,
        is_direct: bool,
        only_cached: bool = False,
        advice: Advice = NVME_TIER,
    ) -> None:
        self.system = system
        self.block_bytes = block_bytes
        self.is_direct = is_direct
        self.only_cached = only_cached
        self.advice = advice
        self.busy_since: float | None = None
        self.what = "Cannot move bytes"
        self.is_wanted: Callable[[], bool] = always
        self._staging: Bytes | None = None

    def open(self, path: Path, flags: int, nbytes: int = 0) -> "OpenFile":
        """Open a file of which ranges of `nbytes` will be moved."""
        return OpenFile(self, path, flags, nbytes)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a system call; repeat it if a signal interrupts it."""
        while True:
            self.busy_since = monotonic()
            try:
                return function(*arguments)
            except InterruptedError:
                continue
            finally:
                self.busy_since = None

    def check_wanted(self) -> None:
        """Raise OSError if the request was given up: its future has failed.

        Then the memory belongs to the caller again.
        """
        if not self.is_wanted():
            raise OSError(errno.ETIMEDOUT, "the request was given up")

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file, over another if there is one."""
        try:
            self.call(self.system.replace, source, target)
        except OSError as error:
            raise self.advice.from_os_error(self.what, target, error) from error

    def discard(self, path: Path) -> None:
        """Delete a file that is not needed, if it exists and can be deleted."""
        with suppress(OSError):
            self.call(self.system.unlink, path)

    def staging(self, nbytes: int) -> Bytes:
        """The page-aligned buffer of this thread, to be used until the next call."""
        if self._staging is None:
            self._staging = aligned_empty((STAGING_BYTES,), np.uint8)
        return self._staging[:nbytes]


def always() -> bool:
    return True


class OpenFile:
    """A file that one thread has opened; close it, or use it in `with`.

    Ranges of 256 KiB and more move by O_DIRECT, in blocks: straight from and to memory
    that is aligned like the file (address and offset at page boundaries), and through
    the buffer of the thread otherwise. Partial pages at either end, and shorter ranges,
    move through the page cache. The kernel keeps it coherent with O_DIRECT page by
    page, so a write of the other part of a page at the same time is not lost.
    """

    def __init__(self, mover: Mover, path: Path, flags: int, nbytes: int) -> None:
        self.path = path
        self._mover = mover
        # Open for the mode that is needed first; `_turn` can change it later.
        self._is_direct = self._takes_direct(nbytes)
        self._descriptor: int | None = self._open(flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            self._mover.call(self._mover.system.close, descriptor)
        except OSError as error:
            raise self._failure(error) from error

    def read(self, offset: int, memory: Bytes, each: Each | None = None) -> None:
        """Fill `memory` from `offset` on.

        Args:
            each: called with each part of `memory` in turn when it is filled.

        Raises:
            StorageError: a system call failed, or the file ends too soon.
        """
        for start, part, is_direct in self._parts(offset, memory):
            if is_direct and address(part) % PAGE_BYTES:
                staging = self._mover.staging(part.size)
                self._fill(offset + start, staging, is_direct)
                np.copyto(part, staging)
            else:
                self._fill(offset + start, part, is_direct)
            if each is not None:
                each(part)

    def write(self, offset: int, memory: Bytes, each: Each | None = None) -> None:
        """Write all of `memory` at `offset`; `each` as in `read`, before it is written.

        Raises:
            StorageError: a system call failed, or wrote less than it was asked.
        """
        for start, part, is_direct in self._parts(offset, memory):
            if each is not None:
                each(part)
            if is_direct and address(part) % PAGE_BYTES:
                staging = self._mover.staging(part.size)
                np.copyto(staging, part)
                part = staging
            self._drain(offset + start, part, is_direct)

    def allocate(self, nbytes: int) -> None:
        """Give the file `nbytes` of zeros, reserved on the drive where it can be."""
        try:
            if nbytes:
                self._mover.call(
                    self._mover.system.allocate, self._descriptor, 0, nbytes
                )
        except OSError as error:
            raise self._failure(error, 0, nbytes) from error

    def stat(self) -> os.stat_result:
        try:
            return self._mover.call(self._mover.system.stat, self._descriptor)
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Wait until the drive has what was written."""
        try:
            self._mover.call(self._mover.system.sync, self._descriptor)
        except OSError as error:
            raise self._failure(error) from error

    def _open(self, flags: int) -> int:
        mover, system = self._mover, self._mover.system
        flags |= O_BINARY | (O_DIRECT if self._is_direct else 0)
        try:
            if mover.only_cached:
                return system.open_cached(self.path, flags)
            return mover.call(system.open, self.path, flags, 0o600)
        except OSError as error:
            raise self._failure(error) from error

    def _turn(self, *, is_direct: bool) -> None:
        """Switch the descriptor to O_DIRECT, or to the page cache."""
        if is_direct == self._is_direct:
            return
        try:
            self._mover.call(self._mover.system.toggle_direct, self._descriptor)
        except OSError as error:
            raise self._failure(error) from error
        self._is_direct = is_direct

    def _takes_direct(self, nbytes: int) -> bool:
        return self._mover.is_direct and nbytes >= DIRECT_FROM_BYTES

    def _parts(self, offset: int, memory: Bytes) -> Iterator[tuple[int, Bytes, bool]]:
        """`(start in memory, part, whether by O_DIRECT)`, in order."""
        end = start = 0
        if self._takes_direct(memory.size):
            start = -offset % PAGE_BYTES
            end = memory.size - (offset + memory.size) % PAGE_BYTES
            if start:
                yield 0, memory[:start], False
            block_bytes = self._mover.block_bytes
            if address(memory[start:]) % PAGE_BYTES:
                block_bytes = min(block_bytes, STAGING_BYTES)
            for low in range(start, end, block_bytes):
                yield low, memory[low : min(low + block_bytes, end)], True
        if end < memory.size:
            yield end, memory[end:], False

    def _fill(self, offset: int, memory: Bytes, is_direct: bool) -> None:
        preadv = self._mover.system.preadv
        flags = (RWF_NOWAIT,) if self._mover.only_cached else ()

        def read(*where: Any) -> int:
            return preadv(*where, *flags)

        self._move(read, offset, memory, is_direct=is_direct, is_read=True)

    def _drain(self, offset: int, memory: Bytes, is_direct: bool) -> None:
        pwritev = self._mover.system.pwritev
        self._move(pwritev, offset, memory, is_direct=is_direct, is_read=False)

    def _move(
        self,
        function: Callable[..., int],
        offset: int,
        memory: Bytes,
        *,
        is_direct: bool,
        is_read: bool,
    ) -> None:
        """Call `function` until all of `memory` has moved; a call may move less."""
        self._turn(is_direct=is_direct)
        done = standstills = 0
        while done < memory.size:
            rest, place = memory[done:], offset + done
            try:
                self._mover.check_wanted()
                moved = self._mover.call(function, self._descriptor, [rest], place)
            except OSError as error:
                raise self._failure(error, place, rest.size) from error
            if is_direct:
                # The next call has to begin at a page, too.
                moved -= moved % PAGE_BYTES if done + moved < memory.size else 0
            standstills = 0 if moved else standstills + 1
            if standstills == MAX_STANDSTILLS:
                raise self._standstill(place, rest.size, is_read)
            done += moved

    def _standstill(self, offset: int, nbytes: int, is_read: bool) -> StorageError:
        size = self.stat().st_size
        code, found = errno.EIO, "the system moved nothing and named no error"
        if is_read and size < offset + nbytes:
            code, found = errno.ENODATA, f"the file has only {size:,} bytes"
        place = _place(offset, nbytes)
        found = f"{found}, {place}"
        return self._mover.advice.error(self._mover.what, code, self.path, found)

    def _failure(
        self, error: OSError, offset: int | None = None, nbytes: int = 0
    ) -> StorageError:
        place = "" if offset is None else _place(offset, nbytes)
        mover = self._mover
        return mover.advice.from_os_error(mover.what, self.path, error, place=place)


def _place(offset: int, nbytes: int) -> str:
    return f"at byte {offset:,}, of {nbytes:,} bytes asked"
