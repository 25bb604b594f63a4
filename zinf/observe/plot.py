"""A step as a picture: a row per link, time across, predicted below measured."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from zinf.core.plan import Link, show_seconds
from zinf.observe.colors import colors
from zinf.observe.traced import Span, TracedStep

ROWS = [str(link) for link in Link if not link.only_frees]

# Sizes in inches. The height of a row does not depend on the number of rows.
WIDTH, ROW, BAR = 13.0, 0.36, 0.78
LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 1.15, 0.75, 0.95, 0.75, 0.8
# The legend: number of kinds in one row, and the height of a row in inches.
LEGEND_KINDS, LEGEND_ROW = 8, 0.23
GREY = "#777777"


def plot(step: TracedStep, output: Path | str) -> None:
    """Draws a step to a file; the file's suffix is the format (PNG, SVG, PDF).

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the format.
    """
    picture(step).savefig(output)


class Picture(Figure):
    """A matplotlib figure that needs no display and that notebooks show."""

    def _repr_png_(self) -> bytes:
        drawn = BytesIO()
        self.savefig(drawn, format="png", dpi=100)
        return drawn.getvalue()


def picture(step: TracedStep) -> Picture:
    """The step as a figure: the prediction below the measurement, if the step ran.

    White is idle time. The busiest link binds. Frees take no time and are not drawn.
    """
    panels = {"measured": step.measured, "predicted": step.predicted}
    panels = {name: spans for name, spans in panels.items() if spans}
    spans = (*step.measured, *step.predicted)
    used = {span.link for span in spans}
    links = [link for link in ROWS if link in used]
    shades = colors(span.kind for span in spans if span.link in links)
    panel = len(links) * ROW
    bottom = BOTTOM + ceil(len(shades) / LEGEND_KINDS) * LEGEND_ROW
    height = TOP + len(panels) * panel + (len(panels) - 1) * BETWEEN + bottom
    figure = Picture(figsize=(WIDTH, height), dpi=150, facecolor="white")
    rows = figure.subplots(
        len(panels),
        sharex=True,
        squeeze=False,
        gridspec_kw={
            "left": LEFT / WIDTH,
            "right": 1 - RIGHT / WIDTH,
            "top": 1 - TOP / height,
            "bottom": bottom / height,
            "hspace": BETWEEN / panel,
        },
    )[:, 0]
    seconds = max(span.end for span in spans)
    scale, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    for axes, (name, drawn) in zip(rows, panels.items(), strict=True):
        _draw(axes, name, drawn, links, scale)
    rows[-1].set_xlim(0, seconds * scale)
    rows[-1].set_xlabel(f"time since the step began ({unit})")
    figure.text(
        LEFT / WIDTH,
        1 - 0.3 / height,
        _title(step),
        fontsize=13,
        fontweight="bold",
        verticalalignment="center",
    )
    figure.legend(
        handles=[Patch(color=c, label=kind) for kind, c in shades.items()],
        loc="lower center",
        ncols=LEGEND_KINDS,
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        columnspacing=1.4,
    )
    return figure


def _title(step: TracedStep) -> str:
    name = f"Step {step.number}" if step.number else "A step"
    predicted = _seconds(step.predicted)
    if not step.measured:
        return f"{name}: {show_seconds(predicted)} predicted"
    measured = _seconds(step.measured)
    parts = f"{show_seconds(measured)} measured, {show_seconds(predicted)} predicted"
    error = predicted / measured - 1
    side = "more" if error > 0 else "less"
    return f"{name}: {parts} ({abs(error):.0%} {side})"


def _draw(
    axes: Axes, name: str, spans: Sequence[Span], links: Sequence[str], scale: float
) -> None:
    seconds, busy = _seconds(spans), _busy(spans, links)
    binding = max(busy, key=lambda link: busy[link])
    text = f"{name}: {show_seconds(seconds)}, {binding} binds"
    axes.set_title(text, loc="left", fontsize=11)
    bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        width = (span.end - span.start) * scale
        bars[span.link, span.kind].append((span.start * scale, width))
    for row, link in enumerate(links):
        for kind, color in colors(k for x, k in bars if x == link).items():
            place = row - BAR / 2, BAR
            axes.broken_barh(bars[link, kind], place, facecolor=color, linewidth=0)
        axes.text(
            1.012,
            row,
            f"{busy[link] / seconds:.0%}",
            transform=axes.get_yaxis_transform(),
            verticalalignment="center",
            fontweight="bold" if link == binding else "normal",
        )
    axes.annotate(
        "busy",
        (1.012, 1.0),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        color=GREY,
    )
    axes.axvline(seconds * scale, color=GREY, linewidth=0.8, linestyle="--")
    _style(axes, links, binding)


def _style(axes: Axes, links: Sequence[str], binding: str) -> None:
    axes.set_ylim(len(links) - 0.5, -0.5)
    axes.set_yticks(range(len(links)), links)
    axes.yaxis.set_tick_params(length=0)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == binding else "normal")
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_tick_params(labelbottom=True, color=GREY)
    for row in range(1, len(links)):
        axes.axhline(row - 0.5, color="#E5E5E5", linewidth=0.6, zorder=0)
    for side in axes.spines.values():
        side.set_color("#BBBBBB")


def _seconds(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)


def _busy(spans: Sequence[Span], links: Sequence[str]) -> Mapping[str, float]:
    busy = dict.fromkeys(links, 0.0)
    for span in spans:
        if span.link in busy:
            busy[span.link] += span.end - span.start
    return busy
