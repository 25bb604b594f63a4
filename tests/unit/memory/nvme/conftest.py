"""Drives on a small folder, whose calls to the kernel are noted and can be held."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from zinf.memory.aligned import address
from zinf.memory.nvme import Drive, Profile, System
from zinf.memory.nvme.open_file import Mover

SECONDS_TO_WAIT = 20
BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Transfer:
    name: str
    offset: int
    nbytes: int
    address: int
    is_direct: bool
    thread: str


@dataclass
class Kernel:
    """The calls of `system`: transfers are noted; one may move or report less.

    Args:
        most_bytes: what a transfer reports at most.
    """

    most_bytes: int | None = None
    transfers: list[Transfer] = field(default_factory=list)

    def system(self, **calls: Callable[..., Any]) -> System:
        noted = {"preadv": self._preadv, "pwritev": self._pwritev}
        return System(**(noted | calls))

    @property
    def direct(self) -> list[Transfer]:
        return [transfer for transfer in self.transfers if transfer.is_direct]

    def _preadv(self, *arguments: Any) -> int:
        return self._move(os.preadv, *arguments)

    def _pwritev(self, *arguments: Any) -> int:
        return self._move(os.pwritev, *arguments)

    def _move(
        self,
        function: Callable[..., int],
        descriptor: int,
        memory: list[np.ndarray],
        offset: int,
        *flags: int,
    ) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        self.transfers.append(
            Transfer(
                function.__name__,
                offset,
                memory[0].nbytes,
                address(memory[0]),
                is_direct,
                threading.current_thread().name,
            )
        )
        moved = function(descriptor, memory, offset, *flags)
        return moved if self.most_bytes is None else min(moved, self.most_bytes)


class Gate:
    """Calls that come while it is shut wait until it is opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_open = threading.Event()
        self._is_open.set()
        self.num_waiting = 0

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_open.is_set():
            self.num_waiting += 1
            assert self._is_open.wait(SECONDS_TO_WAIT)
        return self._function(*arguments)

    def shut(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


def eventually(is_so: Callable[[], Any]) -> None:
    """Wait for what other threads are about to do."""
    deadline = monotonic() + SECONDS_TO_WAIT
    while not is_so():
        assert monotonic() < deadline
        sleep(0.002)


def threads_of(folder: Path) -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [n for n in names if n.startswith("nvme") and n.endswith(f" {folder.name}")]


def open_files(folder: Path) -> list[str]:
    """What this process has open under `folder`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def make_drive(tmp_nvme: Path, kernel: Kernel) -> Iterator[Callable[..., Drive]]:
    """Makes drives on one folder, and closes them; neither threads nor files stay."""
    made: list[Drive] = []

    def make(
        *, num_threads: int = 3, system: System | None = None, **settings: Any
    ) -> Drive:
        profile = Profile(block_bytes=BLOCK_BYTES, num_threads=num_threads)
        system = system or kernel.system()
        made.append(Drive(tmp_nvme, profile=profile, system=system, **settings))
        return made[-1]

    yield make
    for drive in made:
        drive.close()
    eventually(lambda: not threads_of(tmp_nvme))
    assert open_files(tmp_nvme) == []


@pytest.fixture
def drive(make_drive: Callable[..., Drive]) -> Drive:
    return make_drive()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def mover(request: pytest.FixtureRequest, kernel: Kernel, tmp_nvme: Path) -> Mover:
    """A way to move bytes here, past the page cache and through it."""
    if request.param and not Drive(tmp_nvme).is_direct:
        pytest.skip("files here cannot be opened with O_DIRECT")
    return Mover(kernel.system(), BLOCK_BYTES, is_direct=request.param)
