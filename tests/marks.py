"""What tests need, and which cases the README's command leaves to `-m slow`."""

import shutil
from collections.abc import Collection, Iterable
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The path of the browser in which tests open pages, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The same cases; all but those in `fast` are marked slow.

    A fast case stays for each path through the code; the others show the same promise
    for more combinations. A case of several arguments is a tuple.
    """
    cases = list(cases)
    assert fast and all(case in cases for case in fast), "a fast case is none"
    return [case if case in fast else slow(case) for case in cases]


def slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
