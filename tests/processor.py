"""What tests take of the processor: the dearest files, when the sum is too large."""

import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

# What the README's command may take, in seconds of processor on two quiet cores.
MAX_SECONDS = 480
NUM_FILES = 20
PROPERTY = "processor seconds"
SINCE = pytest.StashKey[float]()

seconds_by_file: Counter[str] = Counter()


def processor_seconds() -> float:
    """Seconds of processor of this process, its threads and its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[SINCE] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.when == "teardown":
        seconds = processor_seconds() - item.stash[SINCE]
        report.user_properties.append((PROPERTY, seconds))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0]
        seconds_by_file[file] += dict(report.user_properties).get(PROPERTY, 0.0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # A worker of pytest-xdist counts too, and ends without a summary.
    total = sum(seconds_by_file.values())
    terminalreporter.section("processor")
    terminalreporter.line(f"{total:.0f} s in tests, {MAX_SECONDS} s wanted")
    if total > MAX_SECONDS:
        for file, seconds in seconds_by_file.most_common(NUM_FILES):
            terminalreporter.line(f"{seconds:7.1f} s  {file}")
