"""Host memory that is pinned once, in large pieces, and handed out in blocks."""

import weakref
from collections import deque
from threading import Lock

import numpy as np

from zinf.core.memory.host.pages.cuda import Driver
from zinf.core.memory.host.region import Region

# A block lies in one piece, since a copy must stay within one registration.
PIECE_BYTES = 16 * 2**30
# The arena grows by this, where holes between blocks leave no room.
GROWTH_BYTES = 64 * 2**20


class RegisteredMemory(np.ndarray):
    """The bytes of one block, as uint8; it is free when nothing refers to it."""

    arena: "Arena"


class Arena:
    """Pinned pieces of host memory, and the blocks that arrays have of them.

    A piece is whole huge pages, and is registered with CUDA when it is made. Pieces
    stay until `close`, which undoes the registration and leaves the memory to the
    arrays that still use it. Safe to call from several threads.

    Attributes:
        limit_bytes: how far it may grow; None: without limit.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        """Pin `nbytes`; `driver` is closed with the arena.

        Raises:
            CudaError: CUDA refuses. Nothing stays pinned then.
        """
        self.limit_bytes: int | None = None
        self._driver = driver
        self._lock = Lock()
        self._pieces: list[Region] = []
        # The garbage collector may return a block in a thread that holds the lock.
        # Appending to a deque needs no lock.
        self._returned: deque[tuple[Region, int, int]] = deque()
        # Also if nobody closes it: pages that are unmapped must not stay registered.
        self._closes = weakref.finalize(self, _unregister, driver, self._pieces)
        self._closes.atexit = False  # pyrefly: ignore
        try:
            while self.pinned_bytes < nbytes:
                self._add(min(nbytes - self.pinned_bytes, PIECE_BYTES))
        except BaseException:
            self.close()
            raise

    @property
    def pinned_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def take(self, nbytes: int) -> RegisteredMemory | None:
        """A block, aligned to 64 KiB, with undefined content; None: no room is left.

        Raises:
            CudaError: the arena may grow, and CUDA refuses.
        """
        with self._lock:
            self._collect()
            found = self._place(nbytes)
            if found is None and self._may_grow(nbytes):
                self._add(max(nbytes, min(GROWTH_BYTES, self._room())))
                found = self._place(nbytes)
        if found is None:
            return None
        piece, offset = found
        memory = RegisteredMemory(
            (nbytes,), np.uint8, buffer=piece.memory, offset=offset
        )
        memory.arena = self
        block = piece, offset, nbytes
        returns = weakref.finalize(memory, self._returned.append, block)
        returns.atexit = False  # pyrefly: ignore
        return memory

    def close(self) -> None:
        """Undo all registrations, and close the driver.

        Blocks in use stay valid, as ordinary memory. No more can be taken.
        """
        with self._lock:
            self.limit_bytes = 0
            self._closes()

    def _add(self, nbytes: int) -> None:
        piece = Region(nbytes)
        self._driver.register(piece.address, piece.nbytes)
        self._pieces.append(piece)

    def _place(self, nbytes: int) -> tuple[Region, int] | None:
        for piece in self._pieces:
            offset = piece.take(nbytes)
            if offset is not None:
                return piece, offset
        return None

    def _room(self) -> int:
        if self.limit_bytes is None:
            return GROWTH_BYTES
        return self.limit_bytes - self.pinned_bytes

    def _may_grow(self, nbytes: int) -> bool:
        return self.limit_bytes is None or nbytes <= self._room()

    def _collect(self) -> None:
        while self._returned:
            piece, offset, nbytes = self._returned.popleft()
            piece.give_back(offset, nbytes)


def _unregister(driver: Driver, pieces: list[Region]) -> None:
    while pieces:
        driver.unregister(pieces.pop().address)
    driver.close()
