import pytest

from zinf.plan import show_bytes, show_seconds


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024 - 1, "10.0 KiB"),
        (100 * 1024 - 1, "100 KiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "0.98 MiB"),
        (3 * 2**30 // 2, "1.50 GiB"),
        (5 * 2**50, "5.00 PiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(nbytes: int, words: str) -> None:
    assert show_bytes(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0.0 ms"), (0.00004, "0.0 ms"), (0.0123, "12.3 ms"), (1.0, "1.00 s")],
)
def test_seconds_below_one_are_milliseconds(seconds: float, words: str) -> None:
    assert show_seconds(seconds) == words
