"""Connections to process 0 that have not shown yet that they belong to the run."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zinf.distributed.wire import Wire

logger = logging.getLogger(__name__)

# Beside the processes of the run, which all may connect at once.
MORE = 64


@dataclass(frozen=True, slots=True)
class _Stranger:
    host: str
    number: str
    since: float


class Strangers:
    """Who has not greeted yet, and a count of who never did.

    Args:
        count: Processes of the run.

    Attributes:
        num_dropped: Connections that were closed as they did not belong to the run.
    """

    def __init__(self, count: int) -> None:
        self._most = count + MORE
        self._known: dict[Wire, _Stranger] = {}  # the oldest first
        self.num_dropped = 0
        self._last = ""

    def __contains__(self, wire: Wire) -> bool:
        return wire in self._known

    def add(self, wire: Wire, host: str, number: str) -> None:
        """A connection from `host`, to which `hello(number)` is said."""
        self._known[wire] = _Stranger(host, number, time.monotonic())

    def number(self, wire: Wire) -> str:
        """What the hub said `hello` with."""
        return self._known[wire].number

    def remove(self, wire: Wire) -> None:
        """It has greeted."""
        del self._known[wire]

    def drop(self, wire: Wire, why: str) -> None:
        """Count and log one that is no process of this run."""
        host = self._known.pop(wire).host
        self.num_dropped += 1
        self._last = f"from {host}: {why}"
        # Each of the first, then ever fewer: a scanner must not fill the log.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning("Process 0 %s.", self.summary)

    @property
    def summary(self) -> str:
        """What was dropped, in words; empty if nothing was."""
        if not self.num_dropped:
            return ""
        return (
            f"dropped {self.num_dropped} connections that were not of this run, the "
            f"last {self._last}"
        )

    def all(self) -> Sequence[Wire]:
        return list(self._known)

    def too_many(self) -> Sequence[Wire]:
        """The oldest, if there is no room for another."""
        return list(self._known)[: max(0, len(self._known) + 1 - self._most)]

    def late(self, before: float) -> Sequence[Wire]:
        """Those that are connected since before some time."""
        return [wire for wire, known in self._known.items() if known.since < before]
