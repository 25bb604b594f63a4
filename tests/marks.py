"""Which cases of a parametrized test the README's command leaves to `-m slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
