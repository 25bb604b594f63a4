"""A function with a temperature, which is traced once for each temperature."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def tempered(function: Callable, temperature: float) -> Callable:
    """`function(..., temperature=)`; at 1 the function itself.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(
            "temperature must be above 0, as logits are divided by it; found "
            f"{temperature}."
        )
    return function if temperature == 1 else _Tempered(function, temperature)


@dataclass(frozen=True)
class _Tempered:
    """A function at a temperature; equal to another of the same two."""

    function: Callable
    temperature: float

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments, temperature=self.temperature)
