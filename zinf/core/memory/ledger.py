"""Counting the bytes of one tier against its budget."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Lock

from zinf.core.program import Tier


class BudgetExceeded(RuntimeError):
    """A tier was asked to hold more bytes than its budget."""

    def __init__(
        self,
        tier: Tier,
        *,
        asked_bytes: int,
        used_bytes: int,
        capacity_bytes: int,
        what: str,
    ) -> None:
        super().__init__(
            f"{what} needs {asked_bytes:,} bytes on tier {tier}, which holds "
            f"{used_bytes:,} of its {capacity_bytes:,} bytes: "
            f"{used_bytes + asked_bytes - capacity_bytes:,} too many. "
            f"Raise {tier.row.budget}, or place fewer arrays there."
        )
        self.tier = tier
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.capacity_bytes = capacity_bytes
        self.what = what


class Ledger:
    """The bytes that a tier holds now, the most that it held, and its budget.

    It counts the bytes of arrays (`ArraySpec.nbytes`), without what an allocator or a
    file system adds: the plan predicts the same number, and the CPU backend reports no
    memory statistics to compare with. `capacity_bytes` None means no limit. Safe to
    call from several threads.

    Args:
        relieve: frees what is kept only until its room is needed.
    """

    def __init__(
        self,
        tier: Tier,
        capacity_bytes: int | None,
        relieve: Callable[[], object] = lambda: None,
    ) -> None:
        self.tier, self._relieve = tier, relieve
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self._last_peak_bytes = 0
        self._lock = Lock()

    @property
    def capacity_bytes(self) -> int | None:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest `used_bytes` since the start, or since `reset_peak`."""
        return self._peak_bytes

    @property
    def recent_peak_bytes(self) -> int:
        """The larger of this peak and the one before the last `reset_peak`."""
        return max(self._peak_bytes, self._last_peak_bytes)

    def reserve(self, nbytes: int, what: str) -> None:
        """Count `nbytes` as held; `what` names them in the error.

        Raises:
            BudgetExceeded: they do not fit. Nothing is counted then.
        """
        assert nbytes >= 0, f"{what}: cannot reserve {nbytes} bytes"
        with suppress(BudgetExceeded):
            self._count(nbytes, what)
            return
        # Count again even if nothing is left to free: another thread may have freed it.
        self._relieve()
        self._count(nbytes, what)

    def _count(self, nbytes: int, what: str) -> None:
        with self._lock:
            used_bytes = self._used_bytes + nbytes
            if self._capacity_bytes is not None and used_bytes > self._capacity_bytes:
                raise BudgetExceeded(
                    self.tier,
                    asked_bytes=nbytes,
                    used_bytes=self._used_bytes,
                    capacity_bytes=self._capacity_bytes,
                    what=what,
                )
            self._used_bytes = used_bytes
            self._peak_bytes = max(self._peak_bytes, used_bytes)

    def release(self, nbytes: int) -> None:
        """Count `nbytes` as no longer held."""
        with self._lock:
            assert 0 <= nbytes <= self._used_bytes, (
                f"tier {self.tier}: cannot release {nbytes:,} bytes of "
                f"{self._used_bytes:,}"
            )
            self._used_bytes -= nbytes

    @contextmanager
    def holding(self, nbytes: int, what: str) -> Generator[None, None, None]:
        """Reserve `nbytes`, and release them again only if the `with` block fails."""
        self.reserve(nbytes, what)
        try:
            yield
        except BaseException:
            self.release(nbytes)
            raise

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes held now."""
        with self._lock:
            self._last_peak_bytes = self._peak_bytes
            self._peak_bytes = self._used_bytes
