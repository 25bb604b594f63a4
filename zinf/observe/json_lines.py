"""Metrics as a file with one JSON object, on one line, per step."""

import json
import shutil
from itertools import count
from pathlib import Path

from zinf.core.text.json_text import from_json
from zinf.observe.writer import AbstractWriter, Metrics, lists, numbers


class JsonLines(AbstractWriter):
    """Appends each step to `path` and flushes it, so that `tail -f` shows it.

    If the file has lines of steps after `after_step`, this run repeats these steps. The
    lines are moved to `metrics.1.jsonl`, or the first free number; with `after_step` of
    0 that is the whole file. A last line of metrics that was cut short is removed. What
    is no metrics is moved too, so a file of another kind is not lost.

    Attributes:
        kept: where lines of an earlier run were moved to; None if there were none.
    """

    def __init__(self, path: Path | str, *, after_step: int = 0) -> None:
        self.path = Path(path)
        self.target = f"The metrics in {self.path}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        num_bytes = _bytes_until(self.path, after_step)
        self.kept = _keep(self.path, num_bytes)
        self._file = self.path.open("ab")
        self._file.truncate(num_bytes)

    def write(self, metrics: Metrics) -> None:
        found = numbers(metrics) | lists(metrics)
        line = json.dumps(found, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep(path: Path, start: int) -> Path | None:
    """Copies what is from `start` on to a new file, unless it is a line cut short."""
    with path.open("rb") as file:
        file.seek(start)
        line = file.readline()
        if not line or _is_cut_short(line):
            return None
        file.seek(start)
        numbered = (path.with_stem(f"{path.stem}.{n}") for n in count(1))
        kept = next(each for each in numbered if not each.exists())
        # Rename when complete: if the process is killed, no file with the final name is
        # incomplete.
        fresh = kept.with_name(f"{kept.name}.new")
        with fresh.open("wb") as copy:
            shutil.copyfileobj(file, copy)
        fresh.replace(kept)
    return kept


def _bytes_until(path: Path, last_step: int) -> int:
    """Length of the lines before the first line of a step after `last_step`."""
    nbytes = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _step(line) > last_step:
                break
            nbytes += len(line)
    return nbytes


def _is_cut_short(line: bytes) -> bool:
    """Whether a line may be the beginning of one that `JsonLines` wrote."""
    if line.endswith(b"\n") or not line.startswith(b"{"):
        return False
    try:
        from_json(line)
    except ValueError:
        return True
    return False


def _step(line: bytes) -> float:
    """The step of a line; infinity if the line holds no metrics."""
    try:
        step = from_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    return step if isinstance(step, int | float) else float("inf")
