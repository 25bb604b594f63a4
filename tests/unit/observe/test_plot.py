"""The picture of a step: links as rows, idle white, nothing over anything else."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.unit.observe.cases import write_trace
from zinf.observe import read_trace
from zinf.observe.colors import COLORS, UNKNOWN
from zinf.observe.plot import picture, plot
from zinf.observe.traced import TracedStep
from zinf.plan import Link, Pass, show_seconds


@pytest.fixture
def step(tmp_path: Path) -> TracedStep:
    write_trace(tmp_path / "trace.json", num_steps=1, factor=1.25)
    return read_trace(tmp_path / "trace.json")[0]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def test_the_picture_is_a_png_and_no_window(step, tmp_path):
    plot(step, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_format_is_an_error_that_names_the_known_ones(step, tmp_path):
    with pytest.raises(ValueError, match="png"):
        plot(step, tmp_path / "step.docx")


def test_titles_and_busy_shares_are_those_of_the_step(step):
    figure = picture(step)
    predicted = max(span.end for span in step.predicted)
    # Measured was 1.25 times the prediction, which is a fifth less.
    seconds = show_seconds(1.25 * predicted), show_seconds(predicted)
    found = texts(figure)
    assert f"Step 1: {seconds[0]} measured, {seconds[1]} predicted (20% less)" in found
    for axes, spans in zip(figure.axes, (step.measured, step.predicted), strict=True):
        rows = [label.get_text() for label in axes.get_yticklabels()]
        assert rows == [str(link) for link in Link if not link.only_frees]
        busy = dict.fromkeys(rows, 0.0)
        for span in spans:
            if span.link in busy:
                busy[span.link] += span.end - span.start
        shown = [text.get_text() for text in axes.texts if "%" in text.get_text()]
        length = max(span.end for span in spans)
        assert shown == [f"{busy[row] / length:.0%}" for row in rows]
        binding = max(busy, key=busy.__getitem__)
        assert f"{binding} binds" in axes.get_title(loc="left")
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_an_instruction_has_its_colour_and_idle_is_white(step):
    figure = picture(step)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3] / 255
    above = figure.axes[0]
    rows = [label.get_text() for label in above.get_yticklabels()]
    length = max(span.end for span in step.measured) * 1e3

    def color(link: str, milliseconds: float) -> tuple[float, ...]:
        x, y = above.transData.transform((milliseconds, rows.index(link)))
        return tuple(pixels[int(y), int(x)])

    for span in step.measured:
        if span.link in rows:
            middle = (span.start + span.end) / 2 * 1e3
            assert color(span.link, middle) == pytest.approx(to_rgb(COLORS[span.kind]))
    assert color("nvme read", 0.9 * length) == (1.0, 1.0, 1.0)
    assert color("nvme write", 0.1 * length) == (1.0, 1.0, 1.0)


def drawn(figure: Figure) -> tuple[list[str], int]:
    """The colours of the bars of both panels, and how many bars there are."""
    groups = [bars for axes in figure.axes for bars in axes.findobj(PolyCollection)]
    found = [to_hex(bars.get_facecolor()[0]).upper() for bars in groups]
    return found, sum(len(bars.get_paths()) for bars in groups)


def test_all_instructions_of_a_real_step_are_drawn_in_the_colours_of_their_kinds(
    run_folder,
):
    step = read_trace(run_folder / "trace.json")[-1]
    shown = [s for s in (*step.measured, *step.predicted) if s.kind != "free"]
    kinds = {span.kind for span in shown}
    # Those of a step in which segments keep residuals; two of them had no colour once.
    assert {Pass.KEEPING, Pass.KEPT, Pass.LOSS} <= kinds
    assert {"parameters", "gradients", "update", "norm", "accumulate"} <= kinds
    figure = picture(step)
    colors, count = drawn(figure)
    assert count == len(shown)
    assert set(colors) == {COLORS[kind] for kind in kinds}
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(legend) == kinds


def test_a_kind_of_a_later_version_is_drawn_too(step):
    first, *rest = step.measured
    changed = replace(step, measured=(replace(first, kind="novelty"), *rest))
    colors, count = drawn(picture(changed))
    assert UNKNOWN in colors
    assert count == drawn(picture(step))[1]


def with_every_kind(step: TracedStep) -> TracedStep:
    """The widest legend: a fused step has but one kind."""
    first = step.measured[0]
    kinds = [kind for kind in COLORS if kind != "whole step"]
    more = tuple(replace(first, kind=kind) for kind in kinds)
    return replace(step, measured=(*step.measured, *more))


def on_one_link(step: TracedStep) -> TracedStep:
    """The lowest picture, that of a fused step."""
    only = tuple(span for span in step.measured if span.link == Link.DEVICE)
    return replace(step, measured=only, predicted=only)


@pytest.mark.parametrize("change", [with_every_kind, on_one_link])
def test_no_text_lies_over_another_or_outside(change, step):
    figure = picture(change(step))
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
