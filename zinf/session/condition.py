"""Whether the state of a run can be used."""

from collections.abc import Generator
from contextlib import contextmanager

from zinf.executor.run import StepRecord
from zinf.optim.decision import MIXED


class Condition:
    """Usable until something fails half-way, and again when all state was replaced."""

    def __init__(self) -> None:
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why the state cannot be used, and what to do; None if it can."""
        return self._refusal

    def check(self) -> None:
        """Raises RuntimeError, with what to do, unless the state can be used."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def end(self, why: str) -> None:
        self._refusal = why

    def mend(self) -> None:
        self._refusal = None

    @contextmanager
    def updating(self, what: str, record: StepRecord) -> Generator[None, None, None]:
        """Around what updates arrays and says in `record` if it did so half-way."""
        try:
            yield
        except BaseException:
            if record.is_mixed:
                self.end(f"{what} failed half-way. {MIXED}")
            raise
