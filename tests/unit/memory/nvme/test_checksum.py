from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64

from zinf.core.memory.nvme.checksum import (
    NUM_WINDOWS,
    STRIPE_BYTES,
    WINDOW_BYTES,
    Checksum,
    Summer,
    next_summer,
)

# Whole stripes, parts of the last, and parts of its first window.
SIZES = [0, 1, STRIPE_BYTES, 2 * STRIPE_BYTES, 2 * STRIPE_BYTES + 100, 1_700_001]
CUTS = st.integers(0, 3 * NUM_WINDOWS).map(lambda n: n * WINDOW_BYTES)
CONTENT = np.random.default_rng(0).integers(0, 256, max(SIZES), np.uint8)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SIZES),
    st.sampled_from([None, 0, 1, 8, NUM_WINDOWS - 1]),
    st.lists(st.integers(0, max(SIZES)) | CUTS, max_size=8),
)
def test_it_is_xxh3_of_all_or_a_window_of_each_stripe_in_whatever_parts_it_comes(
    nbytes, window, cuts
):
    content = summed = CONTENT[:nbytes]
    if window is not None:
        starts = range(window * WINDOW_BYTES, nbytes, STRIPE_BYTES)
        parts = [content[start : start + WINDOW_BYTES] for start in starts]
        summed = np.concatenate([content[:0], *parts])
    summer = Summer(window)
    for low, high in pairwise([0, *sorted(c for c in cuts if c <= nbytes), nbytes]):
        summer.update(content[low:high])
    expected = Checksum(xxh3_64(summed.tobytes()).intdigest(), window)
    assert summer.checksum() == expected


LARGE = STRIPE_BYTES + 1


@pytest.mark.parametrize(
    ("coverage", "nbytes", "windows"),
    [
        # Windows take turns from write to write.
        ("sampled", LARGE, [n % NUM_WINDOWS for n in range(20)]),
        ("sampled", STRIPE_BYTES, [None] * 20),
        ("full", LARGE, [None] * 20),
        ("off", 1, ["off"] * 20),
    ],
)
def test_samples_are_of_chunks_larger_than_a_stripe(coverage, nbytes, windows):
    summers = [next_summer(coverage, nbytes, number) for number in range(20)]
    found = ["off" if x is None else x.checksum().window for x in summers]
    assert found == windows
