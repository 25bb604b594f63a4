"""Decides whether a run goes on after an attempt has ended."""

from zinf.ray.record import Cause, Ended, Failure
from zinf.ray.settings import FailureConfig

# Errors that say that the program or its config is wrong: they would come again.
LASTING = (
    "ValueError",
    "TypeError",
    "LookupError",
    "AttributeError",
    "NameError",
    "AssertionError",
    "ArithmeticError",
    "ImportError",
    "NotImplementedError",
    "BudgetExceeded",
)


class WorkersLost(ConnectionError):
    """The workers of a run were lost, or failed, more often than it may restart."""


class Restarts:
    """Counts restarts; `after` raises the error that ends the run, if one does."""

    def __init__(self, config: FailureConfig) -> None:
        self.config = config
        self.num_failures = self.num_preemptions = 0
        self._failures: set[tuple[str, str]] = set()

    def after(self, ended: Ended) -> None:
        """Count the end of an attempt, and return if the run is to start again.

        Raises:
            WorkersLost: it has restarted as often as it may.
            KeyboardInterrupt: the run was interrupted.
            Exception: the error of the function, if it would come again.
        """
        match ended.cause:
            case Cause.INTERRUPTED:
                raise KeyboardInterrupt
            case Cause.PREEMPTED:
                self.num_preemptions += 1
                self._check(
                    "max_preemption_failures",
                    self.num_preemptions,
                    self.config.max_preemption_failures,
                    ended,
                )
            case Cause.LOST:
                self._count_failure(ended)
            case Cause.FAILED:
                assert ended.failure is not None
                if self._comes_again(ended.failure):
                    _raise(ended)
                self._count_failure(ended)

    def _comes_again(self, failure: Failure) -> bool:
        """Whether a restart would fail alike: by the error's kind, or repetition."""
        if not set(LASTING).isdisjoint(failure.bases):
            return True
        key = failure.said, failure.text
        has_come = key in self._failures
        self._failures.add(key)
        return has_come

    def _count_failure(self, ended: Ended) -> None:
        self.num_failures += 1
        limit = self.config.max_failures
        self._check("max_failures", self.num_failures, limit, ended)

    def _check(self, name: str, count: int, limit: int, ended: Ended) -> None:
        if limit < 0 or count <= limit:
            return
        if ended.failure is not None:
            _raise(ended)
        flag = "--" + name.replace("_", "-")
        raise WorkersLost(
            f"{ended.text}\nThe run has restarted {limit} times, as often as it may "
            f"({name}). Allow more with {flag}, or {flag} -1 for no limit. It goes on "
            "from the last checkpoint when it is started again with run.resume=true."
        )


def _raise(ended: Ended) -> None:
    """Raise the error of a worker as it was raised there, with a note that says where.

    What Ray raised, as for a function that cannot be unpickled there, becomes a
    RuntimeError with the same text.
    """
    failure = ended.failure
    assert failure is not None
    if failure.error is None:
        raise RuntimeError(f"{ended.text}\n{failure.trace}")
    where = ended.text.removesuffix(failure.text).rstrip(": ")
    failure.error.add_note(f"{where}, which last said {failure.said!r}.")
    failure.error.__cause__ = RemoteTraceback(failure.trace)
    raise failure.error


class RemoteTraceback(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
