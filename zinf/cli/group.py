"""A command that runs in several processes: they join, and end together."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import typer

from zinf.cli.errors import clean_errors
from zinf.distributed import AbstractGroup, find_seat, join, leave
from zinf.distributed.options import Place


@contextmanager
def joined(place: Place, traceback: bool) -> Generator[AbstractGroup, None, None]:
    """The group of this process, of one or several, within `clean_errors`.

    Where one of several fails, all end: others with exit code 3.
    """
    with clean_errors(traceback):
        group = join(find_seat(place.flags(), os.environ), place.limits)
    try:
        with clean_errors(traceback, group), group:
            yield group
    except typer.Exit as ended:
        if group.count > 1:
            leave(ended.exit_code)
        raise
