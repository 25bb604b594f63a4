"""Metrics as CSV files, one for each number, as DeepSpeed's `csv_monitor` has them."""

import csv
import re
import shutil
from pathlib import Path
from typing import IO

from zinf.observe.writer import AbstractWriter, Metrics, new_run_folder, numbers

HEADER = b"step,"


class CsvFiles(AbstractWriter):
    """Appends each step's numbers to files in `directory`, a row `step,value` each.

    A number named `aux/accuracy` is in `aux_accuracy.csv`, below the header
    `step,accuracy`. Rows of an earlier run, of steps that this run repeats, are removed
    once the files that have them are copied to the folder `run.1` in `directory`, or
    the first free number.

    Attributes:
        kept: where files of an earlier run were copied to; None if there was no need.
    """

    def __init__(self, directory: Path | str, *, after_step: int = 0) -> None:
        self.directory = Path(directory)
        self.target = f"The CSV files in {directory}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.kept = _without_rows_after(self.directory, after_step)
        self._files: dict[str, IO[str]] = {}

    def write(self, metrics: Metrics) -> None:
        step = metrics["step"]
        for name, value in numbers(metrics).items():
            if name == "step" or value is None:
                continue
            file = self._files.get(name) or self._open(name)
            csv.writer(file, lineterminator="\n").writerow([step, value])
            file.flush()

    def _open(self, name: str) -> IO[str]:
        path = self.directory / f"{re.sub('[/ ]', '_', name)}.csv"
        file = path.open("a", encoding="utf-8", newline="")
        if not file.tell():
            header = ["step", name.rpartition("/")[2]]
            csv.writer(file, lineterminator="\n").writerow(header)
        self._files[name] = file
        return file

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _without_rows_after(directory: Path, last_step: int) -> Path | None:
    """Cut files of an earlier run to the steps up to the last; return their copies."""
    lengths = {path: _bytes_until(path, last_step) for path in directory.glob("*.csv")}
    longer = {p: n for p, n in lengths.items() if n is not None and n < _size(p)}
    if not longer:
        return None
    kept = new_run_folder(directory)
    for path, num_bytes in longer.items():
        shutil.copy2(path, kept / path.name)
        with path.open("r+b") as file:
            file.truncate(num_bytes)
    return kept


def _bytes_until(path: Path, last_step: int) -> int | None:
    """Length of the rows before the first one after `last_step`; 0 if there is none.

    None for a file of another kind.
    """
    with path.open("rb") as file:
        header = file.readline()
        if not header.startswith(HEADER):
            return None
        nbytes = len(header)
        for row in file:
            step = row.partition(b",")[0]
            if not row.endswith(b"\n") or not step.isdigit() or int(step) > last_step:
                break
            nbytes += len(row)
    return nbytes if nbytes > len(header) else 0


def _size(path: Path) -> int:
    return path.stat().st_size
