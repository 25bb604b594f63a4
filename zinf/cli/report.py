"""Tables of what commands find."""

import sys
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from zinf.config import Report
from zinf.memory.nvme import Measured, Profile

# What reads a pipe wants a line a key.
PIPE_WIDTH = 1000


def console() -> Console:
    """Where tables go: as wide as the terminal, and wider than any table in a pipe."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, markup=False, highlight=False)


def print_report(found: Report) -> None:
    table = Table("key", "value", "status", "reason", box=None, pad_edge=False)
    for column in table.columns[:3]:
        column.no_wrap = True
    for row in found.rows:
        table.add_row(row.key, row.value, str(row.status), row.reason)
    out = console()
    out.print(table)
    for note in found.notes:
        out.print(f"note: {note}", soft_wrap=True)
    for problem in found.problems:
        print(f"error: {problem}", file=sys.stderr)


def print_measured(rows: Sequence[Measured], chosen: Profile) -> None:
    table = Table("block", "threads", "read", "overwrite", "mixed", "", box=None)
    for row in rows:
        profile = row.profile
        speeds = (median(x) / 1e9 for x in (row.reads, row.writes, row.mixed))
        is_chosen = (profile.block_bytes, profile.num_threads) == (
            chosen.block_bytes,
            chosen.num_threads,
        )
        is_default = profile == Profile()
        marks = ["chosen"] * is_chosen + ["without a profile"] * is_default
        table.add_row(
            f"{profile.block_bytes >> 20} MiB",
            str(profile.num_threads),
            *(f"{speed:.2f}" for speed in speeds),
            ", ".join(marks),
        )
    Console(markup=False, highlight=False).print(table)
    print(f"GB/s, medians of {len(rows[0].reads)} rounds in turn")
