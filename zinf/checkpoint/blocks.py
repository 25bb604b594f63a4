"""Arrays cut into blocks of rows that are small enough to hold one or two of."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import prod

from zinf.memory.chunk import MAX_CHUNK_BYTES, chunk_shape
from zinf.memory.residents import Residents
from zinf.program import ArrayId, ArraySpec, Tier

# One block is read while the one before it is still being written.
NUM_BLOCKS_HELD = 2

Finish = Callable[[], None]
Transfer = tuple[int, Callable[[], Finish]]
"""The bytes of a block, and what begins to move it and returns what ends it."""


def blocks(array: ArrayId, spec: ArraySpec) -> Iterator[ArrayId]:
    """`array` as blocks of rows of at most 16 MiB, in order; whole if it is one.

    A block is a row of chunks of the saved array, so no two of them share a file. One
    row of the leading dim that exceeds 16 MiB is a block all the same.
    """
    rows = block_rows(spec)
    if not spec.shape or rows >= spec.shape[0]:
        if spec.nbytes:
            yield array
        return
    for start in range(0, spec.shape[0], rows):
        stop = min(start + rows, spec.shape[0])
        yield ArrayId(array.role, array.path, (start, stop))


def block_rows(spec: ArraySpec) -> int:
    """Rows in a block; 1 for a scalar."""
    return chunk_shape(spec)[0] if spec.shape else 1


def block_bytes(spec: ArraySpec) -> int:
    """Bytes of the largest block of an array."""
    if not spec.shape:
        return spec.itemsize
    rows = min(block_rows(spec), spec.shape[0])
    return rows * prod(spec.shape[1:]) * spec.itemsize


def held_bytes(residents: Residents) -> dict[Tier, int]:
    """What moving all arrays holds at once, at most, on the host and on the device.

    On the device it is rows of an array, which are copied there on their way.
    """
    specs, homes = residents.specs, residents.homes
    largest = max(map(block_bytes, specs.values()), default=0)
    total = sum(spec.nbytes for spec in specs.values())
    cut = (
        block_bytes(spec)
        for array, spec in specs.items()
        if homes.get(array) == Tier.DEVICE and block_bytes(spec) < spec.nbytes
    )
    return {
        Tier.HOST: min(total, max(NUM_BLOCKS_HELD * MAX_CHUNK_BYTES, largest)),
        Tier.DEVICE: max(cut, default=0),
    }


def move(transfers: Iterable[Transfer], capacity_bytes: int) -> None:
    """Runs all transfers, as many of them at once as `capacity_bytes` hold.

    They begin and end in order, in this thread.
    """
    under_way: deque[tuple[int, Finish]] = deque()
    moving_bytes = 0
    for nbytes, begin in transfers:
        while under_way and moving_bytes + nbytes > capacity_bytes:
            moved_bytes, finish = under_way.popleft()
            finish()
            moving_bytes -= moved_bytes
        under_way.append((nbytes, begin()))
        moving_bytes += nbytes
    for _, finish in under_way:
        finish()
