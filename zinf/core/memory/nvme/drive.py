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

from zinf.core.memory.nvme.open_file import Mover
from zinf.core.memory.nvme.profile import Profile, find_profile
from zinf.core.memory.nvme.request import Request, Task
from zinf.core.memory.nvme.system import O_DIRECT, System
from zinf.core.memory.storage_error import NVME_TIER, Advice, StorageError

# Long enough for retries of the kernel, which takes a request for lost after 30 s.
STALL_SECONDS = 120.0

Direction = Literal["read", "write", "rare"]

logger = logging.getLogger(__name__)


class Drive:
    """Moves bytes between memory and files under `folder`, on its own threads.

    Reads and writes have `profile.num_threads` threads each, so that neither waits for
    the other. Each thread has one system call in flight, of `profile.block_bytes` at
    most. All methods may be called from any thread.

    Args:
        folder: an existing folder. It must be writable unless there is a `probe`.
        profile: by default the one found in the folder or above it, else the defaults.
        stall_seconds: if a system call takes longer than this, all pending requests
            fail with ETIMEDOUT. New ones fail too until the kernel has answered.
        system: the system calls, for tests.
        probe: an existing file to test O_DIRECT with, for folders in which nothing may
            be written, not even a temporary file.
        advice: what errors say is to be done about them.

    Raises:
        StorageError: the folder cannot be written, or the probe cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        profile: Profile | None = None,
        stall_seconds: float = STALL_SECONDS,
        system: System | None = None,
        probe: Path | None = None,
        advice: Advice = NVME_TIER,
    ) -> None:
        self.folder = folder.absolute()
        self.profile = profile or find_profile(self.folder) or Profile()
        self.stall_seconds = stall_seconds
        self.system = system or System()
        self.advice = advice
        if probe is None:
            self.is_direct = self._takes_direct_requests()
        else:
            what = "Cannot read the folder"
            self.is_direct = self._opens_direct(what, probe, os.O_RDONLY)
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
        """Have threads run `tasks` as parts of `request`; failures go to its future."""
        with self._lock:
            if self._is_closed.is_set():
                raise ValueError(
                    f"The Drive of {self.folder} is closed. Open a new one."
                )
            if direction not in self._queues:
                self._start(direction)
            stalled_seconds = self._stalled_seconds()
            if not stalled_seconds:
                self._pending[id(request)] = request
        if stalled_seconds:
            request.abandon(self._stall(request, stalled_seconds))
            return
        # The callback has only the number: a future that refers to itself through a
        # callback would keep the caller's memory until the garbage collector runs.
        number = id(request)
        request.future.add_done_callback(lambda _: self._pending.pop(number))
        for task in tasks:
            self._queues[direction].put((request, task))

    def mover(self, *, only_cached: bool = False) -> Mover:
        """A mover for the calling thread, for rare operations and cached reads."""
        return Mover(
            self.system,
            self.profile.block_bytes,
            is_direct=self.is_direct,
            only_cached=only_cached,
            advice=self.advice,
        )

    def run(self, what: str, task: Task) -> None:
        """Have a thread run `task`, and wait for it; errors begin with `what`.

        For operations that wait for the drive: `run` raises if the drive stalls.
        """
        request = Request(what, 1, lambda: None)
        # Not on the threads of writes: their callbacks may call this.
        self.submit("rare", request, [task])
        request.future.result()

    def flush(self) -> None:
        """Wait for all requests submitted before; raises nothing."""
        wait([request.future for request in self._pending.copy().values()])

    def close(self) -> None:
        """Finish pending requests, and end the threads. Failures go to the futures."""
        self.flush()
        with self._lock:
            self._is_closed.set()
        for direction, queue in self._queues.items():
            for _ in range(self._num_threads(direction)):
                queue.put(None)
        # Stalled threads would not end. As daemons they do not keep the process alive.
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
        """Longest time that a system call has taken so far; 0 if within the limit."""
        now = monotonic()
        since = [mover.busy_since for mover in self._movers]
        waited = max((now - begin for begin in since if begin is not None), default=0)
        return waited if waited > self.stall_seconds else 0

    def _stall(self, request: Request, seconds: float) -> StorageError:
        limit = "memory.stall_seconds" if self.advice is NVME_TIER else "the limit"
        found = (
            f"the drive has not answered for {seconds:.1f} seconds "
            f"({limit} is {self.stall_seconds:g})"
        )
        return self.advice.error(request.what, errno.ETIMEDOUT, self.folder, found)

    def _takes_direct_requests(self) -> bool:
        """Whether files there can be opened with O_DIRECT: not all file systems can.

        Raises:
            StorageError: no file can be written there at all.
        """
        what = "Cannot write to the folder"
        try:
            descriptor, name = mkstemp(prefix=".zinf-", dir=self.folder)
        except OSError as error:
            raise self.advice.from_os_error(what, self.folder, error) from error
        try:
            return self._opens_direct(what, Path(name), os.O_RDWR)
        finally:
            os.close(descriptor)
            os.unlink(name)

    def _opens_direct(self, what: str, file: Path, flags: int) -> bool:
        try:
            self.system.close(self.system.open(file, flags | O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL or not O_DIRECT:
                raise self.advice.from_os_error(what, file.parent, error) from error
            # What is only read, once, may well be in memory: a file system of its own.
            level = logging.INFO if flags == os.O_RDONLY else logging.WARNING
            text = (
                "The file system of %s does not take O_DIRECT: files there are read "
                "and written through the page cache, which is slower."
            )
            logger.log(level, text, file.parent)
            return False
        return O_DIRECT != 0


def _work(queue: SimpleQueue, mover: Mover) -> None:
    """The function of a thread: runs tasks from the queue until it gets None."""
    while (item := queue.get()) is not None:
        request, task = item
        request.run(task, mover)
        # Request and task would keep the caller's memory while the thread waits.
        del item, request, task
