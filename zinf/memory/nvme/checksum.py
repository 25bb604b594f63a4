"""Checksums of chunks: of all their bytes, or of a part that is different each time."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from xxhash import xxh3_64

from zinf.memory.nvme.open_file import Bytes

Coverage = Literal["full", "sampled", "off"]

# One window of each stripe is summed. A full sum costs 28 ms of a core per GB, which
# on two cores slows writes by 6 to 14% and reads by 4 to 5%; this a sixteenth of that.
# Few large windows, since each is a call that the threads take turns to make: 64 KiB of
# every 512 cost more in calls than in bytes.
WINDOW_BYTES = 128 * 1024
NUM_WINDOWS = 16
STRIPE_BYTES = NUM_WINDOWS * WINDOW_BYTES


class Checksum(NamedTuple):
    """XXH3 (64 bits) of a chunk, or of one window (which) of each of its stripes."""

    value: int
    window: int | None


class Summer:
    """Computes the checksum of a chunk from its parts, in order.

    Args:
        window: which of each stripe, or None for everything.
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
        """What of `part` is summed."""
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
    """What sums a chunk of `nbytes` that is written now; None if nothing is to.

    Each write of a chunk has the next window, so that what is wrong in a place for good
    is found within a few writes. Chunks of a stripe or less are summed whole.
    """
    if coverage == "off":
        return None
    is_whole = coverage == "full" or nbytes <= STRIPE_BYTES
    return Summer(None if is_whole else num_writes % NUM_WINDOWS)
