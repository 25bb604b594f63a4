"""What happens after steps: functions, each every so many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """A function that is called after steps.

    Attributes:
        function: `(metrics) -> None`. What it adds to the metrics of the step is
            written with them.
        every: steps between calls; None: there is none.
        at_end: whether it is called after the last step in any case.
    """

    function: Callable[[dict[str, Any]], None]
    every: int | None = 1
    at_end: bool = False

    def after(self, metrics: dict[str, Any], *, is_last: bool) -> None:
        if self.every is None:
            return
        if metrics["step"] % self.every == 0 or (is_last and self.at_end):
            self.function(metrics)
