"""Pictures of steps and losses for notebooks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from zinf.core.plan import Plan
from zinf.core.step.run.run import StepRecord
from zinf.core.text.json_text import from_json
from zinf.observe.plot import GREY, Picture, picture
from zinf.observe.traced import TracedStep, measured_step, predicted_step
from zinf.observe.writer import Metrics, lists, numbers

EXPERTS = re.compile("aux/experts/.*/tokens")
LOSS, EVALUATION = "#1F5A9E", "#B5480F"


def plot_timeline(step: StepRecord | Plan | TracedStep) -> Picture:
    """One step as a picture: a row per link, time across, predicted below measured.

    A notebook shows the picture if it is the last expression of a cell. Elsewhere, call
    its `savefig`.

    Args:
        step: `engine.last_step`; `engine.plan` for the prediction alone; or a step that
            `read_trace` returned.

    Raises:
        ValueError: the engine has not completed a step yet, or the last one failed.
    """
    if isinstance(step, TracedStep):
        return picture(step)
    if isinstance(step, Plan):
        return picture(predicted_step(step))
    if step.plan is None or step.timeline is None:
        raise ValueError(
            "There is no complete step to draw. Take a step first, or draw what is "
            "planned: plot_timeline(engine.plan)."
        )
    return picture(measured_step(step.plan, step.timeline))


def plot_experts(history: Sequence[Metrics] | Path | str) -> Picture:
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
    height = 0.6 + 1.6 * len(keys)
    figure = Picture(figsize=(8.0, height), dpi=150, facecolor="white", layout="tight")
    panels = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        found = [m for m in used if key in m]
        # Of several microbatches there are rows of counts.
        tokens = np.stack([np.atleast_2d(m[key]).sum(0) for m in found])
        shares = tokens / tokens.sum(1, keepdims=True)
        axes.stackplot([m["step"] for m in found], shares.T, linewidth=0)
        axes.margins(0)
        layer = key.removeprefix("aux/experts/").removesuffix("/tokens")
        dropped = np.mean(found[-1][key.replace("/tokens", "/dropped")])
        axes.set_title(f"{layer}: {dropped:.1%} dropped", loc="left", fontsize=9)
        axes.set_ylabel("share")
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def plot_losses(history: Sequence[Metrics] | Path | str) -> Picture:
    """The loss of each step as a curve, with evaluations as points.

    Args:
        history: the metrics that `engine.step` returned for each step; or the path of
            the metrics file that a `Trainer` or `zinf train` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: `history` has no step.
    """
    history = _steps(history)
    figure = Picture(figsize=(8.0, 3.2), dpi=150, facecolor="white", layout="tight")
    axes = figure.subplots()
    steps = [metrics["step"] for metrics in history]
    losses = [metrics["loss"] for metrics in history]
    style = "-" if len(steps) > 1 else "o"
    axes.plot(steps, losses, style, color=LOSS, linewidth=1.6, label="loss")
    found = [m for m in history if m.get("evaluation_loss") is not None]
    if found:
        evaluated = [m["step"] for m in found], [m["evaluation_loss"] for m in found]
        axes.plot(*evaluated, "D", color=EVALUATION, label="on evaluation data")
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#E5E5E5", linewidth=0.6)
    for side in axes.spines.values():
        side.set_color(GREY)
    return figure


def _steps(history: Sequence[Metrics] | Path | str) -> Sequence[Metrics]:
    if isinstance(history, Path | str):
        lines = Path(history).read_text("utf-8").splitlines()
        history = [from_json(line) for line in lines]
    if not history:
        raise ValueError("There is no step to draw. Take a step first.")
    return history
