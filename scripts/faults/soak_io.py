"""Moves many gigabytes through a small pool and checks that memory does not grow.

    python scripts/faults/soak_io.py PATH [--gigabytes 200] [--seconds 600]

Several threads read arrays of the NVMe tier, check them, change them and write them
back, with 64 MiB of array memory in total; between these they write, read and free
small arrays. For each tenth of the bytes it prints the rate, anonymous memory and the
number of open descriptors. It fails if from the first tenth to the end memory has grown
by more than 32 MiB, or descriptors by more than one per thread.
"""

import argparse
import os
import shutil
import threading
import time
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from zinf.core.memory.host.pool import POOL
from zinf.core.memory.nvme import NvmeStore
from zinf.core.process.malloc import anonymous_bytes
from zinf.core.program import ArrayId, Role

MIB = 2**20
POOL_BYTES = 64 * MIB
ARRAY_BYTES = 8 * MIB + 4 * 1000  # Not a multiple of the page size.
NUM_ARRAYS = 64
NUM_THREADS = 3
# Allowed growth of resident memory: the heaps of the interpreter vary.
SLACK_BYTES = 32 * MIB


class Soak:
    """The work of the threads, which ends after `nbytes` or `seconds`."""

    def __init__(self, store: NvmeStore, nbytes: int, seconds: float) -> None:
        self.store = store
        self.nbytes = nbytes
        self.ends_at = time.monotonic() + seconds
        self.counts = np.zeros(NUM_ARRAYS, np.int64)
        self.error: BaseException | None = None

    @property
    def moved_bytes(self) -> int:
        return self.store.read_bytes + self.store.written_bytes

    @property
    def is_over(self) -> bool:
        is_late = time.monotonic() > self.ends_at
        return self.moved_bytes >= self.nbytes or is_late or self.error is not None

    def run(self, number: int) -> None:
        try:
            while not self.is_over:
                for index in range(number, NUM_ARRAYS, NUM_THREADS):
                    self._turn(index)
                self._spill(number)
        except BaseException as error:
            self.error = error

    def _turn(self, index: int) -> None:
        """Read an array, check it against the last write, change it, write it back."""
        array = ArrayId(Role.VALUE, f"{index}")
        value = self.store.read(array).result()
        expected = self.counts[index] * NUM_ARRAYS + index
        if not (value == expected).all():
            raise AssertionError(f"{array} is not {expected} everywhere")
        value += NUM_ARRAYS
        self.counts[index] += 1
        self.store.write(array, value).result()

    def _spill(self, number: int) -> None:
        """Write, read and free a short-lived array, as a step does with activations."""
        array = ArrayId(
            Role.COTANGENT, f"{number}", microbatch=int(self.counts[number])
        )
        self.store.write(array, np.full(100_000, number, np.float32)).result()
        assert (self.store.read(array).result() == number).all()
        self.store.free(array)


def main() -> None:
    options = _parse()
    POOL.idle_limit_bytes = POOL_BYTES
    folder = Path(mkdtemp(prefix="zinf-soak-", dir=options.path))
    store = NvmeStore([folder], checksums="full")
    try:
        for index in range(NUM_ARRAYS):
            value = np.full(ARRAY_BYTES // 4, index, np.int32)
            store.write(ArrayId(Role.VALUE, f"{index}"), value).result()
        _soak(store, options)
    finally:
        store.close()
        shutil.rmtree(folder)


def _soak(store: NvmeStore, options: argparse.Namespace) -> None:
    soak = Soak(store, options.gigabytes * 10**9, options.seconds)
    threads = [threading.Thread(target=soak.run, args=(n,)) for n in range(NUM_THREADS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    states: list[tuple[int, int]] = []
    while not soak.is_over:
        time.sleep(0.05)
        if soak.moved_bytes >= (len(states) + 1) * soak.nbytes / 10:
            states.append(_report(soak, time.monotonic() - began))
    for thread in threads:
        thread.join()
    last = _report(soak, time.monotonic() - began)
    if soak.error is not None:
        raise soak.error
    first = states[0] if states else last
    grown_bytes, opened = last[0] - first[0], last[1] - first[1]
    print(
        f"anonymous memory grew by {grown_bytes / MIB:.1f} MiB, descriptors by {opened}"
    )
    if grown_bytes > SLACK_BYTES or opened > NUM_THREADS:
        raise SystemExit("It is not flat.")


def _report(soak: Soak, seconds: float) -> tuple[int, int]:
    anonymous, descriptors = anonymous_bytes(), len(os.listdir("/proc/self/fd"))
    print(
        f"{soak.moved_bytes / 1e9:7.1f} GB in {seconds:6.1f} s, "
        f"{soak.moved_bytes / seconds / 1e9:5.2f} GB/s, "
        f"{anonymous / MIB:7.1f} MiB anonymous, {descriptors} descriptors",
        flush=True,
    )
    return anonymous, descriptors


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a folder on the drive")
    parser.add_argument("--gigabytes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after")
    return parser.parse_args()


if __name__ == "__main__":
    main()
