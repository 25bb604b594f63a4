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
WINDOWS = [None, *range(NUM_WINDOWS)]


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def checksum(content: np.ndarray, window: int | None, *cuts: int) -> Checksum:
    summer = Summer(window)
    for low, high in pairwise([0, *cuts, content.size]):
        summer.update(content[low:high])
    return summer.checksum()


def window_bytes(content: np.ndarray, window: int) -> np.ndarray:
    """What a sampled sum is of."""
    index = np.arange(content.size)
    return content[index % STRIPE_BYTES // WINDOW_BYTES == window]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_it_is_xxh3_of_everything_or_of_one_window_of_each_stripe(
    window: int | None, nbytes: int
) -> None:
    content = random_bytes(nbytes)
    summed = content if window is None else window_bytes(content, window)
    expected = Checksum(xxh3_64(summed.tobytes()).intdigest(), window)
    assert checksum(content, window) == expected


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_it_does_not_matter_in_which_parts_the_content_comes(
    window: int | None, nbytes: int
) -> None:
    content, random = random_bytes(nbytes), np.random.default_rng(0)
    whole = checksum(content, window)
    for num_cuts in (1, 2, 7, 40):
        cuts = sorted(random.integers(0, nbytes + 1, num_cuts).tolist())
        assert checksum(content, window, *cuts) == whole
    edges = [n for n in range(0, nbytes, WINDOW_BYTES) if n]
    assert checksum(content, window, *edges) == whole


def test_a_full_sum_finds_any_flipped_bit() -> None:
    content = random_bytes(300)
    before = checksum(content, None)
    for byte in range(content.size):
        for bit in range(8):
            content[byte] ^= 1 << bit
            assert checksum(content, None) != before
            content[byte] ^= 1 << bit


@pytest.mark.sampled(6)
@pytest.mark.parametrize("window", range(NUM_WINDOWS))
def test_a_sampled_sum_finds_any_flipped_bit_in_its_window(window: int) -> None:
    content = random_bytes(2 * STRIPE_BYTES + 3 * WINDOW_BYTES + 11)
    before = checksum(content, window)
    begins = range(0, content.size, WINDOW_BYTES)
    places = {byte for start in begins for byte in (start - 1, start, start + 77)}
    for byte in sorted(places & set(range(content.size))):
        content[byte] ^= 16
        is_found = checksum(content, window) != before
        assert is_found == (byte // WINDOW_BYTES % NUM_WINDOWS == window)
        content[byte] ^= 16


@pytest.mark.parametrize("window", range(NUM_WINDOWS))
def test_a_sampled_sum_finds_any_wrong_run_of_a_stripe(window: int) -> None:
    content = random_bytes(3 * STRIPE_BYTES)
    before = checksum(content, window)
    for start in range(0, 2 * STRIPE_BYTES + 1, WINDOW_BYTES // 4):
        wrong = content.copy()
        wrong[start : start + STRIPE_BYTES] ^= 1
        assert checksum(wrong, window) != before


def covers(summer: Summer | None, nbytes: int) -> int | str | None:
    """Which window is summed, found out from the outside."""
    if summer is None:
        return "off"
    summer.update(np.zeros(nbytes, np.uint8))
    return summer.checksum().window


def test_windows_take_turns_from_write_to_write() -> None:
    large = STRIPE_BYTES + 1
    windows = [covers(next_summer("sampled", large, n), large) for n in range(20)]
    assert windows == [n % NUM_WINDOWS for n in range(20)]


@pytest.mark.parametrize("nbytes", [0, 1, STRIPE_BYTES])
def test_small_chunks_are_summed_whole(nbytes: int) -> None:
    for number in range(NUM_WINDOWS):
        assert covers(next_summer("sampled", nbytes, number), nbytes) is None


@pytest.mark.parametrize("nbytes", [1, STRIPE_BYTES + 1])
def test_full_is_everything_and_off_is_nothing(nbytes: int) -> None:
    for number in range(NUM_WINDOWS):
        assert covers(next_summer("full", nbytes, number), nbytes) is None
        assert covers(next_summer("off", nbytes, number), nbytes) == "off"
