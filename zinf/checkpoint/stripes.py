"""Moves arrays in stripes of rows, so that two stripes fit in the host budget."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager

from zinf.checkpoint.share import Share
from zinf.memory.chunk import MAX_CHUNK_BYTES
from zinf.memory.residents import Residents
from zinf.program import ArrayId, Tier

# While one stripe is being written, the next stripe is read.
NUM_BLOCKS_HELD = 2

Finish = Callable[[], None]
Transfer = tuple[int, Callable[[], Finish]]
"""The bytes of a stripe, and a function that begins to move the stripe.

That function returns another one, which waits until the move is complete.
"""


def stripe_bytes(stripe: ArrayId, share: Share) -> int:
    """Bytes of a stripe: rows of a share, counted from its first row, or all of it."""
    spec = share.spec
    return (spec.rows(*stripe.rows) if stripe.rows else spec).nbytes


def held_bytes(
    stripes: Mapping[ArrayId, Share], residents: Residents
) -> dict[Tier, int]:
    """Upper bounds on the host and device bytes that moving the stripes holds at once.

    The device holds a copy of the rows that are moved, because rows of a device array
    are copied on the device before they go to the host.
    """
    sizes = {stripe: stripe_bytes(stripe, share) for stripe, share in stripes.items()}
    largest = max(sizes.values(), default=0)
    cut = (
        size
        for stripe, size in sizes.items()
        if residents.homes.get(stripe.whole) == Tier.DEVICE
        and size < stripes[stripe].spec.nbytes
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
    """Reserve `held` in the ledgers of the tiers while the body runs.

    Yields the reserved bytes of the host.

    Args:
        held: bytes per tier, from `held_bytes`.
        what: names the reservation in error messages.

    Raises:
        BudgetExceeded: a tier has too little room.
    """
    with ExitStack() as releases:
        for tier, nbytes in held.items():
            ledger = residents.stores[tier].ledger
            ledger.reserve(nbytes, what)
            releases.callback(ledger.release, nbytes)
        yield held[Tier.HOST]


def move(transfers: Iterable[Transfer], capacity_bytes: int) -> None:
    """Run all transfers, as many at once as fit in `capacity_bytes`.

    This thread begins and ends the transfers in order.
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
