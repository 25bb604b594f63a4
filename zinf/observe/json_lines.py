"""Metrics as a file of JSON objects, one a line and step."""

import json
from pathlib import Path

from zinf.observe.writer import AbstractWriter, Metrics, numbers


class JsonLines(AbstractWriter):
    """Appends each step to `path` and flushes it, so that `tail -f` shows it.

    Lines of steps after `after_step` are of a run that did not get to save them: they
    are cut off, with a last line that was not completed. With `after_step` of 0 the
    file begins anew.
    """

    def __init__(self, path: Path | str, *, after_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        self._file.truncate(_bytes_until(self.path, after_step))

    def write(self, metrics: Metrics) -> None:
        line = json.dumps(numbers(metrics), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _bytes_until(path: Path, last_step: int) -> int:
    """The length of what comes before the first line of a later step."""
    nbytes = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _step(line) > last_step:
                break
            nbytes += len(line)
    return nbytes


def _step(line: bytes) -> float:
    """The step that a line is of; a line that is no metrics is later than any."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
