"""The printed form of a plan: documentation, debugger and golden test at once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zinf.core.plan.cost import Timeline
from zinf.core.plan.instruction import Instruction, OffloadedStep
from zinf.core.program import Link, Program, Tier
from zinf.core.text.tables import aligned, html_table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show_bytes(nbytes: int) -> str:
    """Three significant digits with a binary unit: `1.50 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{nbytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {UNITS[unit]}"


def show_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass(frozen=True)
class Summary:
    """The summary of a plan: a sentence and two tables, with column names first."""

    sentence: str
    tiers: list[tuple[str, ...]]
    links: list[tuple[str, ...]]
    why: str = ""

    def __str__(self) -> str:
        tiers, links = aligned(self.tiers, left=(0,)), aligned(self.links, (0, 3))
        said = [self.sentence, *([self.why] if self.why else [])]
        return "\n".join([*said, "", *tiers, "", *links])

    def html(self) -> str:
        tiers = html_table(self.tiers[1:], self.tiers[0], numbers=(1, 2, 3))
        links = html_table(self.links[1:], self.links[0], numbers=(1, 2))
        why = f"<p>{escape(self.why)}</p>" if self.why else ""
        return f"<p>{escape(self.sentence)}</p>{why}{tiers}{links}"


def summarize(
    instructions: Sequence[Instruction],
    timeline: Timeline,
    *,
    home_bytes: Mapping[Tier, int],
    peak_bytes: Mapping[Tier, int],
    capacity_bytes: Mapping[Tier, int],
    why: str = "",
) -> Summary:
    """Bytes by tier, traffic by link, and the link that binds."""
    rows: list[tuple[str, ...]] = [("tier", "at rest", "peak", "budget")]
    for tier in Tier:
        figures = home_bytes[tier], peak_bytes[tier], capacity_bytes[tier]
        if any(figures):
            rows.append((str(tier), *map(show_bytes, figures)))
    busy = timeline.busy_seconds(instructions)
    moved: dict[Link, int] = defaultdict(int)
    for instruction in instructions:
        moved[instruction.link] += instruction.nbytes
    links: list[tuple[str, ...]] = [("link", "bytes a step", "busy", "")]
    binding = max(busy, key=lambda link: busy[link])
    for link in Link:
        if link in busy and not link.only_frees:
            carries = show_bytes(moved[link]) if moved[link] else "-"
            mark = "binds" if link == binding else ""
            links.append((str(link), carries, show_seconds(busy[link]), mark))
    for step in (i.operation for i in instructions):
        if isinstance(step, OffloadedStep):
            for link, nbytes in step.moved.items():
                links.append((str(link), show_bytes(nbytes), "", "within the program"))
    sent = sum(i.exchange.nbytes for i in instructions)
    if sent:
        hidden = sum(i.exchange.hidden_bytes for i in instructions) / sent
        links.append(
            ("between devices", show_bytes(sent), "", f"{hidden:.0%} behind matmuls")
        )
    predicted = show_seconds(timeline.seconds)
    count = f"{len(instructions)} instruction{'s' * (len(instructions) != 1)}"
    return Summary(f"{count}, predicted {predicted} a step", rows, links, why)


def show_instructions(instructions: Sequence[Instruction], timeline: Timeline) -> str:
    """One line an instruction: number, link, operation, bytes, predicted start, end."""
    rows = [("#", "link", "operation", "bytes", "start ms", "end ms")]
    for number, instruction in enumerate(instructions):
        rows.append(
            (
                str(number),
                "free" if instruction.link.only_frees else str(instruction.link),
                str(instruction.operation),
                show_bytes(instruction.nbytes) if instruction.nbytes else "",
                f"{timeline.start[number] * 1e3:.1f}",
                f"{timeline.end[number] * 1e3:.1f}",
            )
        )
    return "\n".join(aligned(rows, left=(1, 2)))


def show_tilings(program: Program) -> str:
    """Lists what runs in parts because the device cannot hold it whole.

    These are leaves that are read by tile and segments that run in blocks of rows;
    equal segments share a line.
    """
    tiles = []
    for tiling in program.tilings:
        first, last = tiling.tiles[0]
        tiles.append(
            (
                tiling.path,
                show_bytes(tiling.nbytes),
                f"in {len(tiling.tiles)} tiles of up to {last - first} rows",
                f"as a segment may hold {show_bytes(tiling.limit_bytes)};",
                ", ".join(dict.fromkeys(tiling.uses)),
            )
        )
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    for segment in program.segments:
        if segment.row_blocks > 1:
            alike[segment.body, segment.row_blocks].append(segment.name)
    blocks = []
    for (_, count), names in alike.items():
        more = f" and {len(names) - 1} more" if names[1:] else ""
        blocks.append((names[0] + more, f"{count} blocks of rows or more"))
    shown = ["tiled:", *aligned(tiles, left=(0, 2, 3, 4))] if tiles else []
    if blocks:
        shown += ["run in blocks, as intermediate values are too large:"]
        shown += aligned(blocks, left=(0, 1))
    return "\n".join(shown)
