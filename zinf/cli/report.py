"""Tables that the commands print."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zinf.cli.endings import PIPE_CLOSED, discard_output
from zinf.core.text.complaint import complain, one_line, shown, tell

# Imported only for types: `zinf config check` uses this module and must not import jax.
if TYPE_CHECKING:
    from zinf.checkpoint.saved import Saved
    from zinf.core.config import Report
    from zinf.core.interchange.catalog import Entry
    from zinf.core.interchange.compare import Difference
    from zinf.core.memory.nvme import Measured, Profile

# Width of the output in a pipe, so that each row of a table stays on one line.
PIPE_WIDTH = 1000


class PipeConsole(Console):
    """A console that exits with PIPE_CLOSED if the reader of a pipe is gone.

    Rich's Console exits with 1, which here means that a plan does not fit.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Cells too are of names that came from outside."""
        return super().render_str(shown(text), **options)

    def on_broken_pipe(self) -> None:
        discard_output()
        raise SystemExit(PIPE_CLOSED)


def console() -> Console:
    """A console as wide as the terminal, or PIPE_WIDTH if the output is a pipe."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return PipeConsole(width=width, markup=False, highlight=False)


def print_report(found: "Report") -> None:
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
        complain(f"error: {problem}")


def print_measured(rows: "Sequence[Measured]", chosen: "Profile") -> None:
    from zinf.core.memory.nvme import Profile

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
    PipeConsole(markup=False, highlight=False).print(table)
    tell(f"GB/s, medians of {len(rows[0].reads)} rounds in turn")


def print_checkpoints(found: "Sequence[Entry]") -> None:
    table = Table("step", "arrays", "bytes", "on the drive", "written by", box=None)
    for column in table.columns[:4]:
        column.justify = "right"
    for entry in found:
        step = "-" if entry.step is None else str(entry.step)
        own = f"{entry.own_bytes:,}"
        if entry.problem is not None:
            table.add_row(step, "", "", own, "")
            continue
        sizes = f"{entry.num_arrays:,}", f"{entry.array_bytes:,}", own
        table.add_row(step, *sizes, entry.written_by)
    out = console()
    out.print(table)
    for entry in found:
        if entry.problem is not None:
            tell(f"{entry.folder} cannot be used: {entry.problem}")
    tell(f"{sum(entry.own_bytes for entry in found):,} bytes on the drive in all")


def print_arrays(saved: "Saved") -> None:
    table = Table("array", "dtype", "shape", "chunks of", "bytes", box=None)
    table.columns[-1].justify = "right"
    for array, spec in saved.arrays.items():
        shape, chunk = (
            " x ".join(map(str, sizes))
            for sizes in (spec.shape, saved.grid(array).chunk)
        )
        table.add_row(
            one_line(str(array)), spec.dtype, shape, chunk, f"{spec.nbytes:,}"
        )
    console().print(table)
    nbytes = sum(spec.nbytes for spec in saved.arrays.values())
    tell(f"{saved.directory}: {len(saved.arrays):,} arrays, {nbytes:,} bytes")


def print_differences(
    found: "Sequence[Difference]", scalars: Sequence[str], num_same: int
) -> None:
    table = Table("array", "different", "largest difference", "first at", box=None)
    for difference in found:
        if difference.found is not None:
            table.add_row(one_line(difference.name), difference.found, "", "")
            continue
        first = str(list(difference.first))
        count, largest = f"{difference.num_different:,}", f"{difference.largest:.6g}"
        table.add_row(one_line(difference.name), count, largest, first)
    if found:
        console().print(table)
    for line in scalars:
        tell(line)
    tell(f"{num_same:,} arrays are equal, {len(found):,} differ.")
