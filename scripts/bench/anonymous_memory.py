"""The most anonymous memory that a process holds: pages that are of no file.

Memory of a contender is counted so: pages of files (the code of libraries, what is read
through the page cache) are the kernel's to take back whenever it wants them. It keeps
no peak of anonymous memory, so a thread looks every 20 ms.
"""

import threading

from zinf.core.process.malloc import anonymous_bytes

PERIOD_SECONDS = 0.02


class MemoryPeak:
    """Samples a process from when this is made until `stop`, or until it has ended."""

    def __init__(self, process: int | str = "self") -> None:
        self._process = process
        self._nbytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def nbytes(self) -> int:
        """The most so far."""
        try:
            self._nbytes = max(self._nbytes, anonymous_bytes(self._process))
        except (FileNotFoundError, ProcessLookupError):  # The process has ended.
            self._is_over.set()
        return self._nbytes

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(PERIOD_SECONDS):
            self.nbytes()
