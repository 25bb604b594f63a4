"""Connections to process 0 that have not yet shown that they belong to the run."""

import logging
import time
from collections.abc import Sequence

from zinf.distributed.wire import Wire

logger = logging.getLogger(__name__)

# Connections that may be open without a greeting, in addition to one per process.
MORE = 64


class Strangers:
    """Open connections without a greeting, and a count of those that were dropped.

    Args:
        count: Number of processes of the run.

    Attributes:
        num_dropped: Connections closed because they did not belong to the run.
    """

    def __init__(self, count: int) -> None:
        self._most = count + MORE
        # The host and the time of connecting of each, in order of connecting.
        self._known: dict[Wire, tuple[str, float]] = {}
        self.num_dropped = 0
        self._last = ""

    def __contains__(self, wire: Wire) -> bool:
        return wire in self._known

    def add(self, wire: Wire, host: str) -> None:
        """Add a connection from `host`."""
        self._known[wire] = host, time.monotonic()

    def remove(self, wire: Wire) -> None:
        """Remove a connection that belongs to the run."""
        del self._known[wire]

    def drop(self, wire: Wire, why: str) -> None:
        """Remove and count a connection that does not belong to the run."""
        host, _ = self._known.pop(wire)
        self.num_dropped += 1
        self._last = f"from {host}: {why}"
        # Log the 1st, 2nd, 4th, 8th, ... drop, so that a port scanner cannot fill the
        # log.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning("Process 0 %s.", self.summary)

    @property
    def summary(self) -> str:
        """How many connections were dropped and why the last one; "" if none were."""
        if not self.num_dropped:
            return ""
        return (
            f"dropped {self.num_dropped} connections that were not of this run, the "
            f"last {self._last}"
        )

    def all(self) -> Sequence[Wire]:
        return list(self._known)

    def too_many(self) -> Sequence[Wire]:
        """The oldest connections, which must be dropped to make room for one more."""
        return list(self._known)[: max(0, len(self._known) + 1 - self._most)]

    def late(self, before: float) -> Sequence[Wire]:
        """Connections that were opened before this time (`time.monotonic`)."""
        return [wire for wire, (_, since) in self._known.items() if since < before]
