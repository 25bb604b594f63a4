"""One worker a link: runs a list of instructions, each after those that it waits for.

Workers live for one step. The first error on any of them stops all at their next
instruction, is raised to the caller with the name of the instruction, and leaves no
thread behind.
"""

import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from zinf.jax_modes import with_own_modes
from zinf.plan import Instruction, Link, Timeline


class Progress:
    """Which instructions of a step are complete, and since when.

    Shared by the workers; each writes only the times of its own instructions.
    """

    def __init__(self, num_instructions: int):
        self._done = bytearray(num_instructions)
        # Held locks of workers, by what they wait for, to be released when it is done.
        # To wake all each time would cost the others a switch of threads, or six.
        self._waiting: dict[int, list[threading.Lock]] = {}
        self._changing = threading.RLock()
        self.error: BaseException | None = None
        self.interrupted = False
        self.starts = [0.0] * num_instructions
        self.ends = [0.0] * num_instructions
        self._began = perf_counter()

    @property
    def timeline(self) -> Timeline:
        """What was measured, without the waits: of a step that is complete."""
        began = self._began
        return Timeline(
            tuple(start - began for start in self.starts),
            tuple(end - began for end in self.ends),
        )

    def has_begun(self, index: int) -> bool:
        return self.starts[index] > 0

    def is_complete(self, index: int) -> bool:
        return bool(self._done[index])

    def wait_for(self, after: Sequence[int]) -> bool:
        """Waits until `after` are complete; false if the step has failed."""
        # What begins last is most likely to be done last: the others are done then.
        for index in sorted(after, reverse=True):
            if not self._done[index]:
                self._wait_for(index)
        return self.error is None

    def _wait_for(self, index: int) -> None:
        with self._changing:
            if self._done[index] or self.error is not None:
                return
            wake = threading.Lock()
            wake.acquire()
            self._waiting.setdefault(index, []).append(wake)
        wake.acquire()

    def complete(self, index: int) -> None:
        with self._changing:
            self._done[index] = 1
            waiting = self._waiting.pop(index, ())
        for wake in waiting:
            wake.release()

    def fail(self, error: BaseException) -> None:
        with self._changing:
            if self.error is None:
                self.error = error
            waiting = [wake for some in self._waiting.values() for wake in some]
            self._waiting.clear()
        for wake in waiting:
            wake.release()


def run_links(
    instructions: Sequence[Instruction],
    execute: Callable[[Instruction], None],
    progress: Progress,
) -> None:
    """Executes a plan; returns when every worker has ended.

    Args:
        progress: of so many instructions; filled in as they go.

    An interrupt (Ctrl-C) while the workers run does not stop them, since a step that
    stops half-way has updated some parameters and not others: it is noted, and the
    caller raises it once the step is complete. A second one stops the step.

    Raises:
        whatever the first failing instruction raised, with a note that names it.
    """
    queues: dict[Link, list[int]] = {}
    for index, instruction in enumerate(instructions):
        queues.setdefault(instruction.link, []).append(index)

    def work(link: Link) -> None:
        for index in queues[link]:
            instruction = instructions[index]
            if not progress.wait_for(instruction.after):
                return
            progress.starts[index] = perf_counter()
            try:
                execute(instruction)
            except BaseException as error:  # handed to the caller's thread
                error.add_note(
                    f"in instruction #{index} on the link {link}: "
                    f"{instruction.operation}"
                )
                progress.fail(error)
                return
            progress.ends[index] = perf_counter()
            progress.complete(index)

    workers = [
        threading.Thread(target=with_own_modes(work), args=(link,), name=f"zinf {link}")
        for link in queues
    ]
    with _interrupts_noted(progress):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if progress.error is not None:
        raise progress.error


@contextmanager
def _interrupts_noted(progress: Progress) -> Generator[None, None, None]:
    """Handles Ctrl-C, unless this program handles it in a way of its own.

    It is not caught as an exception: a `Thread.join` that it leaves takes its thread
    for ended from then on (Python 3.11), and one that is just being started is lost.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if progress.interrupted:
            progress.fail(KeyboardInterrupt())
        progress.interrupted = True

    is_main = threading.current_thread() is threading.main_thread()
    usual = signal.default_int_handler
    if not is_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
