"""Whether the state of a run can be used."""

from collections.abc import Generator
from contextlib import contextmanager

from zinf.core.optim.decision import MIXED
from zinf.core.step.run.run import StepRecord


class Condition:
    """The state is usable, unless an update failed half-way or the engine was closed.

    Replacing all state (`mend`) makes it usable again.
    """

    def __init__(self) -> None:
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why the state cannot be used, and what to do; None if it can be used."""
        return self._refusal

    def check(self) -> None:
        """Raise RuntimeError, with what to do, if the state cannot be used."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def end(self, why: str) -> None:
        self._refusal = why

    def mend(self) -> None:
        self._refusal = None

    @contextmanager
    def updating(self, what: str, record: StepRecord) -> Generator[None, None, None]:
        """Refuse the state if the `with` block fails with `record.is_mixed` set."""
        try:
            yield
        except BaseException:
            if record.is_mixed:
                self.end(f"{what} failed half-way. {MIXED}")
            raise
