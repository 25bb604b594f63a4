"""One worker thread per link runs the instructions of the link in order.

An instruction starts when all instructions in its `after` are complete. Workers live
for one step. After the first error every worker stops at its next instruction, and all
threads end. The caller gets the error, with a note that names the instruction.
"""

import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from zinf.core.plan import Instruction, Link, Timeline
from zinf.core.process.jax_modes import with_own_modes


class Progress:
    """Which instructions of a step are complete, and when each one ran.

    All workers share it; each worker writes only the times of its own instructions.
    """

    def __init__(self, num_instructions: int):
        self._done = bytearray(num_instructions)
        # By instruction: the held locks of the workers that wait for it. `complete`
        # releases them. notify_all of one condition would cost up to six extra thread
        # switches per instruction.
        self._waiting: dict[int, list[threading.Lock]] = {}
        self._changing = threading.RLock()
        self.error: BaseException | None = None
        self.interrupted = False
        self.starts = [0.0] * num_instructions
        self.ends = [0.0] * num_instructions
        self._began = perf_counter()

    @property
    def timeline(self) -> Timeline:
        """Measured start and end of each instruction; the step must be complete.

        The time from start to end does not include the wait for other instructions.
        """
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
        """Wait until all of `after` are complete; False if the step has failed."""
        # The instruction listed last probably completes last. Wait for it first: then
        # the others need no wait.
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
    """Execute all instructions of a plan; return when every worker has ended.

    The first Ctrl-C does not stop the workers, because a step that stops half-way has
    updated some parameters and not others. It sets `progress.interrupted`; the caller
    raises KeyboardInterrupt when the step is complete. A second Ctrl-C stops the step.

    Args:
        progress: made for this number of instructions; filled in while they run.

    Raises:
        the error of the first instruction that failed, with a note that names it.
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
            except BaseException as error:  # raised in the caller's thread
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
    """Note Ctrl-C in `progress`, unless the program has its own SIGINT handler.

    KeyboardInterrupt must not be raised here. If it leaves `Thread.join`, the running
    thread counts as ended from then on (Python 3.11); if it leaves `Thread.start`, the
    thread is lost.
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
