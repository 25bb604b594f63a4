"""One worker thread per link runs the instructions of the link in order.

An instruction starts when all instructions in its `after` are complete; the device link
may run ahead of that ([Note: ahead]). Workers live for one step. After the first error
every worker stops at its next instruction, and all threads end. The caller gets the
error, with a note that names the instruction.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from types import FrameType

from zinf.core.plan import Instruction, Link, Timeline
from zinf.core.process.jax_modes import with_own_modes
from zinf.core.step.run.ahead import Ahead

# Returns when the programs that an instruction gave to the devices are complete.
Wait = Callable[[], object]
Execute = Callable[[Instruction], Wait | None]


class _Marks:
    """Marks of instructions, which other threads wait for."""

    def __init__(self, num_instructions: int):
        self.marked = bytearray(num_instructions)
        # By instruction: the held locks of the workers that wait for it, which are
        # released when it is marked. notify_all of one condition would cost up to six
        # extra thread switches per instruction.
        self.waiting: dict[int, list[threading.Lock]] = {}


class Progress:
    """Which instructions of a step are complete, and when each one ran.

    All workers share it; each worker writes only the times of its own instructions.
    """

    def __init__(self, num_instructions: int):
        self._complete = _Marks(num_instructions)
        # Transfers to devices: begun. Others: in the queue of the devices. Or complete.
        self._given = _Marks(num_instructions)
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

    def is_given(self, index: int) -> bool:
        return bool(self._given.marked[index])

    def is_complete(self, index: int) -> bool:
        return bool(self._complete.marked[index])

    def wait_for(self, complete: Sequence[int], given: Sequence[int] = ()) -> bool:
        """Wait for instructions to be complete, and for others to be given to devices.

        Returns False if the step has failed.
        """
        # The instruction listed last probably completes last. Wait for it first: then
        # the others need no wait.
        for marks, after in (self._complete, complete), (self._given, given):
            for index in sorted(after, reverse=True):
                if not marks.marked[index]:
                    self._wait_for(index, marks)
        return self.error is None

    def _wait_for(self, index: int, marks: _Marks) -> None:
        with self._changing:
            if marks.marked[index] or self.error is not None:
                return
            wake = threading.Lock()
            wake.acquire()
            marks.waiting.setdefault(index, []).append(wake)
        wake.acquire()

    def wait_for_either(self, *, complete: int, given: int) -> bool:
        """Wait for one instruction to be complete, or for another to be given.

        Returns False if the step has failed.
        """
        pairs = ((self._complete, complete), (self._given, given))
        wake = threading.Lock()
        wake.acquire()
        with self._changing:
            if self.error is not None or any(m.marked[i] for m, i in pairs):
                return self.error is None
            for marks, index in pairs:
                marks.waiting.setdefault(index, []).append(wake)
        wake.acquire()
        return self.error is None

    def complete(self, index: int) -> None:
        self._mark(index, self._given, self._complete)

    def give(self, index: int) -> None:
        """Note that an instruction begins, or its programs are in a device's queue."""
        self._mark(index, self._given)

    def _mark(self, index: int, *kinds: _Marks) -> None:
        waiting: list[threading.Lock] = []
        with self._changing:
            for marks in kinds:
                marks.marked[index] = 1
                waiting += marks.waiting.pop(index, ())
        _release(waiting)

    def fail(self, error: BaseException) -> None:
        waiting: list[threading.Lock] = []
        with self._changing:
            if self.error is None:
                self.error = error
            for marks in (self._given, self._complete):
                for some in marks.waiting.values():
                    waiting += some
                marks.waiting.clear()
        _release(waiting)


