"""Steps, losses and experts as plotly figures, which notebooks show."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from zinf.core.plan import Plan, show_seconds
from zinf.core.step.run.run import StepRecord
from zinf.core.text.json_text import from_json
from zinf.observe.figures import experts_figure, training_figure
from zinf.observe.page import write_page
from zinf.observe.step_figures import timeline_figure
from zinf.observe.traced import Span, TracedStep, measured_step, predicted_step
from zinf.observe.writer import Metrics, lists, numbers

EXPERTS = re.compile("aux/experts/.*/tokens")
# Heights in pixels that a figure gets for its title, and for the legend below its axis.
TITLE, LEGEND = 30, 50


def plot(step: TracedStep, output: Path | str) -> None:
    """Draws a step as an HTML page that needs no network; replaces a file of that name.

    Raises:
        OSError: the page cannot be written; the earlier file is unchanged.
        ValueError: the name of the file does not end as that of an HTML page.
    """
    output = Path(output)
    if output.suffix not in (".html", ".htm"):
        raise ValueError(
            f"A step is drawn as an HTML page, and {output.name} is the name of "
            "another format. Choose a name that ends in .html; the page has a button "
            "that saves a PNG."
        )
    write_page(plot_timeline(step).to_html(), output)


def plot_timeline(step: StepRecord | Plan | TracedStep) -> go.Figure:
    """One step: a row per link, time across, the prediction below the measurement.

    A notebook shows the figure if it is the last expression of a cell. Elsewhere, call
    its `write_html` or `show`.

    Args:
        step: `engine.last_step`; `engine.plan` for the prediction alone; or a step that
            `read_trace` returned.

    Raises:
        ValueError: the engine has not completed a step yet, or the last one failed.
    """
    if isinstance(step, Plan):
        step = predicted_step(step)
    elif isinstance(step, StepRecord):
        if step.plan is None or step.timeline is None:
            raise ValueError(
                "There is no complete step to draw. Take a step first, or draw what is "
                "planned: plot_timeline(engine.plan)."
            )
        step = measured_step(step.plan, step.timeline)
    figure = timeline_figure(step)
    data, layout = figure["data"], figure["layout"]
    first = {bars["name"]: number for number, bars in reversed([*enumerate(data)])}
    for number, bars in enumerate(data):
        bars["showlegend"] = first[bars["name"]] == number
    layout["title"] = {"text": f"<b>{_title(step)}</b>", "font": {"size": 16}}
    layout["legend"] = {"orientation": "h", "yref": "container", "y": 0.01}
    layout["showlegend"] = True
    layout["height"] += TITLE + LEGEND
    layout["margin"]["t"] += TITLE
    layout["margin"]["b"] += LEGEND
    return go.Figure(figure)


def plot_experts(history: Sequence[Metrics] | Path | str) -> go.Figure:
    """The share of tokens of each expert by step, a panel for each layer.

    Equal bands are an even use of experts. The title has the share of dropped routes in
    the last step.

    Args:
        history: as for `plot_losses`, of a model whose loss returns
            `{"experts": {layer: zinf.moe.Mixed.usage}}` as auxiliary output, as that of
            `zinf train` does.

    Raises:
        OSError: the file cannot be read.
        ValueError: `history` has no step, or none with experts.
    """
    # Lines of a file have the names and lists already.
    is_flat = isinstance(history, Path | str)
    used: list[dict[str, Any]] = [
        dict(m) if is_flat else {**numbers(m), **lists(m)} for m in _steps(history)
    ]
    keys = [key for key in used[-1] if EXPERTS.fullmatch(key)]
    if not keys:
        raise ValueError(
            "The metrics say nothing about experts. Return {'experts': {layer: "
            "mixed.usage}} from the loss as auxiliary output, with has_aux=True."
        )
    layers = {}
    for key in keys:
        present = [m for m in used if key in m]
        # Of several microbatches there are rows of counts.
        tokens = np.stack([np.atleast_2d(m[key]).sum(0) for m in present])
        layer = key.removeprefix("aux/experts/").removesuffix("/tokens")
        dropped = np.mean(present[-1][key.replace("/tokens", "/dropped")])
        shares = tokens / tokens.sum(1, keepdims=True)
        layers[f"{layer}: {dropped:.1%} dropped"] = [m["step"] for m in present], shares
    return go.Figure(experts_figure(layers))


def plot_losses(history: Sequence[Metrics] | Path | str) -> go.Figure:
    """The loss of each step as a curve, with evaluations as points.

    Learning rate and gradient norm are below it if they are known.

    Args:
        history: the metrics that `engine.step` returned for each step; or the path of
            the metrics file that a `Trainer` or `zinf train` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: `history` has no step.
    """
    return go.Figure(training_figure(_steps(history)))


def _steps(history: Sequence[Metrics] | Path | str) -> Sequence[Metrics]:
    if isinstance(history, Path | str):
        lines = Path(history).read_text("utf-8").splitlines()
        history = [from_json(line) for line in lines]
    if not history:
        raise ValueError("There is no step to draw. Take a step first.")
    return history


def _title(step: TracedStep) -> str:
    """A title: the step's number, its seconds, and the error of the prediction."""
    name = f"Step {step.number}" if step.number else "A step"
    predicted = _seconds(step.predicted)
    if not step.measured:
        return f"{name}: {show_seconds(predicted)} predicted"
    measured = _seconds(step.measured)
    parts = f"{show_seconds(measured)} measured, {show_seconds(predicted)} predicted"
    error = predicted / measured - 1
    side = "more" if error > 0 else "less"
    return f"{name}: {parts} ({abs(error):.0%} {side})"


def _seconds(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)
