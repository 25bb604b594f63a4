"""One worker a link: runs a list of instructions, each after those that it waits for.

Workers live for one step. The first error on any of them stops all at their next
instruction, is raised to the caller with the name of the instruction, and leaves no
thread behind.
"""

import threading
from collections.abc import Callable, Sequence
from time import perf_counter

from zinf.plan.instruction import Instruction, Link


class Progress:
    """Which instructions of a step are complete, shared by the workers."""

    def __init__(self, num_instructions: int):
        self._done = bytearray(num_instructions)
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.interrupted = False
        self.busy_seconds: dict[Link, float] = dict.fromkeys(Link, 0.0)

    def wait_for(self, after: Sequence[int]) -> bool:
        """Waits until `after` are complete; false if the step has failed."""
        done = self._done
        if all(done[i] for i in after) and self.error is None:
            return True
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or all(done[i] for i in after)
            )
        return self.error is None

    def complete(self, index: int) -> None:
        with self._changed:
            self._done[index] = 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()


def run_links(
    instructions: Sequence[Instruction], execute: Callable[[Instruction], None]
) -> Progress:
    """Executes a plan; returns when every worker has ended.

    An interrupt (Ctrl-C) while the workers run does not stop them, since a step that
    stops half-way has updated some parameters and not others: it is noted, and the
    caller raises it once the step is complete. A second one stops the step.

    Raises:
        whatever the first failing instruction raised, with a note that names it.
    """
    progress = Progress(len(instructions))
    queues: dict[Link, list[int]] = {}
    for index, instruction in enumerate(instructions):
        queues.setdefault(instruction.link, []).append(index)

    def work(link: Link) -> None:
        for index in queues[link]:
            instruction = instructions[index]
            if not progress.wait_for(instruction.after):
                return
            start = perf_counter()
            try:
                execute(instruction)
            except BaseException as error:  # handed to the caller's thread
                error.add_note(
                    f"in instruction #{index} on the link {link}: "
                    f"{instruction.operation}"
                )
                progress.fail(error)
                return
            progress.busy_seconds[link] += perf_counter() - start
            progress.complete(index)

    workers = [
        threading.Thread(target=work, args=(link,), name=f"zinf {link}")
        for link in queues
    ]
    for worker in workers:
        worker.start()
    _join(workers, progress)
    if progress.error is not None:
        raise progress.error
    return progress


def _join(workers: Sequence[threading.Thread], progress: Progress) -> None:
    pending = list(workers)
    while pending:
        try:
            pending[0].join()
            pending.pop(0)
        except KeyboardInterrupt as interrupt:
            if progress.interrupted:
                progress.fail(interrupt)
            progress.interrupted = True
