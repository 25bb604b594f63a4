"""What tests need, and which cases the README's command leaves to `-m slow`."""

import os
import random
import shutil
import time
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


def seed() -> int:
    """The seed of random cases: ZINF_TEST_SEED, or drawn once and kept there.

    Workers of pytest-xdist and commands that tests start inherit it.
    """
    return int(os.environ.setdefault("ZINF_TEST_SEED", str(time.time_ns() % 10**6)))


def drawn(cases: Iterable[Any], count: int) -> list[Any]:
    """`count` of the cases at random, in their order; another seed gives others.

    For what is too wide to run whole: a failure names its case, and the seed is printed
    at the top.
    """
    cases = list(cases)
    chosen = random.Random(seed()).sample(range(len(cases)), count)
    return [cases[i] for i in sorted(chosen)]