class InFlight:
    """Instructions whose programs the devices have and have not completed, in order.

    A thread waits for each, completes it, and notes its times and its error.
    """

    def __init__(
        self, instructions: Sequence[Instruction], progress: Progress, ahead: Ahead
    ):
        self._instructions, self._progress = instructions, progress
        self._ahead = ahead
        self._indices: deque[int] = deque()
        self._given: SimpleQueue[tuple[int, Wait | None] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=with_own_modes(self._complete_all),
            name=f"zinf {Link.DEVICE}, complete",
        )
        self._thread.start()

    def __len__(self) -> int:
        """The number of those that are not complete, or were not at the last add."""
        return len(self._indices)

    def make_room(self, index: int) -> bool:
        """Wait until the devices may have an instruction; False: the step failed."""
        progress, ahead = self._progress, self._ahead
        while self._indices:
            if progress.is_complete(self._indices[0]):
                self._indices.popleft()
                continue
            first, fetch = self._indices[0], ahead.next_fetch(index)
            is_full = len(self._indices) >= ahead.limit
            if is_full or ahead.overwrites(index, self._indices):
                goes_on = progress.wait_for((first,))
            elif fetch < 0 or progress.is_given(fetch):
                break
            else:
                goes_on = progress.wait_for_either(complete=first, given=fetch)
            if not goes_on:
                return False
        return True

    def add(self, index: int, wait: Wait | None) -> None:
        """Note that the devices have the programs of an instruction.

        Args:
            wait: returns when they are complete.
        """
        self._indices.append(index)
        self._given.put((index, wait))
        self._progress.give(index)

    def fail(self, index: int, error: BaseException) -> None:
        """Note that an instruction failed, after those before it are complete.

        One of those may have failed first. Frees after the instruction do not run.
        """
        self._given.put((index, partial(_raise, error)))

    def close(self) -> None:
        """Return when nothing is in flight."""
        self._given.put(None)
        self._thread.join()

    def _complete_all(self) -> None:
        progress, last_end = self._progress, 0.0
        while (given := self._given.get()) is not None:
            index, wait = given
            del given
            try:
                if wait is not None:
                    wait()
            except BaseException as error:  # raised in the caller's thread
                _fail(progress, error, index, self._instructions[index])
                continue
            # What it waits for has memory, which others may use once it is complete.
            del wait
            # The time in the queue is not the instruction's.
            progress.starts[index] = max(progress.starts[index], last_end)
            progress.ends[index] = last_end = perf_counter()
            progress.complete(index)


def run_links(
    instructions: Sequence[Instruction],
    execute: Execute,
    progress: Progress,
    *,
    programs_at_once: int = 1,
) -> None:
    """Execute all instructions of a plan; return when every worker has ended.

    The first Ctrl-C does not stop the workers, because a step that stops half-way has
    updated some parameters and not others. It sets `progress.interrupted`; the caller
    raises KeyboardInterrupt when the step is complete. A second Ctrl-C stops the step.

    Args:
        progress: made for this number of instructions; filled in while they run.
        programs_at_once: instructions of the device link that are begun and not
            complete at most.

    Raises:
        the error of the first instruction that failed, with a note that names it.
    """
    queues: dict[Link, list[int]] = {}
    for index, instruction in enumerate(instructions):
        queues.setdefault(instruction.link, []).append(index)
    ahead = Ahead(instructions, programs_at_once)

    def work(link: Link) -> None:
        for index in queues[link]:
            if not progress.wait_for(*ahead.waits(index)):
                return
            progress.starts[index] = perf_counter()
            if link == Link.H2D:
                progress.give(index)
            try:
                wait = execute(instructions[index])
                if wait is not None:
                    wait()
            except BaseException as error:  # raised in the caller's thread
                _fail(progress, error, index, instructions[index])
                return
            progress.ends[index] = perf_counter()
            progress.complete(index)

    def work_ahead(link: Link) -> None:
        with closing(InFlight(instructions, progress, ahead)) as in_flight:
            for index in queues[link]:
                if not progress.wait_for(*ahead.waits(index)):
                    return
                if not in_flight.make_room(index):
                    return
                progress.starts[index] = perf_counter()
                try:
                    wait = execute(instructions[index])
                except BaseException as error:  # raised in the caller's thread
                    in_flight.fail(index, error)
                    return
                in_flight.add(index, wait)

    workers = []
    for link in queues:
        runs_ahead = ahead.limit > 1 and link == Link.DEVICE
        target = with_own_modes(work_ahead if runs_ahead else work)
        workers.append(
            threading.Thread(target=target, args=(link,), name=f"zinf {link}")
        )
    with _interrupts_noted(progress):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if progress.error is not None:
        raise progress.error


def _release(waiting: Iterable[threading.Lock]) -> None:
    for wake in waiting:
        # Who waits for one of two may be awake already.
        with suppress(RuntimeError):
            wake.release()


def _raise(error: BaseException) -> None:
    raise error


def _fail(
    progress: Progress, error: BaseException, index: int, instruction: Instruction
) -> None:
    error.add_note(
        f"in instruction #{index} on the link {instruction.link}: "
        f"{instruction.operation}"
    )
    progress.fail(error)


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
