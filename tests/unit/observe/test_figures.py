"""The page of a run: its figures, sentences and tables, of one fixed step.

The golden files have a line for each curve, axis, label and element of the page.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from tests.golden import Golden
from tests.unit.observe.cases import metrics_of, record_of, step_of
from zinf.core.plan import Link
from zinf.core.program import Tier
from zinf.observe.advice import advice, what_ifs
from zinf.observe.figures import MAX_POINTS, speed_figure, training_figure
from zinf.observe.page import page
from zinf.observe.step_figures import (
    SHOWN_ARRAYS,
    held_curve,
    held_figure,
    timeline_figure,
)
from zinf.observe.traced import Span, TracedStep

METRICS = [metrics_of(n, evaluation_loss=n / 8 if n % 2 else None) for n in range(1, 6)]
BUDGETS = {tier: held.budget for tier, held in record_of().held.items()}


# What all figures share, which the golden file has once.
STYLE = "font", "paper_bgcolor", "plot_bgcolor", "showlegend", "hoverlabel", "modebar"


def lines_of(name: str, figure: dict[str, Any]) -> Iterator[str]:
    go.Figure(figure)  # Plotly refuses a setting that it does not know.
    yield name
    usual = training_figure(METRICS)["layout"]
    for key, value in (("data", figure["data"]), *figure["layout"].items()):
        if key in STYLE and name != "training" and value == usual[key]:
            continue
        for each in value if isinstance(value, list) else [value]:
            yield f"  {key}: {json.dumps(each)}"


def figures() -> dict[str, dict[str, Any]]:
    step = step_of()
    unknown = [{**metrics, "grad_norm": None} for metrics in METRICS]
    return {
        "training": training_figure(METRICS),
        "training, one step without a norm": training_figure(unknown[1:2]),
        "speed": speed_figure(METRICS, 250.0),
        "speed, not predicted": speed_figure(METRICS[:1], None),
        "timeline": timeline_figure(step),
        "timeline of a plan": timeline_figure(replace(step, measured=())),
        "held": held_figure(step, BUDGETS),
        "held, of a plan": held_figure(replace(step, measured=()), BUDGETS),
    }


def test_figures_have_the_numbers_of_metrics_and_steps(golden: Golden) -> None:
    lines = [line for name, x in figures().items() for line in lines_of(name, x)]
    golden.check("figures.txt", "\n".join(lines))


@pytest.mark.parametrize("is_plan", [False, True], ids=["run", "plan"])
def test_the_page_has_what_the_run_did(golden: Golden, is_plan: bool) -> None:
    record, step = record_of(after_step=0 if is_plan else 2), step_of()
    metrics = () if is_plan else [*METRICS, metrics_of(6, skipped=True)]
    html = page(record, metrics, replace(step, measured=()) if is_plan else step)
    body = html.partition("<body>")[2].partition("<noscript>")[0]
    name = "plan.html.txt" if is_plan else "run.html.txt"
    golden.check(name, body.strip().replace("</tr><tr>", "</tr>\n<tr>"))
    own = html.partition("<script>/**")[0] + html.rpartition("</script>\n<script")[2]
    assert "http:" not in own and "https:" not in own
    assert "default-src 'none'" in own


def span(link: str, kind: str, start: float, end: float, *after: int) -> Span:
    number = len(after) and after[-1] + 1
    return Span(number, link, kind, kind, start, end, 0, after)


def busy(link: str, share: float, kind: str = "backward") -> TracedStep:
    """A step of 1 s in which a link is busy, and the device for the rest."""
    spans = span(link, kind, 0.0, share), span("device", "forward", share, 1.0, 0)
    return TracedStep(1, spans, spans)


def test_advice_names_what_binds_and_what_would_help(golden: Golden) -> None:
    step, record = step_of(), record_of()
    full = {
        tier: held.model_copy(update={"peak": 9, "budget": 10})
        for tier, held in record.held.items()
    }
    half = {**record.resolved, "dtype of computing": "bfloat16"}
    # Four links take turns, so that each of them is busy for a little of the step.
    names = "h2d", "d2h", "host", "device"
    turns = tuple(
        replace(span(names[n % 4], "x", n, n + 1), instruction=n) for n in range(48)
    )
    even = TracedStep(1, turns, turns)
    fused = busy("device", 0.5, "whole step")
    waiting = replace(fused, measured=(replace(fused.measured[0], start=0.21),))
    working = replace(fused, measured=(replace(fused.measured[0], start=0.0),))
    cases = {
        "planned": (record, replace(step, measured=())),
        "by measured rates": (record_of(has_measured_rates=True), step),
        "20% less than measured": (record, step),
        "half of what was measured": (record, step_of(2.0)),
        "twice what was measured": (record, step_of(0.5)),
        "nvme": (record, busy("nvme read", 0.9)),
        "nvme, full": (
            record.model_copy(update={"held": full}),
            busy("nvme write", 0.9),
        ),
        "copies": (record, busy("d2h", 0.9)),
        "copies, full": (record.model_copy(update={"held": full}), busy("h2d", 0.9)),
        "updates": (record, busy("host", 0.9)),
        "computing": (record, busy("device", 0.9)),
        "in bf16": (record.model_copy(update={"resolved": half}), busy("device", 0.0)),
        "no link": (record, even),
        "one executable that waits": (record, waiting),
        "one executable that works": (record, working),
    }
    lines = ["\n  ".join([name, *advice(*case)]) for name, case in cases.items()]
    golden.check("advice.txt", "\n".join(lines))


def test_what_would_be_saved_is_at_most_half_of_the_busy_time() -> None:
    found = what_ifs(step_of().measured)
    assert len(found) == len([link for link in Link if not link.only_frees]) + 1
    for one in found:
        assert (
            -1e-9
            <= one.gain
            <= sum(other.busy_share for other in found if other.links[0] in one.links)
            / 2
            + 1e-9
        )
    assert found[-1].name == "nvme, both ways"


def test_bytes_held_are_those_of_the_plan() -> None:
    """The step gives back what it took, and the gradient that the last one left."""
    step = step_of()
    for tier, late in ((Tier.DEVICE, 0), (Tier.HOST, 2_000_000), (Tier.NVME, 0)):
        times, held = held_curve(step, step.measured, tier)
        assert held[-1] == step.held_bytes[tier] - late
        assert list(times) == sorted(times)
    # Both passes: the parameter, with a workspace or a gradient beside it.
    assert max(held_curve(step, step.measured, Tier.DEVICE)[1]) == 6_000_000


def test_changes_at_the_same_time_are_one() -> None:
    """A free that seems to come a nanosecond late does not raise the peak."""
    first = span("device", "a", 0.0, 1.0)
    first = replace(first, allocates={"device": 5}, frees={"device": 5})
    for late, peak in ((4e-9, 5), (-6e-9, 10)):
        begin = 1.0 + (-4e-9 if late > 0 else late)
        second = replace(span("device", "b", begin, 2.0), allocates={"device": 5})
        step = TracedStep(1, (first, second), (), {"device": 0})
        assert max(held_curve(step, step.measured, Tier.DEVICE)[1]) == peak


def test_a_budget_is_drawn_if_the_peak_is_near() -> None:
    step = step_of()
    most = max(held_curve(step, step.measured, Tier.HOST)[1])
    for budget, is_drawn in ((most * 10 // 3, True), (most * 10 // 3 + 10, False)):
        budgets = dict.fromkeys(Tier, 10**15) | {Tier.HOST: budget}
        assert bool(held_figure(step, budgets)["layout"]["shapes"]) == is_drawn


def test_a_name_cannot_end_the_script_that_it_is_in() -> None:
    step, record = step_of(), record_of()
    usual = page(record, METRICS, step)
    first, *rest = step.predicted
    bad = "</script><script>alert(1)</script>"
    changed = replace(step, predicted=(replace(first, name=bad), *rest))
    title = record.model_copy(update={"title": "<b>a</b>.yaml: 1 parameter"})
    found = page(title, METRICS, changed)
    assert found.count("<script") == usual.count("<script")
    assert "<h1>&lt;b&gt;a&lt;/b&gt;.yaml</h1>" in found


def test_a_long_list_of_arrays_and_a_long_name_are_cut_short() -> None:
    step = step_of()
    first, *rest = step.predicted
    for count, words in ((SHOWN_ARRAYS, "a5"), (SHOWN_ARRAYS + 2, "and 2 more arrays")):
        arrays = tuple(f"a{n}" for n in range(count))
        long = replace(first, arrays=arrays, name="n" * 23 + "-" + "m" * 23)
        figure = timeline_figure(replace(step, predicted=(long, *rest)))
        hovers = [text for bars in figure["data"] for text in bars["hovertext"]]
        hover = next(text for text in hovers if "nnn" in text)
        assert hover.endswith(words)
        assert hover.startswith(f"<b>{'n' * 23}…{'m' * 23}</b>")


def test_a_long_run_is_drawn_by_means_of_equal_stretches() -> None:
    count = 2 * MAX_POINTS + 1
    metrics = [{"step": i, "loss": float(i % 2)} for i in range(1, count + 1)]
    (curve,) = training_figure(metrics)["data"]
    assert len(curve["x"]) == len(curve["y"]) <= MAX_POINTS
    assert curve["x"][-1] == count
    # Three steps each: 1, 0, 1 and 0, 1, 0 in turn.
    assert curve["y"][:2] == pytest.approx([2 / 3, 1 / 3], rel=1e-5)
