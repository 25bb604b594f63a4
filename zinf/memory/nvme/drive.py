"""The threads that read and write the files of one folder."""

import errno
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp
from time import monotonic
from typing import Literal, Self

from zinf.memory.nvme.open_file import Mover
from zinf.memory.nvme.profile import Profile, find_profile
from zinf.memory.nvme.request import Request, Task
from zinf.memory.nvme.system import O_DIRECT, System
from zinf.memory.storage_error import StorageError, from_os_error, storage_error

# Beyond the retries of the kernel, which takes a request for lost after 30 seconds.
STALL_SECONDS = 120.0

Direction = Literal["read", "write", "rare"]

logger = logging.getLogger(__name__)


class Drive:
    """Moves bytes between memory and files under `folder`, on threads of its own.

    Reads and writes have `profile.num_threads` threads each, so that neither waits for
    the other; a thread has one block of the profile's size in memory. All methods may
    be called from any thread.

    Args:
        folder: exists, and is writable unless there is a `probe`.
        profile: by default the one found beside the files, or general ones.
        stall_seconds: after a request to the kernel has taken this long, everything
            that is pending fails with ETIMEDOUT, and so does what is asked until the
            kernel has answered.
        system: the system calls, for tests.
        probe: a file to ask how files in the folder can be opened, where nothing is to
            be written, not even for a moment.

    Raises:
        StorageError: the folder cannot be written, or the probe read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        profile: Profile | None = None,
        stall_seconds: float = STALL_SECONDS,
        system: System | None = None,
        probe: Path | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.profile = profile or find_profile(self.folder) or Profile()
        self.stall_seconds = stall_seconds
        self.system = system or System()
        if probe is None:
            self.is_direct = _takes_direct_requests(self.folder, self.system)
        else:
            what = "Cannot read the folder"
            self.is_direct = _opens_direct(what, probe, os.O_RDONLY, self.system)
        self._queues: dict[Direction, SimpleQueue] = {}
        self._threads: list[threading.Thread] = []
        self._movers: list[Mover] = []
        self._pending: dict[int, Request] = {}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(
        self, direction: Direction, request: Request, tasks: Sequence[Task]
    ) -> None:
        """Have threads run `tasks` as parts of `request`; fails by its future."""
        with self._lock:
            if self._is_closed.is_set():
                raise ValueError(f"The drive of {self.folder} is closed: open another.")
            if direction not in self._queues:
                self._start(direction)
            stalled_seconds = self._stalled_seconds()
            if not stalled_seconds:
                self._pending[id(request)] = request
        if stalled_seconds:
            request.abandon(self._stall(request, stalled_seconds))
            return
        # By its number: a future that refers to itself, even by a callback, would keep
        # the caller's memory until the garbage collector comes by.
        number = id(request)
        request.future.add_done_callback(lambda _: self._pending.pop(number))
        for task in tasks:
            self._queues[direction].put((request, task))

    def mover(self, *, only_cached: bool = False) -> Mover:
        """A way to move bytes in the calling thread, for what is rare or cached."""
        return Mover(
            self.system,
            self.profile.block_bytes,
            is_direct=self.is_direct,
            only_cached=only_cached,
        )

    def run(self, what: str, task: Task) -> None:
        """Have a thread run `task`, and wait for it; `what` is done, for errors.

        For what has to wait for the drive: it raises when that stalls.
        """
        request = Request(what, 1, lambda: None)
        # Not among the writes: this may be called from their callbacks.
        self.submit("rare", request, [task])
        request.future.result()

    def flush(self) -> None:
        """Wait for everything that was asked of this drive before; raises nothing."""
        wait([request.future for request in self._pending.copy().values()])

    def close(self) -> None:
        """Finish what is pending, and end the threads. What fails, fails in futures."""
        self.flush()
        with self._lock:
            self._is_closed.set()
        for direction, queue in self._queues.items():
            for _ in range(self._num_threads(direction)):
                queue.put(None)
        # Stalled threads would not come, and do not keep the process alive.
        if not self.is_stalled:
            for thread in self._threads:
                thread.join()

    def _start(self, direction: Direction) -> None:
        queue: SimpleQueue = SimpleQueue()
        for number in range(self._num_threads(direction)):
            mover = self.mover()
            self._movers.append(mover)
            self._run(f"{direction} {number}", _work, queue, mover)
        if not self._queues:
            self._run("stall watch", self._watch)
        self._queues[direction] = queue

    def _num_threads(self, direction: Direction) -> int:
        return 1 if direction == "rare" else self.profile.num_threads

    def _run(self, name: str, function: object, *arguments: object) -> None:
        thread = threading.Thread(
            target=function,  # pyrefly: ignore
            args=arguments,
            name=f"nvme {name} {self.folder.name}",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)

    def _watch(self) -> None:
        while not self._is_closed.wait(min(1.0, self.stall_seconds / 4)):
            stalled_seconds = self._stalled_seconds()
            if stalled_seconds:
                for request in self._pending.copy().values():
                    request.abandon(self._stall(request, stalled_seconds))

    @property
    def is_stalled(self) -> bool:
        return self._stalled_seconds() > 0

    def _stalled_seconds(self) -> float:
        """For how long the kernel has not answered a thread, if that is too long."""
        now = monotonic()
        since = [mover.busy_since for mover in self._movers]
        waited = max((now - begin for begin in since if begin is not None), default=0)
        return waited if waited > self.stall_seconds else 0

    def _stall(self, request: Request, seconds: float) -> StorageError:
        found = (
            f"the drive has not answered for {seconds:.1f} seconds "
            f"(memory.stall_seconds is {self.stall_seconds:g})"
        )
        return storage_error(request.what, errno.ETIMEDOUT, self.folder, found)


def _work(queue: SimpleQueue, mover: Mover) -> None:
    """A thread: runs what is in the queue until that is None."""
    while (item := queue.get()) is not None:
        request, task = item
        request.run(task, mover)
        # Both keep the caller's memory.
        del item, request, task


def _takes_direct_requests(folder: Path, system: System) -> bool:
    """Whether files in `folder` can be opened with O_DIRECT, which not all systems do.

    Raises:
        StorageError: no file can be written there at all.
    """
    try:
        descriptor, name = mkstemp(prefix=".zinf-", dir=folder)
    except OSError as error:
        raise from_os_error("Cannot write to the folder", folder, error) from error
    try:
        what = "Cannot write to the folder"
        return _opens_direct(what, Path(name), os.O_RDWR, system)
    finally:
        os.close(descriptor)
        os.unlink(name)


def _opens_direct(what: str, file: Path, flags: int, system: System) -> bool:
    try:
        system.close(system.open(file, flags | O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL or not O_DIRECT:
            raise from_os_error(what, file.parent, error) from error
        logger.warning(
            "The file system of %s does not take O_DIRECT: files there are read and "
            "written through the page cache, which is slower.",
            file.parent,
        )
        return False
    return O_DIRECT != 0
