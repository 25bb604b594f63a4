"""How long processes wait for one another, in seconds."""

from dataclasses import dataclass

# A failing process's error may only follow from another's end, of which the news is
# under way: so long a verdict waits for it.
GRACE_SECONDS = 1.0
# Processes of one host that go down together are named together.
TOGETHER_SECONDS = 0.3
# From a connection to a greeting on it; else it is dropped.
GREETING_SECONDS = 30.0
# Process 0 leaves last, so that every other has the verdict; at most so much later.
LINGER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Set by flags of `zinf train`.

    Args:
        join_seconds: from the start of process 0 until all others have joined.
        silence_seconds: without any sign of life, until a process counts as lost.
        hang_seconds: without progress (`AbstractGroup.say`), until a process counts as
            hung. The longest compilation must fit.
    """

    join_seconds: float = 300.0
    silence_seconds: float = 30.0
    hang_seconds: float = 1800.0

    @property
    def beat_seconds(self) -> float:
        """Between signs of life."""
        return min(1.0, self.silence_seconds / 5)
