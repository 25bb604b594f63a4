"""Errors quote what came from outside, and a terminal must not obey it."""

import errno
import io
import sys

import pytest

from zinf.core.text.complaint import complain, shown

CASES = {
    "plain, with a path /a/b\n\tand a second line": None,
    "Grüße, 你好, 🎉": None,
    "\x1b]0;title\x07\x1b[2J": r"\x1b]0;title\x07\x1b[2J",
    "over\rwritten \x08\x7f\x9b31m": r"over\rwritten \x08\x7f\x9b31m",
    "turned \u202eround": r"turned \u202eround",
    "half \ud800": r"half \ud800",
}


@pytest.mark.parametrize("text", CASES)
def test_control_characters_are_shown_as_escapes(text, capsys):
    expected = text if CASES[text] is None else CASES[text]
    assert shown(text) == expected
    complain(text)
    assert capsys.readouterr().err == f"{expected}\n"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_that_cannot_be_printed_is_no_second_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    complain("an error")
