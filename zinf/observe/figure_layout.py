"""Parts that all figures share, as dicts for plotly: layout, axes, titles, curves."""

from collections.abc import Mapping, Sequence
from typing import Any

Figure = dict[str, Any]
INK, GREY, RULE = "#1A1A1A", "#5F5F5F", "#E3E3E3"
LINE, ACCENT = "#1F5A9E", "#B5480F"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
# Heights in pixels. TOP has room for plotly's buttons above the first title.
LANE, PANEL_GAP, TOP, BOTTOM = 30, 62, 50, 44


def curve(name: str, steps: Sequence[Any], values: Sequence[Any], hover: str) -> Figure:
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


def line_at(axis: str, y: float, line: Mapping[str, Any]) -> Figure:
    """A horizontal line across the panel of this y axis."""
    place = {"xref": "paper", "yref": f"y{axis}", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", **place, "line": line}


def short(number: float) -> float:
    """The number with six significant digits; more would only enlarge the page."""
    return float(f"{number:.6g}")


def panel_extents(weights: Sequence[float], gap: float) -> list[list[float]]:
    """Vertical extents of panels from the top down; a title fits into each `gap`."""
    room = (1.0 - gap * (len(weights) - 1)) / sum(weights)
    domains, top = [], 1.0
    for weight in weights:
        domains.append([max(0.0, top - room * weight), top])
        top -= room * weight + gap
    return domains


AT_RIGHT = {
    "x": 1,
    "xanchor": "left",
    "xshift": 5,
    "font": {"size": 12, "color": INK},
}


def panel_title(text: str, top: float) -> Figure:
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


def empty_layout(height: int) -> Figure:
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


def x_axis(title: str) -> Figure:
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


def y_axis() -> Figure:
    return {"gridcolor": RULE, "zeroline": False, "fixedrange": True, "nticks": 5}
