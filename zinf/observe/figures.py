"""The figures of a report, as dicts of data and layout for plotly."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from zinf.core.plan import Link, show_bytes, show_seconds
from zinf.core.program import Tier
from zinf.observe.colors import colors
from zinf.observe.replay import busy_seconds
from zinf.observe.traced import Span, TracedStep
from zinf.observe.writer import Metrics

Figure = dict[str, Any]

INK, GREY, RULE = "#1A1A1A", "#5F5F5F", "#E3E3E3"
LINE, ACCENT = "#1F5A9E", "#B5480F"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
# A curve has at most this many points: more than a screen has pixels make a page slow.
MAX_POINTS = 2000
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
# Heights in pixels. TOP has room for plotly's buttons above the first title.
LANE, PANEL_GAP, TOP, BOTTOM = 30, 62, 50, 44
LANES = [link for link in Link if not link.only_frees]
TIER_COLORS = dict(zip(Tier, cycle(("#1F5A9E", "#2E9A1E", "#B5480F")), strict=False))


def training_figure(metrics: Sequence[Metrics]) -> Figure:
    """Loss and evaluation loss, learning rate and gradient norm, by step."""
    rows = [("loss", "loss", 3.0)]
    optional = [("learning rate", "learning_rate"), ("gradient norm", "grad_norm")]
    for title, key in optional:
        if any(m.get(key) is not None for m in metrics):
            rows.append((title, key, 1.0))
    data, layout = [], _layout(height=170 + 110 * len(rows))
    tops = _panels([weight for *_, weight in rows], gap=0.11)
    for number, ((title, key, _), domain) in enumerate(
        zip(rows, tops, strict=True), start=1
    ):
        axis = "" if number == 1 else str(number)
        steps, values = _thinned(metrics, key)
        hover = f"step %{{x}}<br>{title} %{{y:.4~g}}"
        data.append(_curve(title, steps, values, hover) | {"yaxis": f"y{axis}"})
        layout[f"yaxis{axis}"] = _y_axis() | {"domain": domain}
        if key != "loss":
            # From zero, so that a constant value is not drawn on a scale of its noise.
            layout[f"yaxis{axis}"]["rangemode"] = "tozero"
        layout["annotations"].append(_panel_title(title, domain[1]))
    found = [m for m in metrics if m.get("evaluation_loss") is not None]
    if found:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "evaluation loss",
                "x": [m["step"] for m in found],
                "y": [m["evaluation_loss"] for m in found],
                "marker": {"color": ACCENT, "size": 9, "symbol": "diamond"},
                "hovertemplate": "step %{x}<br>evaluation loss %{y:.4~g}"
                "<extra></extra>",
            }
        )
        layout["annotations"][0]["text"] += (
            f" <span style='color:{ACCENT}'>&#9670; on evaluation data</span>"
        )
    layout["xaxis"] = _x_axis("step") | {"anchor": f"y{len(rows)}" if rows[1:] else "y"}
    return {"data": data, "layout": layout}


def speed_figure(metrics: Sequence[Metrics], predicted: float | None) -> Figure:
    """Tokens per second by step; the predicted rate is a dashed line."""
    steps, values = _thinned(metrics, "tokens_per_second")
    layout = _layout(height=270)
    layout["xaxis"] = _x_axis("step")
    layout["yaxis"] = _y_axis() | {"rangemode": "tozero", "tickformat": "~s"}
    layout["annotations"].append(_panel_title("tokens a second", 1.0))
    data = [_curve("measured", steps, values, "step %{x}<br>%{y:,.0f} tokens/s")]
    if predicted is not None:
        ends, rates = [steps[0], steps[-1]], [predicted, predicted]
        line = {"color": GREY, "width": 1.4, "dash": "dash"}
        hover = f"predicted: {predicted:,.0f} tokens/s"
        data.append(
            _curve("predicted", ends, rates, hover) | {"mode": "lines", "line": line}
        )
        layout["annotations"][0]["text"] += (
            f" <span style='color:{GREY}'>(dashed: predicted)</span>"
        )
    return {"data": data, "layout": layout}


def experts_figure(layers: Mapping[str, tuple[Sequence[int], Any]]) -> Figure:
    """Shares of tokens by step as stacked bands, a panel for each title of `layers`.

    Args:
        layers: the steps of each panel, and the shares (steps, experts).
    """
    height = 150 * len(layers)
    layout = _layout(height=TOP + BOTTOM + height)
    domains = _panels([1.0] * len(layers), 40 / height)
    data = []
    for number, (title, (steps, shares), domain) in enumerate(
        zip(layers, layers.values(), domains, strict=True), start=1
    ):
        axis = "" if number == 1 else str(number)
        for expert, share in enumerate(shares.T):
            hover = f"step %{{x}}<br>expert {expert}: %{{y:.1%}}"
            band = _curve(f"expert {expert}", steps, share.tolist(), hover)
            # Without a colour of its own, each band gets the next one of plotly's.
            band |= {
                "yaxis": f"y{axis}",
                "stackgroup": str(number),
                "line": {"width": 0},
            }
            data.append(band)
        layout[f"yaxis{axis}"] = _y_axis() | {"domain": domain, "range": [0, 1]}
        layout["annotations"].append(_panel_title(title, domain[1]))
    anchor = f"y{len(layers)}" if len(layers) > 1 else "y"
    layout["xaxis"] = _x_axis("step") | {"anchor": anchor}
    return {"data": data, "layout": layout}


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
    layout = _layout(height=height)
    layout |= {"barmode": "overlay", "bargap": 0.16, "hovermode": "closest"}
    layout["margin"] |= {"l": 84, "r": 48}
    plotted = height - TOP - BOTTOM
    gap = PANEL_GAP / plotted
    hovers = _hovers(step)
    data = []
    for number, ((name, spans), domain) in enumerate(
        zip(panels, _panels([1.0] * len(panels), gap), strict=True), start=1
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
        layout[f"xaxis{axis}"] = _x_axis(
            f"{unit} since the step began" if number == len(panels) else ""
        ) | {
            "range": [0, seconds * scale],
            "anchor": f"y{axis}",
            "matches": "x" if axis else None,
            "ticksuffix": "",
        }
        title = f"<b>{name}</b>: {show_seconds(length)}, {binding} binds"
        layout["annotations"].append(_panel_title(title, domain[1]))
        layout["annotations"].append(_panel_title("busy", domain[1]) | _AT_RIGHT)
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
                | _AT_RIGHT
            )
        for row in range(1, len(lanes)):
            rule = _rule(axis, row - 0.5, {"color": RULE, "width": 1})
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
    layout = _layout(height=TOP + BOTTOM + 96 * len(tiers))
    layout["margin"] |= {"l": 64}
    data = []
    domains = _panels([1.0] * len(tiers), 0.34 / len(tiers) if tiers[1:] else 0)
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
        layout[f"yaxis{axis}"] = _y_axis() | {
            "domain": domain,
            "rangemode": "tozero",
            "nticks": 4,
        }
        title = f"<b>{tier}</b>, {name}: at most {show_bytes(max(held))}"
        if max(held) >= NEAR * budgets[tier]:
            title += f" <span style='color:{ACCENT}'>&#9476; budget</span>"
            layout[f"yaxis{axis}"]["range"] = [0, 1.08 * budgets[tier] / divisor]
            line = {"color": ACCENT, "width": 1.6, "dash": "dash"}
            layout["shapes"].append(_rule(axis, budgets[tier] / divisor, line))
        layout["annotations"].append(_panel_title(title, domain[1]))
    layout["xaxis"] = _x_axis(f"{unit} since the step began") | {
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


def _curve(
    name: str, steps: Sequence[Any], values: Sequence[Any], hover: str
) -> Figure:
    """A curve over steps, or a point if there is one step."""
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "name": name,
        "x": steps,
        "y": values,
        "line": {"color": LINE, "width": 1.8},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def _rule(axis: str, y: float, line: Mapping[str, Any]) -> Figure:
    """A horizontal line across the panel of this y axis."""
    place = {"xref": "paper", "yref": f"y{axis}", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", **place, "line": line}


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
        "base": [_short(span.start * scale) for span in spans],
        "x": [_short((span.end - span.start) * scale) for span in spans],
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


def _short(number: float) -> float:
    """The number with six significant digits; more would only enlarge the page."""
    return float(f"{number:.6g}")


def _thinned(metrics: Sequence[Metrics], key: str) -> tuple[list[int], list[Any]]:
    """Steps and values; if there are too many, means over equal numbers of steps."""
    stretch = -(-len(metrics) // MAX_POINTS)
    steps, values = [], []
    for first in range(0, len(metrics), stretch):
        part = metrics[first : first + stretch]
        known = [m[key] for m in part if m.get(key) is not None]
        steps.append(part[-1]["step"])
        values.append(_short(sum(known) / len(known)) if known else None)
    return steps, values


def _binary_unit(nbytes: int) -> tuple[int, str]:
    """A divisor and its unit, the one that `show_bytes` would choose."""
    divisor, unit = 1, show_bytes(nbytes).split()[1]
    for name in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if name == unit:
            break
        divisor *= 1024
    return divisor, unit


def _panels(weights: Sequence[float], gap: float) -> list[list[float]]:
    """Vertical extents of panels from the top down; a title fits into each `gap`."""
    room = (1.0 - gap * (len(weights) - 1)) / sum(weights)
    domains, top = [], 1.0
    for weight in weights:
        domains.append([max(0.0, top - room * weight), top])
        top -= room * weight + gap
    return domains


_AT_RIGHT = {
    "x": 1,
    "xanchor": "left",
    "xshift": 5,
    "font": {"size": 12, "color": INK},
}


def _panel_title(text: str, top: float) -> Figure:
    return {
        "text": text,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top,
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 3,
        "align": "left",
        "showarrow": False,
        "font": {"size": 13, "color": INK},
    }


def _layout(height: int) -> Figure:
    return {
        "height": height,
        "margin": {"l": 56, "r": 14, "t": TOP, "b": BOTTOM},
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "showlegend": False,
        "hoverlabel": {
            "bgcolor": "white",
            "bordercolor": GREY,
            "align": "left",
            "font": {"family": FONT, "size": 12, "color": INK},
        },
        "modebar": {"bgcolor": "white", "color": GREY, "activecolor": INK},
        "annotations": [],
        "shapes": [],
    }


def _x_axis(title: str) -> Figure:
    return {
        "title": {"text": title, "standoff": 6},
        "gridcolor": RULE,
        "zeroline": False,
        "linecolor": GREY,
        "ticks": "outside",
        "tickcolor": GREY,
        "nticks": 8,
        "automargin": False,
    }


def _y_axis() -> Figure:
    return {"gridcolor": RULE, "zeroline": False, "fixedrange": True, "nticks": 5}
