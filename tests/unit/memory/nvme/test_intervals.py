from itertools import combinations_with_replacement

from hypothesis import given, settings
from hypothesis import strategies as st

from zinf.core.memory.nvme.intervals import Intervals

SIZE = 12
RANGES = list(combinations_with_replacement(range(SIZE + 1), 2))


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(RANGES))))
def test_it_covers_what_was_added_and_not_removed_since(changes):
    intervals, expected = Intervals(), set()
    for is_added, (start, stop) in changes:
        if is_added:
            intervals.add(start, stop)
            expected |= set(range(start, stop))
        else:
            intervals.remove(start, stop)
            expected -= set(range(start, stop))
    for start, stop in RANGES:
        is_covered = expected.issuperset(range(start, stop))
        assert intervals.covers(start, stop) == is_covered
