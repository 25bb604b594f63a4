"""What process 0 knows of one process of the run. Process 0 has an entry too."""

import time
from dataclasses import dataclass, field

from zinf.distributed.wire import Wire


@dataclass(slots=True, eq=False)
class Peer:
    """One process of the run, as the hub knows it from its messages."""

    wire: Wire
    host: str
    pid: int
    heard: float = field(default_factory=time.monotonic)
    said: str = "nothing"
    said_at: float = field(default_factory=time.monotonic)
    num_words: int = 0
    is_connected: bool = True

    def say(self, text: str) -> None:
        self.said, self.said_at = text, time.monotonic()
        self.num_words += 1

    @property
    def name(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    @property
    def last_words(self) -> str:
        seconds = time.monotonic() - self.said_at
        return f"It last said {self.said!r}, {seconds:.0f} s ago."
