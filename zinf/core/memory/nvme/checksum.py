"""Checksums of chunks: of all their bytes, or of a part that changes at each write."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from xxhash import xxh3_64

from zinf.core.memory.nvme.open_file import Bytes

Coverage = Literal["full", "sampled", "off"]

# Sampled checksums sum one window of each stripe, which is a sixteenth of the bytes. A
# full sum costs 28 ms of a core per GB, which on two cores slows writes by 6 to 14% and
# reads by 4 to 5%. Windows are few and large because each takes a call, and threads
# make these calls one at a time: with 64 KiB of every 512 the calls cost more than the
# bytes.
WINDOW_BYTES = 128 * 1024
NUM_WINDOWS = 16
STRIPE_BYTES = NUM_WINDOWS * WINDOW_BYTES


class Checksum(NamedTuple):
    """XXH3 (64 bits) of a chunk, or of window number `window` of each stripe in it."""

    value: int
    window: int | None


class Summer:
    """Computes the checksum of a chunk from its parts, in order.

    Args:
        window: number of the window to sum in each stripe; None sums all bytes.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._sum = xxh3_64()
        self._position = 0

    def update(self, part: Bytes) -> None:
        for piece in self._pieces(part):
            self._sum.update(piece)  # pyrefly: ignore
        self._position += part.size

    def checksum(self) -> Checksum:
        return Checksum(self._sum.intdigest(), self._window)

    def _pieces(self, part: Bytes) -> Iterator[Bytes]:
        """The pieces of `part` that are summed."""
        if self._window is None:
            yield part
            return
        low, high = self._position, self._position + part.size
        first = low - low % STRIPE_BYTES + self._window * WINDOW_BYTES
        for start in range(first, high, STRIPE_BYTES):
            begin, end = max(start, low), min(start + WINDOW_BYTES, high)
            if begin < end:
                yield part[begin - low : end - low]


def next_summer(coverage: Coverage, nbytes: int, num_writes: int) -> Summer | None:
    """The summer for a chunk of `nbytes` that is written now; None without checksums.

    Each write of a chunk sums the next window, so that a permanent fault in one place
    is found within `NUM_WINDOWS` writes. Chunks of a stripe or less are summed whole.
    """
    if coverage == "off":
        return None
    is_whole = coverage == "full" or nbytes <= STRIPE_BYTES
    return Summer(None if is_whole else num_writes % NUM_WINDOWS)
