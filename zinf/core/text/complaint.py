"""Prints what came from outside: a terminal shows it, and does not obey it."""

import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Control characters, invisible ones that change the order of text, and halves of pairs.
UNSAFE = frozenset({"Cc", "Cf", "Cs"})


def complain(text: str) -> None:
    """Print `shown(text)` on standard error; nothing if that is gone."""
    with suppress(OSError):
        print(shown(text), file=sys.stderr, flush=True)


def tell(text: str = "", *, end: str = "\n") -> None:
    """Print `shown(text)` on standard output.

    Raises:
        OSError: it takes nothing.
    """
    print(shown(text), end=end, flush=True)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name this file in an OSError of the `with` block that names none.

    A full drive and a limit of the size of files (`ulimit -f`) are errors of a write,
    which knows no name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


class ShownFormatter(logging.Formatter):
    """Formats log records as `shown`."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def shown(text: str) -> str:
    r"""`text` with its control characters as escapes, such as \x1b.

    Names, keys and messages of files come from anybody. A terminal would obey them:
    move the cursor over other lines, or set the title of the window.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str) -> str:
    r"""`shown(text)` with its ends of lines and tabs as escapes too: \n, \t."""
    return shown(text).replace("\n", r"\n").replace("\t", r"\t")


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in UNSAFE:
        return character
    return character.encode("unicode_escape").decode()
