"""A step is played again as the executor would have run it."""

import pytest

from zinf.observe.replay import busy_seconds, replay
from zinf.observe.traced import Span


def span(number: int, link: str, start: float, end: float, *after: int) -> Span:
    return Span(number, link, "kind", f"#{number}", start, end, 0, after)


# Two reads of 2 s, each computed on for 3 s once it is there.
STEP = (
    span(0, "nvme read", 0, 2),
    span(1, "device", 2, 5, 0),
    span(2, "nvme read", 2, 4),
    span(3, "device", 5, 8, 2),
)


@pytest.mark.parametrize(
    ("speedups", "seconds"),
    [
        ({}, 8.0),
        # The first read takes 1 s, and nothing waits for the second one.
        ({"nvme read": 2.0}, 7.0),
        # The first computation ends at 3.5 s, before the second read.
        ({"device": 2.0}, 5.5),
        # A read that is slower than the computation before it holds that up.
        ({"nvme read": 0.5}, 11.0),
        ({"nvme read": 2.0, "device": 2.0}, 4.0),
        ({"absent": 9.0}, 8.0),
    ],
)
def test_a_faster_link_is_waited_for_less(speedups, seconds):
    assert replay(STEP, speedups) == seconds


def test_the_order_of_spans_is_that_of_the_plan_whatever_order_they_are_in():
    assert replay(STEP[::-1], {}) == 8.0


def test_busy_seconds_add_up_by_link():
    assert busy_seconds(STEP) == {"nvme read": 4.0, "device": 6.0}
