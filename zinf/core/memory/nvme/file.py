"""One file on a drive: reads and writes of byte ranges and arrays, at once or later."""

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self

import numpy as np

from zinf.core.memory.nvme.drive import Drive
from zinf.core.memory.nvme.open_file import Bytes, Mover
from zinf.core.memory.nvme.request import Request

# One thread moves this much of a large request; several move the rest at once.
SPAN_BYTES = 16 * 2**20


class File:
    """Reads and writes of one file, like those of DeepNVMe's `aio_handle`.

    `read` and `write` return when they are done. `read_async` and `write_async` return
    a future, which takes completion callbacks. The memory must not be touched until the
    future is done. All may be called from many threads at once. Where ranges overlap
    that are moved at once, each block has one content or the other.

    Memory that is aligned like the file (from `zinf.core.memory.aligned_empty`, with an
    offset that is a multiple of 4096) is not copied. Other memory goes through a buffer
    of the thread that moves it.

    Args:
        path: the file; made if it does not exist, readable by this user only.
        nbytes: bytes to reserve on the drive, so that a full drive is found here.

    Raises:
        StorageError: the file cannot be made, or the drive is full.
    """

    def __init__(self, drive: Drive, path: Path, *, nbytes: int = 0) -> None:
        self.drive = drive
        self.path = path
        self._pending: set[Future[Any]] = set()
        self._failed: Future[Any] | None = None
        self._lock = Lock()
        drive.run(f"Cannot make {path.name}", partial(_make, path, nbytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        if kind is None:
            self.flush()

    def read(self, into: np.ndarray, offset: int = 0) -> np.ndarray:
        """Fill `into`, contiguous and writeable, with the bytes from `offset` on.

        Raises:
            StorageError: naming the file, the place, the error and what to do.
        """
        return self._wait(self.read_async(into, offset))

    def read_async(self, into: np.ndarray, offset: int = 0) -> Future[np.ndarray]:
        """Like `read`; the result of the future is `into`."""
        if not into.flags.writeable:
            raise ValueError(
                f"Cannot read into {into.dtype}{list(into.shape)}, which is not "
                "writeable. Pass a writeable array."
            )
        return self._start("read", into, offset, lambda: into)

    def write(self, value: np.ndarray, offset: int = 0) -> None:
        """Write the bytes of `value`, contiguous, from `offset` on.

        Raises:
            StorageError: naming the file, the place, the error and what to do.
        """
        self._wait(self.write_async(value, offset))

    def write_async(self, value: np.ndarray, offset: int = 0) -> Future[None]:
        """Like `write`."""
        return self._start("write", value, offset, lambda: None)

    def flush(self, *, durable: bool = False) -> None:
        """Wait for all reads and writes that were asked before.

        Args:
            durable: also wait until the content survives a power cut.

        Raises:
            StorageError: a read or write has failed since the last flush.
        """
        with self._lock:
            asked, self._pending = self._pending, set()
            failed, self._failed = self._failed, None
        wait(asked)
        for future in (*([failed] if failed else []), *asked):
            future.result()
        if durable:
            self.drive.run(f"Cannot sync {self.path.name}", self._sync)

    def _start(
        self,
        direction: Literal["read", "write"],
        array: np.ndarray,
        offset: int,
        finish: Callable[[], Any],
    ) -> Future[Any]:
        if offset < 0:
            raise ValueError(
                f"Cannot {direction} at offset {offset}. Offsets are bytes from the "
                "start of the file, 0 or more."
            )
        memory = as_bytes(array)
        tasks = [
            partial(_move, self.path, direction, offset + low, memory[low:high])
            for low, high in _spans(offset, memory.size)
        ]
        what = f"Cannot {direction} {memory.size:,} bytes"
        request = Request(what, len(tasks), finish)
        self.drive.submit(direction, request, tasks)
        with self._lock:
            self._pending.add(request.future)
        request.future.add_done_callback(self._settle)
        return request.future

    def _wait(self, future: Future[Any]) -> Any:
        """The result of a request. If it fails, `flush` does not raise that again."""
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._pending.discard(future)
                if self._failed is future:
                    self._failed = None
            raise

    def _sync(self, mover: Mover) -> None:
        with mover.open(self.path, os.O_RDWR) as file:
            file.sync()

    def _settle(self, future: Future[Any]) -> None:
        with self._lock:
            if future not in self._pending:
                return  # A flush waits for it already.
            self._pending.discard(future)
            if future.exception() is not None and self._failed is None:
                self._failed = future


def as_bytes(array: np.ndarray) -> Bytes:
    """The memory of a contiguous array.

    Raises:
        ValueError: it is not contiguous, so that its memory is not its content.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"Cannot move {array.dtype}{list(array.shape)} with strides "
            f"{array.strides}: its memory is not contiguous. Use np.ascontiguousarray."
        )
    return array.reshape(-1).view(np.uint8)


def _spans(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """How a range is cut for the threads: at multiples of `SPAN_BYTES` in the file."""
    cuts = range(SPAN_BYTES - offset % SPAN_BYTES, nbytes, SPAN_BYTES)
    edges = [0, *cuts, nbytes]
    return [(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if a < b]


def _make(path: Path, nbytes: int, mover: Mover) -> None:
    with mover.open(path, os.O_RDWR | os.O_CREAT) as file:
        file.allocate(nbytes)


def _move(
    path: Path,
    direction: Literal["read", "write"],
    offset: int,
    memory: Bytes,
    mover: Mover,
) -> None:
    with mover.open(path, os.O_RDWR, memory.size) as file:
        if direction == "read":
            file.read(offset, memory)
        else:
            file.write(offset, memory)
