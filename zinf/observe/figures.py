"""The figures of a report, as dicts of data and layout for plotly."""

from collections.abc import Mapping, Sequence
from typing import Any

from zinf.observe.figure_layout import (
    ACCENT,
    BOTTOM,
    GREY,
    TOP,
    Figure,
    curve,
    empty_layout,
    panel_extents,
    panel_title,
    short,
    x_axis,
    y_axis,
)
from zinf.observe.writer import Metrics

# A curve has at most this many points: more than a screen has pixels make a page slow.
MAX_POINTS = 2000


def training_figure(metrics: Sequence[Metrics]) -> Figure:
    """Loss and evaluation loss, learning rate and gradient norm, by step."""
    rows = [("loss", "loss", 3.0)]
    optional = [
        ("learning rate", "learning_rate"),
        ("gradient norm", "grad_norm"),
        ("reward", "reward"),
        ("KL divergence", "kl"),
        ("KL divergence of a completion", "objective/kl"),
        ("loss of the critic", "loss/value_avg"),
        ("entropy", "entropy"),
        ("tokens of a completion", "completions/mean_length"),
        ("share cut off", "completions/clipped_ratio"),
    ]
    for title, key in optional:
        if any(m.get(key) is not None for m in metrics):
            rows.append((title, key, 1.0))
    data, layout = [], empty_layout(height=170 + 110 * len(rows))
    tops = panel_extents([weight for *_, weight in rows], gap=0.11)
    for number, ((title, key, _), domain) in enumerate(
        zip(rows, tops, strict=True), start=1
    ):
        axis = "" if number == 1 else str(number)
        steps, values = _thinned(metrics, key)
        hover = f"step %{{x}}<br>{title} %{{y:.4~g}}"
        data.append(curve(title, steps, values, hover) | {"yaxis": f"y{axis}"})
        layout[f"yaxis{axis}"] = y_axis() | {"domain": domain}
        if key != "loss":
            # From zero, so that a constant value is not drawn on a scale of its noise.
            layout[f"yaxis{axis}"]["rangemode"] = "tozero"
        layout["annotations"].append(panel_title(title, domain[1]))
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
    layout["xaxis"] = x_axis("step") | {"anchor": f"y{len(rows)}" if rows[1:] else "y"}
    return {"data": data, "layout": layout}


def speed_figure(metrics: Sequence[Metrics], predicted: float | None) -> Figure:
    """Tokens per second by step; the predicted rate is a dashed line."""
    steps, values = _thinned(metrics, "tokens_per_second")
    layout = empty_layout(height=270)
    layout["xaxis"] = x_axis("step")
    layout["yaxis"] = y_axis() | {"rangemode": "tozero", "tickformat": "~s"}
    layout["annotations"].append(panel_title("tokens a second", 1.0))
    data = [curve("measured", steps, values, "step %{x}<br>%{y:,.0f} tokens/s")]
    if predicted is not None:
        ends, rates = [steps[0], steps[-1]], [predicted, predicted]
        line = {"color": GREY, "width": 1.4, "dash": "dash"}
        hover = f"predicted: {predicted:,.0f} tokens/s"
        data.append(
            curve("predicted", ends, rates, hover) | {"mode": "lines", "line": line}
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
    layout = empty_layout(height=TOP + BOTTOM + height)
    domains = panel_extents([1.0] * len(layers), 40 / height)
    data = []
    for number, (title, (steps, shares), domain) in enumerate(
        zip(layers, layers.values(), domains, strict=True), start=1
    ):
        axis = "" if number == 1 else str(number)
        for expert, share in enumerate(shares.T):
            hover = f"step %{{x}}<br>expert {expert}: %{{y:.1%}}"
            band = curve(f"expert {expert}", steps, share.tolist(), hover)
            # Without a colour of its own, each band gets the next one of plotly's.
            band |= {
                "yaxis": f"y{axis}",
                "stackgroup": str(number),
                "line": {"width": 0},
            }
            data.append(band)
        layout[f"yaxis{axis}"] = y_axis() | {"domain": domain, "range": [0, 1]}
        layout["annotations"].append(panel_title(title, domain[1]))
    anchor = f"y{len(layers)}" if len(layers) > 1 else "y"
    layout["xaxis"] = x_axis("step") | {"anchor": anchor}
    return {"data": data, "layout": layout}


def _thinned(metrics: Sequence[Metrics], key: str) -> tuple[list[int], list[Any]]:
    """Steps and values; if there are too many, means over equal numbers of steps."""
    stretch = -(-len(metrics) // MAX_POINTS)
    steps, values = [], []
    for first in range(0, len(metrics), stretch):
        part = metrics[first : first + stretch]
        known = [m[key] for m in part if m.get(key) is not None]
        steps.append(part[-1]["step"])
        values.append(short(sum(known) / len(known)) if known else None)
    return steps, values
