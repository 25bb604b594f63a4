from itertools import pairwise

import numpy as np
import pytest
from xxhash import xxh3_64

from zinf.memory.nvme.checksum import (
    NUM_WINDOWS,
    STRIPE_BYTES,
    WINDOW_BYTES,
    Checksum,
    Summer,
    next_summer,
)

# Whole stripes, parts of the last, and parts of its first window.
SIZES = [0, 1, STRIPE_BYTES, 2 * STRIPE_BYTES, 2 * STRIPE_BYTES + 100, 1_700_001]


def checksum(content: np.ndarray, window: int | None, *cuts: int) -> Checksum:
    summer = Summer(window)
    for low, high in pairwise([0, *cuts, content.size]):
        summer.update(content[low:high])
    return summer.checksum()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("window", [None, 0, 1, 8, NUM_WINDOWS - 1])
def test_it_is_xxh3_of_everything_or_of_one_window_of_each_stripe(window, nbytes):
    random = np.random.default_rng(nbytes)
    content = random.integers(0, 256, nbytes, np.uint8)
    summed = content
    if window is not None:
        index = np.arange(nbytes)
        summed = content[index % STRIPE_BYTES // WINDOW_BYTES == window]
    expected = Checksum(xxh3_64(summed.tobytes()).intdigest(), window)
    # In whatever parts the content comes.
    cuts = sorted(random.integers(0, nbytes + 1, 7).tolist())
    edges = [n for n in range(0, nbytes, WINDOW_BYTES) if n]
    for parts in ([], cuts, edges):
        assert checksum(content, window, *parts) == expected


LARGE = STRIPE_BYTES + 1


@pytest.mark.parametrize(
    ("coverage", "nbytes", "windows"),
    [
        # Windows take turns from write to write.
        ("sampled", LARGE, [n % NUM_WINDOWS for n in range(20)]),
        ("sampled", 0, [None] * 20),
        ("sampled", STRIPE_BYTES, [None] * 20),
        ("full", LARGE, [None] * 20),
        ("off", 1, ["off"] * 20),
    ],
)
def test_samples_are_of_chunks_larger_than_a_stripe(coverage, nbytes, windows):
    found = []
    for number in range(20):
        summer = next_summer(coverage, nbytes, number)
        found.append("off" if summer is None else summer.checksum().window)
    assert found == windows
