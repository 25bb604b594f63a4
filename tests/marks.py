"""What tests need from the machine, and random cases of wide tables."""

import os
import random
import shutil
import time
from collections.abc import Iterable
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The path of the browser in which tests open pages, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def slow(case: Any) -> Any:
    """A case of `pytest.mark.parametrize` that only `-m slow` runs."""
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
