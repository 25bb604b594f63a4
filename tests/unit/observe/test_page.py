"""The page of a run has what the run did, from what `zinf train` left in its folder."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from zinf.cli import app
from zinf.cli.train import train_config
from zinf.distributed import Alone
from zinf.observe import read_trace
from zinf.observe.advice import advice, what_ifs
from zinf.observe.colors import COLORS
from zinf.observe.figures import MAX_POINTS, held_curve, held_figure, training_figure
from zinf.observe.page import page, run_page
from zinf.observe.record import read_record
from zinf.observe.traced import Span, TracedStep
from zinf.plan import Link, show_bytes
from zinf.program import Tier


def figures_in(html: str) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def metrics_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def html(run_folder: Path) -> str:
    return run_page(run_folder)


@pytest.fixture(scope="module")
def figures(html: str) -> dict[str, Any]:
    return figures_in(html)


def test_plotly_knows_every_setting_of_every_figure(figures):
    assert list(figures) == ["training", "speed", "timeline", "held"]
    for figure in figures.values():
        go.Figure(figure)


def test_curves_have_the_numbers_of_every_step(figures, run_folder):
    metrics = metrics_in(run_folder / "metrics.jsonl")
    steps = list(range(1, 9))
    curves = {trace["name"]: trace for trace in figures["training"]["data"]}
    keys = {
        "loss": "loss",
        "learning rate": "learning_rate",
        "gradient norm": "grad_norm",
    }
    for name, key in keys.items():
        assert curves[name]["x"] == steps
        assert curves[name]["y"] == pytest.approx([m[key] for m in metrics], rel=1e-5)
    assert curves["evaluation loss"]["x"] == [4, 8]
    speed, predicted = figures["speed"]["data"]
    expected = [m["tokens_per_second"] for m in metrics]
    assert speed["y"] == pytest.approx(expected, rel=1e-5)
    # 4 samples of 16 tokens, and the token that each of them predicts last.
    tokens = 4 * 17
    seconds = read_record(run_folder).predicted_seconds
    assert predicted["y"] == pytest.approx([tokens / seconds] * 2)


def test_the_timeline_has_each_instruction_in_its_lane_measured_and_planned(
    figures, run_folder
):
    step = read_trace(run_folder / "trace.json")[-1]
    figure = figures["timeline"]
    for axis, spans in (("x", step.measured), ("x2", step.predicted)):
        bars = [trace for trace in figure["data"] if trace["xaxis"] == axis]
        shown = [span for span in spans if span.kind != "free"]
        assert sum(len(trace["x"]) for trace in bars) == len(shown)
        for trace in bars:
            assert trace["marker"]["color"] == COLORS[trace["name"]]
            of_kind = [span for span in shown if span.kind == trace["name"]]
            assert trace["y"] == [span.link for span in of_kind]
            lengths = [1e3 * (span.end - span.start) for span in of_kind]
            is_seconds = max(s.end for s in (*step.measured, *step.predicted)) >= 1
            expected = [x / 1e3 if is_seconds else x for x in lengths]
            assert trace["x"] == pytest.approx(expected, rel=1e-5)
    lanes = [str(link) for link in Link if not link.only_frees]
    assert figure["layout"]["yaxis"]["tickvals"] == lanes
    assert figure["layout"]["xaxis2"]["matches"] == "x"


def test_the_hover_names_instruction_arrays_bytes_and_both_times(figures, run_folder):
    step = read_trace(run_folder / "trace.json")[-1]
    hovers = [
        hover
        for trace in figures["timeline"]["data"]
        if trace["xaxis"] == "x"
        for hover in trace["hovertext"]
    ]
    moved = next(span for span in step.measured if span.link == Link.NVME_READ)
    (hover,) = [text for text in hovers if f"#{moved.instruction} on nvme" in text]
    assert f"<b>{moved.name}</b>" in hover
    assert show_bytes(moved.nbytes) in hover
    assert "<br>measured " in hover and "<br>predicted " in hover
    assert moved.arrays and moved.arrays[0] in hover


def test_bytes_held_come_back_to_where_they_began_and_stay_below_the_plan(run_folder):
    # Two microbatches of 2 samples of 17 tokens go, and a loss of each is left.
    batch_bytes, loss_bytes = 2 * 2 * 17 * 4, 2 * 4
    step, record = read_trace(run_folder / "trace.json")[-1], read_record(run_folder)
    for tier in Tier:
        for spans in (step.measured, step.predicted):
            _, held = held_curve(step, spans, tier)
            # The step before left as many updates to this one as it leaves.
            on_host = batch_bytes - loss_bytes if tier == Tier.HOST else 0
            assert held[-1] == step.held_bytes[tier] - on_host
            assert record.held[tier].rest <= min(held)
            assert max(held) <= record.held[tier].peak <= record.held[tier].budget
    assert max(held_curve(step, step.predicted, Tier.DEVICE)[1]) > 0


def test_a_budget_that_is_near_is_drawn_above_what_is_held(run_folder):
    step = read_trace(run_folder / "trace.json")[-1]
    most = {tier: max(held_curve(step, step.measured, tier)[1]) for tier in Tier}
    near, far = 2 * most[Tier.DEVICE], 1000 * most[Tier.HOST]
    budgets = {Tier.DEVICE: near, Tier.HOST: far, Tier.NVME: 1000 * most[Tier.NVME]}
    figure = held_figure(step, budgets)
    go.Figure(figure)
    (line,) = figure["layout"]["shapes"]
    curve = figure["data"][0]
    assert line["yref"] == "y" and curve["yaxis"] == "y"
    assert line["y0"] == line["y1"] == pytest.approx(2 * max(curve["y"]))
    assert figure["layout"]["yaxis"]["range"][1] > line["y0"]
    assert figures_in(run_page(run_folder))["held"]["layout"]["shapes"] == []


def test_tiers_config_and_versions_are_written_out(html, run_folder):
    record = read_record(run_folder)
    metrics = metrics_in(run_folder / "metrics.jsonl")
    for tier in Tier:
        most = show_bytes(max(m[f"{tier}_bytes"] for m in metrics))
        budget = show_bytes(record.held[tier].budget)
        assert f"{most} of {budget}" in html
    assert "16.0 MiB" in html and "32.0 MiB" in html and "64.0 MiB" in html
    text = html.replace("<wbr>", "")
    for words in (
        "<code>optimizer.params.lr</code>",
        "<code>run.keep_checkpoints</code>",
        "streamed by segments",
        f">{record.versions['jax']}</td>",
        "8 of 8 steps",
    ):
        assert words in text
    assert "run.keep_checkpoints" not in record.given
    assert "optimizer.params.lr" in record.given


def test_nothing_on_the_page_comes_from_elsewhere(html):
    own = (
        html.partition("<script>/**")[0] + html.rpartition("</script>\n<script type")[2]
    )
    assert "http:" not in own and "https:" not in own
    assert "default-src 'none'" in own


def test_the_device_binds_and_its_speed_would_help(run_folder):
    """The rates of this config make the device slow."""
    record, step = read_record(run_folder), read_trace(run_folder / "trace.json")[-1]
    planned = replace(step, measured=())
    said = advice(record, planned)
    assert said[0].startswith("Computing binds: the device is planned to be busy")
    best = max(what_ifs(step.predicted), key=lambda one: one.gain)
    assert best.links == (Link.DEVICE,)
    # Half of the busy time at most is saved.
    assert 0 < best.gain <= best.busy_share / 2 + 1e-9
    assert f"{best.gain:.0%} off the step" in said[1]
    assert any("float32" in sentence for sentence in said)
    assert not any("bench step" in sentence for sentence in said)


def test_a_step_that_waits_for_drives_is_told_of_drives_and_a_full_host(run_folder):
    record, step = read_record(run_folder), read_trace(run_folder / "trace.json")[-1]
    slow = tuple(
        replace(span, end=span.start + 1.0) if span.link == Link.NVME_READ else span
        for span in step.predicted
    )
    full = record.held[Tier.HOST].model_copy(update={"budget": 1, "peak": 1})
    changed = record.model_copy(update={"held": record.held | {Tier.HOST: full}})
    said = advice(changed, replace(step, measured=(), predicted=slow))
    assert said[0].startswith("The nvme read link binds")
    assert "memory.nvme" in said[1]
    assert "raise memory.host" in said[2]


def test_a_step_that_is_one_executable_is_not_told_of_links(run_folder):
    whole = Span(0, "device", "whole step", "run the whole step", 1.0, 3.0, 0, ())
    step = TracedStep(1, (whole,), (replace(whole, start=0.0, end=0.5),))
    said = " ".join(advice(read_record(run_folder), step))
    assert "the device was busy for 67% of the step" in said
    # It works for 2 of 3 seconds, and would for 1.
    assert "A device twice as fast would take 33% off the step." in said
    assert "waits for the batch and for Python" in said
    assert "links" not in said and "bench" not in said


def test_a_name_cannot_end_the_script_that_it_is_in(run_folder):
    record, step = read_record(run_folder), read_trace(run_folder / "trace.json")[-1]
    first, *rest = step.predicted
    named = replace(first, name="</script><script>alert(1)</script>")
    changed = replace(step, predicted=(named, *rest))
    title = record.model_copy(update={"title": "<b>a</b>.yaml: 1 parameter"})
    found = page(title, metrics_in(run_folder / "metrics.jsonl"), changed)
    assert found.count("<script") == run_page(run_folder).count("<script")
    assert "<h1>&lt;b&gt;a&lt;/b&gt;.yaml</h1>" in found


def test_a_long_run_is_drawn_by_means_of_equal_stretches():
    count = 2 * MAX_POINTS + 1
    metrics = [{"step": i, "loss": float(i % 2)} for i in range(1, count + 1)]
    (curve,) = training_figure(metrics)["data"]
    assert len(curve["x"]) == len(curve["y"]) <= MAX_POINTS
    assert curve["x"][-1] == count
    # Three steps each: 1, 0, 1 and 0, 1, 0 in turn.
    assert curve["y"][:2] == pytest.approx([2 / 3, 1 / 3], rel=1e-5)


def test_the_command_writes_the_page_into_the_folder_also_when_it_was_moved(
    run_folder, tmp_path
):
    moved = tmp_path / "moved"
    ignored = shutil.ignore_patterns("checkpoints")
    shutil.copytree(run_folder, moved, ignore=ignored)
    with (moved / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss"')  # a line that a crash cut off
    result = CliRunner().invoke(app, ["report", str(moved)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"The run is drawn in {moved / 'report.html'}.\n"
    written = (moved / "report.html").read_text()
    assert figures_in(written)["training"]["data"][0]["x"] == list(range(1, 9))


def test_what_is_no_folder_of_a_run_is_named(tmp_path, run_folder):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no run.json, which zinf train writes" in result.stderr
    shutil.copy(run_folder / "run.json", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no step to draw" in result.stderr
    (tmp_path / "run.json").write_text('{"version": 2}')
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "run.json cannot be read" in result.stderr


@pytest.mark.slow
def test_a_plan_is_drawn_without_a_run(small_config, tmp_path):
    drawn = tmp_path / "plan.html"
    result = CliRunner().invoke(app, ["plan", str(small_config), "--html", str(drawn)])
    assert result.exit_code == 0, result.output
    assert f"The plan is drawn in {drawn}." in result.stdout
    written = drawn.read_text()
    figures = figures_in(written)
    assert list(figures) == ["timeline", "held"]
    for figure in figures.values():
        go.Figure(figure)
    assert {trace["xaxis"] for trace in figures["timeline"]["data"]} == {"x"}
    assert "a plan, which has not run" in written
    again = ["plan", str(small_config), str(small_config), "--html", str(drawn)]
    assert CliRunner().invoke(app, again).exit_code == 2


@pytest.mark.slow
def test_a_second_run_keeps_what_is_told_of_the_first(
    small_config, run_folder, tmp_path
):
    """The numbers of the first are moved, and `zinf report` draws them there."""
    output = tmp_path / "again"
    shutil.copytree(run_folder, output)
    first = (output / "metrics.jsonl").read_bytes()
    given = [f"run.output={output}", "run.steps=1", "run.evaluate_every=null"]
    train_config(small_config, given, None, 3, Alone())
    assert (output / "run.1" / "metrics.jsonl").read_bytes() == first
    assert len(metrics_in(output / "metrics.jsonl")) == 1
    assert figures_in(run_page(output / "run.1"))["training"]["data"][0]["x"][-1] == 8
    assert figures_in(run_page(output))["training"]["data"][0]["x"] == [1]


@pytest.mark.slow
def test_a_run_that_goes_on_is_drawn_from_its_first_step(small_config, tmp_path):
    output = tmp_path / "resumed"
    given = [f"run.output={output}", "run.evaluate_every=null"]
    train_config(small_config, [*given, "run.steps=2"], None, 1, Alone())
    rest = ["run.steps=3", "run.resume=true"]
    train_config(small_config, [*given, *rest], None, 1, Alone())
    html = run_page(output)
    assert figures_in(html)["training"]["data"][0]["x"] == [1, 2, 3]
    assert "3 of 3 steps" in html and "resumed after step 2" in html
    # The trace is of the first step since then.
    assert "Step 3, by link" in html
