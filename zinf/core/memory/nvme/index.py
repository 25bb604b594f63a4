"""The readable index of a folder of the tier: which array has which short name."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from zinf.core.memory.nvme.root import INDEX
from zinf.core.program import ArrayId, ArraySpec

# Every step makes and frees arrays. The file is rewritten when it has more lines than
# this and most of them are of arrays that are gone.
REWRITE_LINES = 10_000

logger = logging.getLogger(__name__)


class Index:
    """A line of JSON for each array made or freed, in `folder`; for people and tools.

    zinf does not read it. If it cannot be written, a warning says so, and the rest is
    left out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / INDEX
        self._lines: dict[str, str] = {}
        self._num_written = 0
        self._lock = Lock()
        self._file: int | None = None
        self._attempt(self._rewrite)

    def add(self, name: str, array: ArrayId, spec: ArraySpec) -> None:
        entry = {"name": name, "array": str(array), "shape": spec.shape}
        line = json.dumps({**entry, "dtype": spec.dtype})
        with self._lock:
            self._lines[name] = line
            self._attempt(self._append, line)

    def remove(self, name: str) -> None:
        with self._lock:
            del self._lines[name]
            self._attempt(self._append, json.dumps({"name": name, "freed": True}))

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _attempt(self, function: Callable[..., None], *arguments: str) -> None:
        try:
            function(*arguments)
        except OSError as error:
            logger.warning(
                "Cannot write the index %s any more: %s. Training does not need it.",
                self._path,
                error,
            )
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        if self._num_written > REWRITE_LINES + 4 * len(self._lines):
            self._rewrite()
            return
        os.write(self._file, f"{line}\n".encode())
        self._num_written += 1

    def _rewrite(self) -> None:
        fresh = self._path.with_name(f"{INDEX}.new")
        fresh.unlink(missing_ok=True)  # A link there must not be written through.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        file = os.open(fresh, flags, 0o600)
        old, self._file = self._file, file
        if old is not None:
            os.close(old)
        os.write(file, "".join(f"{x}\n" for x in self._lines.values()).encode())
        os.replace(fresh, self._path)
        self._num_written = len(self._lines)
