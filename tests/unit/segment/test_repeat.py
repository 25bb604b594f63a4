"""The layers of a program are found in its sequence of equations."""

import pytest

from zinf.segment.repeat import Repetition, find_repetition


def found(keys, *, params="W"):
    """The repetition of a string; capital letters in `params` read 10 bytes each."""
    return find_repetition(keys, [10 * (k in params) for k in keys])


@pytest.mark.parametrize("copies", [2, 4, 48])
def test_layers_are_found_between_what_comes_before_and_after(copies):
    repetition = found("xyW" + "abWc" * copies + "zW")
    assert (repetition.period, repetition.copies(0)) == (4, copies)
    assert repetition.start in (2, 3)  # "W" comes before "abWc" or in it: both repeat


def test_of_periods_that_cover_nearly_the_same_the_shortest_is_taken():
    repetition = found("abW" * 12)
    assert repetition == Repetition(0, 3, 33)


def test_a_run_with_more_parameters_wins_over_a_longer_one():
    repetition = found("pqpqpqpqpqpqpqpqpqpq" + "abWWcWW" * 2)
    assert repetition.period == 7


def test_nothing_is_found_where_nothing_repeats():
    assert found("abcdefW") is None
    assert found("") is None
    assert found("W") is None


def test_a_repetition_without_parameters_is_none():
    assert found("abcabcabcW") is None


def test_a_part_of_a_period_is_no_copy():
    repetition = Repetition(start=2, period=4, num_equal=9)
    assert repetition.stop == 15
    assert [repetition.copies(phase) for phase in range(4)] == [3, 3, 2, 2]
