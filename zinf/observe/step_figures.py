"""The figures of one step: when each instruction runs, and what tiers hold."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

from zinf.core.plan import Link, show_bytes, show_seconds
from zinf.core.program import Tier
from zinf.observe.colors import colors
from zinf.observe.figure_layout import (
    ACCENT,
    AT_RIGHT,
    BOTTOM,
    LANE,
    PANEL_GAP,
    RULE,
    TOP,
    Figure,
    empty_layout,
    line_at,
    panel_extents,
    panel_title,
    short,
    x_axis,
    y_axis,
)
from zinf.observe.replay import busy_seconds
from zinf.observe.traced import Span, TracedStep

# Limits of a hover label, so that it fits a phone: arrays, and letters of a name.
SHOWN_ARRAYS, SHOWN_LETTERS = 6, 46
# Bars get an outline if there are fewer than this of one kind.
FEW = 400
# The budget is drawn if the peak is at least this share of it. A budget far above the
# curve would flatten the curve.
NEAR = 0.3
# A trace rounds times to nanoseconds, so a free may seem to come just after the
# allocation that reuses its bytes. Changes within this time count as simultaneous.
SAME_TIME = 5e-9
LANES = [link for link in Link if not link.only_frees]
TIER_COLORS = dict(zip(Tier, cycle(("#1F5A9E", "#2E9A1E", "#B5480F")), strict=False))


def timeline_figure(step: TracedStep) -> Figure:
    """One step: a row per link, time across; the prediction below the measurement."""
    panels = [("measured", step.measured)] if step.measured else []
    panels.append(("predicted", step.predicted))
    used = {span.link for _, spans in panels for span in spans}
    lanes = [str(link) for link in LANES if link in used]
    seconds = max(span.end for _, spans in panels for span in spans)
    scale, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    height = TOP + BOTTOM + PANEL_GAP * (len(panels) - 1)
    height += len(panels) * len(lanes) * LANE
    layout = empty_layout(height=height)
    layout |= {"barmode": "overlay", "bargap": 0.16, "hovermode": "closest"}
    layout["margin"] |= {"l": 84, "r": 48}
    plotted = height - TOP - BOTTOM
    gap = PANEL_GAP / plotted
    hovers = _hovers(step)
    data = []
    for number, ((name, spans), domain) in enumerate(
        zip(panels, panel_extents([1.0] * len(panels), gap), strict=True), start=1
    ):
        axis = "" if number == 1 else str(number)
        busy, length = busy_seconds(spans), max(span.end for span in spans)
        binding = max(lanes, key=lambda lane: busy.get(lane, 0.0))
        groups: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.link in lanes:
                groups[span.kind].append(span)
        for kind, color in colors(groups).items():
            data.append(_bars(groups[kind], kind, color, axis, scale, hovers))
        layout[f"yaxis{axis}"] = {
            "domain": domain,
            "categoryorder": "array",
            "categoryarray": lanes[::-1],
            # A fixed range keeps lanes that have no bar in this panel.
            "range": [-0.5, len(lanes) - 0.5],
            "type": "category",
            "tickmode": "array",
            "tickvals": lanes,
            "ticktext": [f"<b>{x}</b>" if x == binding else x for x in lanes],
            "fixedrange": True,
            "ticklen": 4,
            "tickcolor": "white",
            "showgrid": False,
            "anchor": f"x{axis}",
        }
        layout[f"xaxis{axis}"] = x_axis(
            f"{unit} since the step began" if number == len(panels) else ""
        ) | {
            "range": [0, seconds * scale],
            "anchor": f"y{axis}",
            "matches": "x" if axis else None,
            "ticksuffix": "",
        }
        title = f"<b>{name}</b>: {show_seconds(length)}, {binding} binds"
        layout["annotations"].append(panel_title(title, domain[1]))
        layout["annotations"].append(panel_title("busy", domain[1]) | AT_RIGHT)
        for row, lane in enumerate(lanes):
            share = f"{busy.get(lane, 0.0) / length:.0%}"
            layout["annotations"].append(
                {
                    "text": f"<b>{share}</b>" if lane == binding else share,
                    "xref": "paper",
                    "yref": f"y{axis}",
                    "y": len(lanes) - 1 - row,
                    "yanchor": "middle",
                    "showarrow": False,
                }
                | AT_RIGHT
            )
        for row in range(1, len(lanes)):
            rule = line_at(axis, row - 0.5, {"color": RULE, "width": 1})
            layout["shapes"].append(rule | {"layer": "below"})
    return {"data": data, "layout": layout}


def held_figure(step: TracedStep, budgets: Mapping[Tier, int]) -> Figure:
    """Bytes that each tier holds in the course of a step, and its budget if it is near.

    The bytes are those of the plan, at measured times if there are any, else at
    predicted times.
    """
    spans = step.measured or step.predicted
    seconds = max(span.end for span in spans)
    scale, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    tiers = [t for t in Tier if any(held_curve(step, spans, t)[1])]
    layout = empty_layout(height=TOP + BOTTOM + 96 * len(tiers))
    layout["margin"] |= {"l": 64}
    data = []
    domains = panel_extents([1.0] * len(tiers), 0.34 / len(tiers) if tiers[1:] else 0)
    for number, (tier, domain) in enumerate(zip(tiers, domains, strict=True), start=1):
        axis = "" if number == 1 else str(number)
        times, held = held_curve(step, spans, tier)
        divisor, name = _binary_unit(max(held))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": str(tier),
                "x": [time * scale for time in times],
                "y": [nbytes / divisor for nbytes in held],
                "yaxis": f"y{axis}",
                "line": {"color": TIER_COLORS[tier], "width": 1.6, "shape": "hv"},
                "fill": "tozeroy",
                "hovertemplate": f"%{{y:.3~g}} {name} on the {tier} at %{{x:.4~g}} "
                f"{unit}<extra></extra>",
            }
        )
        layout[f"yaxis{axis}"] = y_axis() | {
            "domain": domain,
            "rangemode": "tozero",
            "nticks": 4,
        }
        title = f"<b>{tier}</b>, {name}: at most {show_bytes(max(held))}"
        if max(held) >= NEAR * budgets[tier]:
            title += f" <span style='color:{ACCENT}'>&#9476; budget</span>"
            layout[f"yaxis{axis}"]["range"] = [0, 1.08 * budgets[tier] / divisor]
            line = {"color": ACCENT, "width": 1.6, "dash": "dash"}
            layout["shapes"].append(line_at(axis, budgets[tier] / divisor, line))
        layout["annotations"].append(panel_title(title, domain[1]))
    layout["xaxis"] = x_axis(f"{unit} since the step began") | {
        "anchor": f"y{len(tiers)}" if tiers[1:] else "y",
        "range": [0, seconds * scale],
    }
    return {"data": data, "layout": layout}


def held_curve(
    step: TracedStep, spans: Sequence[Span], tier: Tier
) -> tuple[list[float], list[int]]:
    """Times at which the bytes of a tier change, and the bytes held from then on."""
    changes = [(0.0, step.held_bytes.get(tier, 0))]
    for span in spans:
        working = span.workspace.get(tier, 0)
        changes.append((span.start, span.allocates.get(tier, 0) + working))
        changes.append((span.end, -span.frees.get(tier, 0) - working))
    times, held = [0.0], [0]
    for time, change in sorted(change for change in changes if change[1]):
        if time - times[-1] > SAME_TIME:
            times.append(time)
            held.append(held[-1])
        held[-1] += change
    return [*times, max(span.end for span in spans)], [*held, held[-1]]


def _bars(
    spans: Sequence[Span],
    kind: str,
    color: str,
    axis: str,
    scale: float,
    hovers: Mapping[int, str],
) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "base": [short(span.start * scale) for span in spans],
        "x": [short((span.end - span.start) * scale) for span in spans],
        "y": [span.link for span in spans],
        # Without an outline, a bar narrower than a pixel is invisible. With very many
        # bars, the outlines would cover the gaps between them.
        "marker": {
            "color": color,
            "line": {"color": color, "width": 0.7 if len(spans) < FEW else 0},
        },
        "hovertext": [hovers[span.instruction] for span in spans],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "legendgroup": kind,
    }


def _hovers(step: TracedStep) -> dict[int, str]:
    """Hover text by instruction: name, kind, bytes, both times, and arrays."""
    measured = {span.instruction: span for span in step.measured}
    found = {}
    for span in step.predicted:
        lines = [f"<b>{escape(_fit(span.name))}</b>"]
        lines.append(f"#{span.instruction} on {span.link}: {span.kind}")
        if span.nbytes:
            lines.append(show_bytes(span.nbytes))
        if span.instruction in measured:
            lines.append(f"measured {_when(measured[span.instruction])}")
        lines.append(f"predicted {_when(span)}")
        shown = span.arrays[:SHOWN_ARRAYS]
        lines += [f"&#183; {escape(_fit(name))}" for name in shown]
        if len(span.arrays) > len(shown):
            lines.append(f"and {len(span.arrays) - len(shown)} more arrays")
        found[span.instruction] = "<br>".join(lines)
    return found


def _when(span: Span) -> str:
    return f"{show_seconds(span.end - span.start)} (from {show_seconds(span.start)})"


def _fit(name: str) -> str:
    """The name, without its middle if it is long: arrays may differ at either end."""
    if len(name) <= SHOWN_LETTERS:
        return name
    half = SHOWN_LETTERS // 2
    return f"{name[:half]}…{name[-half:]}"


def _binary_unit(nbytes: int) -> tuple[int, str]:
    """A divisor and its unit, the one that `show_bytes` would choose."""
    divisor, unit = 1, show_bytes(nbytes).split()[1]
    for name in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if name == unit:
            break
        divisor *= 1024
    return divisor, unit
