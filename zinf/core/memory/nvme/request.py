"""One read or write as its caller sees it: several tasks, one future."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from traceback import clear_frames
from typing import Any

from zinf.core.memory.nvme.open_file import Mover, always

Task = Callable[[Mover], object]
"""A part of a request, run by one thread."""


class Request:
    """Runs tasks on whichever threads take them, and settles `future` after the last.

    Args:
        what: what errors begin with, such as "Cannot read param/w".
        num_tasks: how many times `run` will be called.
        finish: called after the last task if none failed; returns the result.

    If a task fails, those not begun are skipped. The future gets the first error only
    when no task runs any more, since running tasks use the caller's memory.
    """

    def __init__(self, what: str, num_tasks: int, finish: Callable[[], Any]) -> None:
        self.what = what
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # Drives cannot cancel a request.
        self._finish: Callable[[], Any] | None = finish
        self._num_left = num_tasks
        self._error: BaseException | None = None
        self._is_settled = False
        self._lock = Lock()
        if not num_tasks:
            self._settle()

    def run(self, task: Task, mover: Mover) -> None:
        if self._error is None:
            error = self._attempt(task, mover)
            del task  # The error refers to this frame.
            if error is not None:
                _forget_locals(error)
                self._keep(error)
        self._count_down()

    def _attempt(self, task: Task, mover: Mover) -> BaseException | None:
        mover.what = self.what
        mover.is_wanted = lambda: not self._is_settled
        try:
            task(mover)
        except BaseException as error:  # handed to who waits for the future
            return error
        finally:
            # The mover lives on and must not refer to this request, which would keep
            # the caller's memory.
            mover.is_wanted = always
        return None

    def abandon(self, error: BaseException) -> None:
        """Fail now, even if tasks still run: for drives that do not answer."""
        self._keep(error)
        self._settle()

    def _keep(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    def _count_down(self) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._settle()

    def _settle(self) -> None:
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
        # Not under the lock: callbacks run below, and may submit more requests.
        error, result = self._error, None
        finish, self._finish = self._finish, None
        if error is None:
            assert finish is not None
            try:
                result = finish()
            except BaseException as failure:  # handed to who waits for the future
                error = failure
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def _forget_locals(error: BaseException | None) -> None:
    """Clear the locals of the functions that an error came through.

    They refer to the request and the caller's memory, which the error would keep alive.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__
