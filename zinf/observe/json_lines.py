"""Metrics as a file of JSON objects, one a line and step."""

import json
import shutil
from itertools import count
from pathlib import Path

from zinf.observe.writer import AbstractWriter, Metrics, numbers


class JsonLines(AbstractWriter):
    """Appends each step to `path` and flushes it, so that `tail -f` shows it.

    A run that begins after `after_step` repeats the later steps that are in the file.
    Their lines, with `after_step` of 0 the whole file, are moved to `metrics.1.jsonl`,
    or the first number that is free. A last line that was not completed is cut off.

    Attributes:
        kept: where lines of an earlier run were moved to; None if there were none.
    """

    def __init__(self, path: Path | str, *, after_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        num_bytes = _bytes_until(self.path, after_step)
        self.kept = _keep(self.path, num_bytes)
        self._file = self.path.open("ab")
        self._file.truncate(num_bytes)

    def write(self, metrics: Metrics) -> None:
        line = json.dumps(numbers(metrics), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep(path: Path, start: int) -> Path | None:
    """Copies what follows `start` to a file of its own, unless it is half a line."""
    with path.open("rb") as file:
        file.seek(start)
        if not file.readline().endswith(b"\n"):
            return None
        file.seek(start)
        numbered = (path.with_stem(f"{path.stem}.{n}") for n in count(1))
        kept = next(each for each in numbered if not each.exists())
        # Its name says that it is complete, whenever the process is killed.
        fresh = kept.with_name(f"{kept.name}.new")
        with fresh.open("wb") as copy:
            shutil.copyfileobj(file, copy)
        fresh.replace(kept)
    return kept


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
