"""A clock that stands still until a test moves it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


class Clock:
    """Called as `time.monotonic` is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def still(name: str, *modules: ModuleType) -> Iterator[Clock]:
    """Modules that imported the clock `name` have one that stands still instead."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, name, clock)
        yield clock
