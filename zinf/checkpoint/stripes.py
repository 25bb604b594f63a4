"""Moves arrays in stripes of rows, so that two stripes fit in the host budget."""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager

from zinf.checkpoint.share import Share
from zinf.core.memory.chunk import MAX_CHUNK_BYTES
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Tier

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
    return spec.piece(stripe.rows).nbytes


def room(residents: Residents) -> dict[Tier, int]:
    """The bytes that the budgets of the host and the devices leave now."""
    ledgers = {t: residents.stores[t].ledger for t in (Tier.HOST, Tier.DEVICE)}
    return {
        tier: sys.maxsize
        if ledger.capacity_bytes is None
        else max(0, ledger.capacity_bytes - ledger.used_bytes)
        for tier, ledger in ledgers.items()
    }


def held_bytes(
    stripes: Mapping[ArrayId, Share], residents: Residents, left: Mapping[Tier, int]
) -> dict[Tier, int]:
    """Upper bounds on the host and device bytes that moving the stripes holds at once.

    The device holds a copy of the rows that are moved, because rows of a device array
    are copied on the device before they go to the host.

    Args:
        left: the bytes that the budgets leave. Less is held if they leave less than two
            stripes of 16 MiB, but never less than one stripe.
    """
    sizes = {stripe: stripe_bytes(stripe, share) for stripe, share in stripes.items()}
    limit = min(NUM_BLOCKS_HELD * MAX_CHUNK_BYTES, left[Tier.HOST])
    copied = (_copied_bytes(*item, residents) for item in stripes.items())
    return {
        Tier.HOST: min(sum(sizes.values()), max(limit, *sizes.values(), 0)),
        Tier.DEVICE: max(copied, default=0),
    }


def fitted(
    stripes: Mapping[ArrayId, Share],
    residents: Residents,
    left: Mapping[Tier, int],
    can_cut: Callable[[Share], bool],
) -> dict[ArrayId, Share]:
    """The stripes; where the budgets leave too little for them, cut into fewer rows.

    Two stripes of the result fit in what the budget of the host leaves, and one in that
    of the devices if it is copied there. Stripes of one row are not cut.

    Args:
        left: the bytes that the budgets leave.
    """
    needed = held_bytes(stripes, residents, dict.fromkeys(left, sys.maxsize))
    if all(nbytes <= left[tier] for tier, nbytes in needed.items()):
        return dict(stripes)
    found: dict[ArrayId, Share] = {}
    for stripe, share in stripes.items():
        pieces = [stripe]
        if can_cut(share):
            pieces = _cut(stripe, share, residents, left)
        found |= dict.fromkeys(pieces, share)
    return found


def _cut(
    stripe: ArrayId, share: Share, residents: Residents, left: Mapping[Tier, int]
) -> list[ArrayId]:
    """A stripe cut into runs of rows that fit `left`; uncut if it fits."""
    limit = left[Tier.HOST] // NUM_BLOCKS_HELD
    is_whole = not _copied_bytes(stripe, share, residents)
    if not share.spec.shape or (is_whole and stripe_bytes(stripe, share) <= limit):
        return [stripe]
    if Tier.DEVICE in {residents.homes[p] for p in residents.homes_of(stripe)}:
        limit = min(limit, left[Tier.DEVICE])
    start, stop = stripe.rows or (0, share.spec.shape[0])
    step = max(1, limit // max(1, share.spec.piece((0, 1)).nbytes))
    if step >= stop - start:
        return [stripe]
    starts = range(start, stop, step)
    return [stripe.whole.piece((low, min(low + step, stop))) for low in starts]


def _copied_bytes(stripe: ArrayId, share: Share, residents: Residents) -> int:
    """Bytes that moving a stripe copies on the device: rows of an array, not all."""
    if stripe.rows is None:
        return 0
    copied = 0
    for piece in residents.homes_of(stripe):
        first, last = piece.rows or (0, share.spec.shape[0])
        low, high = max(first, stripe.rows[0]), min(last, stripe.rows[1])
        if residents.homes[piece] == Tier.DEVICE and (low, high) != (first, last):
            copied = max(copied, share.spec.piece((low, high)).nbytes)
    return copied


@contextmanager
def counted(
    held: Mapping[Tier, int], residents: Residents, what: str
) -> Generator[int, None, None]:
    """Reserve `held` in the ledgers of the tiers while the `with` block runs.

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
