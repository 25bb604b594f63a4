"""The report at the end of a run: measured figures beside those of the plan."""

from collections.abc import Sequence

from zinf.core.plan import Plan
from zinf.core.plan.show import show_bytes, show_seconds
from zinf.core.program import MOVING, Tier
from zinf.observe.totals import Totals

Row = tuple[str, ...]
ABOVE_PLAN = (
    "  More than planned: saves held memory beside the steps, in what the budget left."
)


def summary(totals: Totals, plan: Plan, *, saves: bool = False) -> str:
    """Loss, speed, bytes held per tier and bytes moved per link, as lines of text.

    Args:
        saves: checkpoints were saved while steps ran, which holds more than the plan.
    """
    steps = "1 step" if totals.num_steps == 1 else f"{totals.num_steps} steps"
    rate = f"{totals.tokens / totals.seconds:,.0f} {totals.counted}/s"
    mean = show_seconds(totals.seconds / totals.num_steps)
    predicted = show_seconds(plan.timeline.seconds)
    losses = f"loss {totals.first_loss:.4f} -> {totals.last_loss:.4f}"
    if totals.evaluation_loss is not None:
        losses += f", evaluation loss {totals.evaluation_loss:.4f}"
    return "\n".join(
        [
            f"{steps} in {totals.seconds:.1f} s: {rate}, {mean} a step "
            f"(predicted {predicted})",
            losses,
            "",
            *_table(_held(totals, plan)),
            *([ABOVE_PLAN] if saves and _is_above(totals, plan) else []),
            "",
            *_table(_moved(totals, plan)),
        ]
    )


def _is_above(totals: Totals, plan: Plan) -> bool:
    return any(totals.peak_bytes[tier] > plan.peak_bytes[tier] for tier in Tier)


def _held(totals: Totals, plan: Plan) -> list[Row]:
    rows: list[Row] = [("held at most", "measured", "planned", "budget")]
    for tier in Tier:
        by_tier = (totals.peak_bytes, plan.peak_bytes, plan.capacity_bytes)
        rows.append((f"  {tier}", *(show_bytes(amount[tier]) for amount in by_tier)))
    return rows


def _moved(totals: Totals, plan: Plan) -> list[Row]:
    rows: list[Row] = [("moved per step", "measured", "planned", "in all")]
    for link in MOVING:
        moved_bytes = totals.moved_bytes[link]
        amounts = (moved_bytes // totals.num_steps, plan.link_bytes(link), moved_bytes)
        rows.append((f"  {link}", *map(show_bytes, amounts)))
    return rows


def _table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows
    ]
