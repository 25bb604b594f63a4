import pytest

from zinf.config import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        (1e9, 10**9),
        ("4096", 4096),
        ("120GiB", 120 * 1024**3),
        ("500 MB", 500 * 1000**2),
        ("64KiB", 64 * 1024),
        ("64kib", 64 * 1024),
        ("1.5 GiB", 3 * 1024**3 // 2),
        (" 2TB ", 2 * 1000**4),
        ("7 B", 7),
    ],
)
def test_sizes_are_read_as_bytes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("12 GX", ["unknown unit 'GX'", "Did you mean 'GB'?", "MiB"]),
        ("12 GiBs", ["Did you mean 'GiB'?"]),
        ("12G", ["unknown unit 'G'", "GiB"]),
        ("-5GiB", ["not a size"]),
        ("GiB", ["not a size"]),
        ("", ["not a size"]),
        ("1e9", ["not a size"]),
        ("0.3 B", ["not a whole number"]),
        ("١٢ GiB", ["not a size"]),
        (1.5, ["not a whole number"]),
        (float("inf"), ["not a whole number"]),
        (float("nan"), ["not a whole number"]),
        (True, ["not a size"]),
        ([1], ["not a size"]),
    ],
)
def test_what_is_no_size_is_refused_with_the_units(text, words):
    with pytest.raises(ValueError) as error:
        parse_size(text)
    for word in words:
        assert word in str(error.value)


def test_large_sizes_are_exact():
    assert parse_size("9007199254740993") == 2**53 + 1
