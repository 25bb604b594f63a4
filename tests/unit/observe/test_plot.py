"""The picture of a step: links as rows, idle white, nothing over anything else."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.golden import Golden
from tests.unit.observe.cases import step_of
from zinf.core.plan import Link
from zinf.observe.colors import COLORS, UNKNOWN
from zinf.observe.plot import picture, plot
from zinf.observe.traced import TracedStep


def bars(figure: Figure) -> list[tuple[str, list[list[float]]]]:
    """The colour of each group of bars, and their left, right and row."""
    return [
        (
            to_hex(group.get_facecolor()[0]).upper(),
            [
                [round(float(x), 4) for x in (*path.vertices[[0, 2], 0],)]
                + [round(float(path.vertices[:4, 1].mean()), 2)]
                for path in group.get_paths()
            ],
        )
        for axes in figure.axes
        for group in axes.findobj(PolyCollection)
    ]


def test_bars_and_texts_are_those_of_the_step(golden: Golden) -> None:
    lines = []
    for step in (step_of(1.25), step_of(0.5), replace(step_of(), measured=())):
        figure = picture(step)
        lines += [f"{figure.get_size_inches()[1]:.3f} inches high"]
        for axes in figure.axes:
            rows = [label.get_text() for label in axes.get_yticklabels()]
            lines.append(f"{axes.get_title(loc='left')}; rows {', '.join(rows)}")
            lines.append(f"  busy {' '.join(text.get_text() for text in axes.texts)}")
            lines.append(f"  time {axes.get_xlim()[0]:.4f} to {axes.get_xlim()[1]:.4f}")
        lines += [f"  {color} {where}" for color, where in bars(figure)]
        lines.append(" | ".join(text.get_text() for text in figure.texts))
        legend = figure.legends[0].get_texts()
        lines.append(" | ".join(text.get_text() for text in legend))
    golden.check("plot.txt", "\n".join(lines))


def test_the_picture_is_a_png_and_other_formats_are_named(tmp_path: Path) -> None:
    plot(step_of(), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="png"):
        plot(step_of(), tmp_path / "step.docx")


def with_every_kind(step: TracedStep) -> TracedStep:
    """The widest legend: a fused step has but one kind; one is of a later version."""
    first = step.measured[0]
    kinds = [kind for kind in (*COLORS, "novelty") if kind != "whole step"]
    more = tuple(replace(first, kind=kind) for kind in kinds)
    return replace(step, measured=(*step.measured, *more))


def on_one_link(step: TracedStep) -> TracedStep:
    """The lowest picture, that of a fused step."""
    only = tuple(span for span in step.measured if span.link == Link.DEVICE)
    return replace(step, measured=only, predicted=only)


@pytest.mark.parametrize("change", [with_every_kind, on_one_link])
def test_no_text_lies_over_another_or_outside(change) -> None:
    step = change(step_of())
    figure = picture(step)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    # Matplotlib keeps a tick beyond each end of an axis, and does not draw it.
    undrawn = {
        label
        for axes in figure.axes
        for label in axes.get_xticklabels()
        if label.get_position()[0] > axes.get_xlim()[1]
    }
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in set(figure.findobj(Text)) - undrawn
        if text.get_text().strip() and text.get_visible()
    ]
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for (one, first), (two, second) in combinations(boxes, 2):
        assert not first.overlaps(second), (one, two)
    has_unknown = any(span.kind == "novelty" for span in step.measured)
    assert (UNKNOWN in [color for color, _ in bars(figure)]) == has_unknown
