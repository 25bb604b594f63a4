"""How long processes wait for one another, in seconds."""

from dataclasses import dataclass

# The hub waits this long before an error becomes the verdict: the error may be only a
# consequence of another process's end, and the news of that end may be under way.
GRACE_SECONDS = 1.0
# A lost process becomes the verdict after this time. Processes that are lost within it,
# such as those of one host, are named together.
TOGETHER_SECONDS = 0.3
# A connection on which no greeting came for this long is dropped.
GREETING_SECONDS = 30.0
# Process 0 ends last, so that every other process gets the verdict. It waits for the
# others at most this long.
LINGER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long processes wait for one another; the flags of `zinf train` set it.

    Args:
        join_seconds: time from the start of process 0 until all others have joined.
        silence_seconds: a process from which nothing was heard for this long is lost.
        hang_seconds: a process without progress (`AbstractGroup.say`) for this long is
            hung. Must be longer than the longest compilation.
    """

    join_seconds: float = 300.0
    silence_seconds: float = 30.0
    hang_seconds: float = 1800.0

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life of a process."""
        return min(1.0, self.silence_seconds / 5)
