"""Measures drives, to choose request size and depth and to deal chunks over them."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from statistics import harmonic_mean, median
from tempfile import TemporaryDirectory

import numpy as np

from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.nvme.drive import Drive
from zinf.core.memory.nvme.file import File
from zinf.core.memory.nvme.profile import Profile

MIB = 2**20
BLOCKS = tuple(n * MIB for n in (1, 2, 4, 8, 16))
THREADS = (1, 2, 4, 8, 16)
# A measurement moves as much as the drive does in this time, within these bounds.
MEASURE_SECONDS = 0.1
MEASURE_BYTES = (32 * MIB, 256 * MIB)
# The cheapest setting that reaches this fraction of the best score is chosen: fewer
# threads and smaller blocks leave more of the machine to everything else.
GOOD_ENOUGH = 0.99
SPEED_BYTES = 64 * MIB


@dataclass
class Measured:
    """One setting, and its speed in each round in bytes per second."""

    profile: Profile
    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Harmonic mean: a step reads about as much as it writes, so times add up."""
        return harmonic_mean([median(x) for x in (self.reads, self.writes, self.mixed)])


def measure_drive(
    folder: Path,
    *,
    seconds: float = 30.0,
    progress: Callable[[float], object] = lambda part: None,
) -> tuple[Profile, list[Measured]]:
    """The best profile of the drive under `folder`, and all settings that were tried.

    Settings take turns, round after round, so that other load on the machine affects
    all of them alike. Files are made in `folder` and deleted again.

    Args:
        seconds: start no round after this time; the first is always completed.
        progress: called with the fraction of `seconds` that is over, 0 to 1.

    Raises:
        StorageError: the folder cannot be written, or the drive is full.
    """
    began = time.perf_counter()
    default = Profile()
    settings = [
        Profile(block_bytes=b, num_threads=n) for b, n in product(BLOCKS, THREADS)
    ]
    rows = [Measured(profile) for profile in settings]
    with _scratch(folder) as path:
        nbytes = _measured_bytes(path, default)
        memory = aligned_empty((nbytes,), np.uint8)
        memory[:] = 1
        elapsed = 0.0
        while not rows[0].reads or elapsed < seconds:
            for row in rows:
                _measure_row(row, path, memory)
                elapsed = time.perf_counter() - began
                progress(1.0 if elapsed >= seconds else elapsed / seconds)
    best = max(row.score for row in rows)
    good = [row for row in rows if row.score >= GOOD_ENOUGH * best]
    chosen = min(good, key=lambda r: (_buffer_bytes(r), -r.score))
    return _as_profile(chosen), rows


def relative_speeds(drives: Sequence[Drive]) -> list[float]:
    """The speed of each drive when all work at once, for dealing chunks over them.

    Speeds are those of the profiles if all drives have one, else of a short
    measurement. A single drive has speed 1.
    """
    if len(drives) == 1:
        return [1.0]
    known = [drive.profile.mixed_bytes_per_second for drive in drives]
    if None not in known:
        return [speed for speed in known if speed is not None]
    memory = aligned_empty((SPEED_BYTES,), np.uint8)
    memory[:] = 1
    with ExitStack() as opened:
        paths = [opened.enter_context(_scratch(drive.folder)) for drive in drives]
        files = [
            File(drive, path, nbytes=memory.nbytes)
            for drive, path in zip(drives, paths, strict=True)
        ]
        _seconds_each(files, memory)  # First writes are slower than all that follow.
        seconds = _seconds_each(files, memory)
    return [memory.nbytes / s for s in seconds]


def _seconds_each(files: Sequence[File], memory: np.ndarray) -> list[float]:
    """Seconds to overwrite each file, when all are overwritten at once."""
    ends: SimpleQueue[tuple[int, float]] = SimpleQueue()
    began = time.perf_counter()
    for index, file in enumerate(files):

        def note(_: object, index: int = index) -> None:
            ends.put((index, time.perf_counter()))

        file.write_async(memory).add_done_callback(note)
    seconds = dict(ends.get() for _ in files)
    for file in files:
        file.flush()
    return [seconds[index] - began for index in range(len(files))]


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    with TemporaryDirectory(prefix=".zinf-", dir=folder) as scratch:
        yield Path(scratch) / "measured"


def _measured_bytes(path: Path, profile: Profile) -> int:
    """Makes the file at `path`; returns the bytes to move in one measurement."""
    smallest, largest = MEASURE_BYTES
    with Drive(path.parent, profile=profile) as drive:
        file = File(drive, path, nbytes=largest)
        memory = aligned_empty((smallest,), np.uint8)
        memory[:] = 1
        file.write(memory)
        rate = smallest / _seconds(lambda: file.read(memory))
        nbytes = int(rate * MEASURE_SECONDS) // (16 * MIB) * 16 * MIB
        nbytes = min(max(nbytes, smallest), largest)
        # Bytes that were never written read as zeros, without the drive.
        file.write(np.ones(nbytes, np.uint8))
    return nbytes


def _measure_row(row: Measured, path: Path, memory: np.ndarray) -> None:
    half = memory.nbytes // 2
    with Drive(path.parent, profile=row.profile) as drive:
        file = File(drive, path)

        def mix() -> None:
            file.read_async(memory[:half])
            file.write_async(memory[half:], half)
            file.flush()

        file.read(memory[: 64 * 1024])  # Starts the threads.
        file.write(memory[: 64 * 1024])
        row.writes.append(memory.nbytes / _seconds(lambda: file.write(memory)))
        row.reads.append(memory.nbytes / _seconds(lambda: file.read(memory)))
        row.mixed.append(memory.nbytes / _seconds(mix))


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _buffer_bytes(row: Measured) -> int:
    return row.profile.block_bytes * row.profile.num_threads


def _as_profile(row: Measured) -> Profile:
    system = f"{platform.system()} {platform.release()}"
    return row.profile.model_copy(
        update={
            "read_bytes_per_second": median(row.reads),
            "write_bytes_per_second": median(row.writes),
            "mixed_bytes_per_second": median(row.mixed),
            "measured": f"{time.strftime('%Y-%m-%d')}, {system}, "
            f"{os.cpu_count()} cores, {len(row.reads)} rounds",
        }
    )
