"""The learning rate of an optax transform, for the metrics of a step.

optax keeps it in a closure of `optax.scale_by_learning_rate`, by which its optimizers
end. It is read there; a transform that has none, or several, has no rate to report.
"""

from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import optax

SCHEDULED = "scale_by_learning_rate.<locals>.<lambda>"
SCALED = "scale.<locals>.update_fn"


def rate_of(tx: optax.GradientTransformation) -> Callable[[Any], Any] | None:
    """The learning rate by the number of updates done; None if it is not known."""
    schedules, factors = [], []
    for function, cells in functions_of(tx):
        if function.__qualname__ == SCHEDULED:
            schedules.append(cells["learning_rate"])
        elif function.__qualname__ == SCALED and isinstance(cells["step_size"], float):
            factors.append(cells["step_size"])
    if len(schedules) == 1 and not any(factor < 0 for factor in factors):
        return schedules[0]
    falling = [-factor for factor in factors if factor < 0]
    if not schedules and len(falling) == 1:
        return optax.constant_schedule(falling[0])
    return None


def functions_of(tx: Any) -> Iterator[tuple[FunctionType, dict[str, Any]]]:
    """The functions that a transform consists of, each with what it closes over."""
    waiting, seen = deque(tx), set()
    while waiting:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tuple | list):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, FunctionType):
            cells = _closure(value)
            yield value, cells
            waiting.extend(cells.values())


def _closure(function: FunctionType) -> dict[str, Any]:
    found = {}
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # A name that is not set yet.
            continue
    return found
