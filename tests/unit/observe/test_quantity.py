"""Bytes are shown in binary units with three figures."""

import pytest

from zinf.observe import bytes_text

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.4, "1023 B"),
        (1023.6, "1.00 KiB"),
        (KIB, "1.00 KiB"),
        (1.2 * GIB, "1.20 GiB"),
        (12.34 * MIB, "12.3 MiB"),
        (99.96 * MIB, "100 MiB"),
        (123 * MIB, "123 MiB"),
        (MIB - 1, "1.00 MiB"),
        (2.1 * TIB, "2.10 TiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_bytes_are_shown_as(nbytes, text):
    assert bytes_text(nbytes) == text
