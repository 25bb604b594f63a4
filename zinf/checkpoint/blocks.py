"""Arrays moved in blocks of rows that are small enough to hold one or two of."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager

from zinf.checkpoint.share import Share
from zinf.memory.chunk import MAX_CHUNK_BYTES
from zinf.memory.residents import Residents
from zinf.program import ArrayId, Tier

# One block is read while the one before it is still being written.
NUM_BLOCKS_HELD = 2

Finish = Callable[[], None]
Transfer = tuple[int, Callable[[], Finish]]
"""The bytes of a block, and what begins to move it and returns what ends it."""


def block_bytes(block: ArrayId, share: Share) -> int:
    """Bytes of a block of a share: rows counted in it, or all of it."""
    spec = share.spec
    return (spec.rows(*block.rows) if block.rows else spec).nbytes


def held_bytes(
    blocks: Mapping[ArrayId, Share], residents: Residents
) -> dict[Tier, int]:
    """What moving blocks holds at once, at most, on the host and on the device.

    On the device it is rows of an array, which are copied there on their way.
    """
    sizes = {block: block_bytes(block, share) for block, share in blocks.items()}
    largest = max(sizes.values(), default=0)
    cut = (
        size
        for block, size in sizes.items()
        if residents.homes.get(block.whole) == Tier.DEVICE
        and size < blocks[block].spec.nbytes
    )
    limit = max(NUM_BLOCKS_HELD * MAX_CHUNK_BYTES, largest)
    return {
        Tier.HOST: min(sum(sizes.values()), limit),
        Tier.DEVICE: max(cut, default=0),
    }


@contextmanager
def counted(
    held: Mapping[Tier, int], residents: Residents, what: str
) -> Generator[int, None, None]:
    """Counts `held_bytes` as held while `what` is done, and gives those of the host.

    Raises:
        BudgetExceeded: a tier has no room for them.
    """
    with ExitStack() as releases:
        for tier, nbytes in held.items():
            ledger = residents.stores[tier].ledger
            ledger.reserve(nbytes, what)
            releases.callback(ledger.release, nbytes)
        yield held[Tier.HOST]


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
