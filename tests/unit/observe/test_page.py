"""The page of a run is drawn from what `zinf train` left in its folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command import run as zinf
from tests.runs import Runs
from zinf.cli.train import train_config
from zinf.core.plan import Link, Pass, show_bytes
from zinf.core.program import Tier
from zinf.distributed import Alone
from zinf.observe import read_trace
from zinf.observe.advice import advice
from zinf.observe.colors import COLORS
from zinf.observe.page import run_page
from zinf.observe.record import read_record
from zinf.observe.step_figures import held_curve


def figures_in(html: str) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def steps_drawn(html: str) -> list[int]:
    return figures_in(html)["training"]["data"][0]["x"]


def metrics_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_page_has_the_numbers_of_the_run(runs: Runs) -> None:
    folder = runs.nvme.output
    html, record = run_page(folder), read_record(folder)
    metrics = metrics_in(folder / "metrics.jsonl")
    figures = figures_in(html)
    assert list(figures) == ["training", "speed", "timeline", "held"]
    curves = {trace["name"]: trace for trace in figures["training"]["data"]}
    keys = {"loss": "loss", "learning rate": "learning_rate"}
    for name, key in (keys | {"gradient norm": "grad_norm"}).items():
        assert curves[name]["x"] == list(range(1, 9))
        assert curves[name]["y"] == pytest.approx([m[key] for m in metrics], rel=1e-5)
    assert curves["evaluation loss"]["x"] == [4, 8]
    # 4 samples of 16 tokens, and the token that each of them predicts last.
    expected = 4 * 17 / record.predicted_seconds
    assert figures["speed"]["data"][1]["y"] == pytest.approx([expected] * 2)
    for tier in Tier:
        most = show_bytes(max(m[f"{tier}_bytes"] for m in metrics))
        assert f"{most} of {show_bytes(record.held[tier].budget)}" in html
    budgets = {tier: record.held[tier].budget >> 20 for tier in Tier}
    assert budgets == {Tier.DEVICE: 16, Tier.HOST: 32, Tier.NVME: 64}
    assert "8 of 8 steps" in html and "streamed by segments" in html
    assert f">{record.versions['jax']}</td>" in html
    assert "run.keep_checkpoints" not in record.given
    assert "optimizer.params.lr" in record.given


def test_every_instruction_of_a_real_step_is_drawn_in_the_colour_of_its_kind(
    runs: Runs,
) -> None:
    folder = runs.nvme.output
    step = read_trace(folder / "trace.json")[-1]
    figure = figures_in(run_page(folder))["timeline"]
    for axis, spans in (("x", step.measured), ("x2", step.predicted)):
        bars = [trace for trace in figure["data"] if trace["xaxis"] == axis]
        shown = [span for span in spans if span.kind != "free"]
        kinds = {span.kind for span in shown}
        # Those of a step in which segments keep residuals: some had no colour once.
        assert {Pass.KEEPING, Pass.KEPT, Pass.LOSS, "norm", "accumulate"} <= kinds
        assert {trace["name"] for trace in bars} == kinds
        for trace in bars:
            assert trace["marker"]["color"] == COLORS[trace["name"]]
            of_kind = [span for span in shown if span.kind == trace["name"]]
            assert trace["y"] == [span.link for span in of_kind]
    lanes = [str(link) for link in Link if not link.only_frees]
    assert figure["layout"]["yaxis"]["tickvals"] == lanes


def test_bytes_held_come_back_to_where_they_began_and_stay_below_the_plan(
    runs: Runs,
) -> None:
    # Two microbatches of 2 samples of 17 tokens go, and a loss of each is left.
    batch_bytes, loss_bytes = 2 * 2 * 17 * 4, 2 * 4
    folder = runs.nvme.output
    step, record = read_trace(folder / "trace.json")[-1], read_record(folder)
    for tier in Tier:
        for spans in (step.measured, step.predicted):
            _, held = held_curve(step, spans, tier)
            # The step before left as many updates to this one as it leaves.
            on_host = batch_bytes - loss_bytes if tier == Tier.HOST else 0
            assert held[-1] == step.held_bytes[tier] - on_host
            assert record.held[tier].rest <= min(held)
            assert max(held) <= record.held[tier].peak <= record.held[tier].budget
    assert not any("bench step" in said for said in advice(record, step))


def test_the_command_writes_the_page_into_the_folder_also_when_it_was_moved(
    runs: Runs, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    ignored = shutil.ignore_patterns("checkpoints")
    shutil.copytree(runs.nvme.output, moved, ignore=ignored)
    with (moved / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss"')  # a line that a crash cut off
    result = zinf("report", moved)
    assert result.stdout == f"The run is drawn in {moved / 'report.html'}.\n"
    assert steps_drawn((moved / "report.html").read_text()) == list(range(1, 9))


def test_what_is_no_folder_of_a_run_is_named(runs: Runs, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        result = zinf("report", tmp_path, code=2)
        assert words in result.stderr

    refused("has no run.json, which zinf train writes")
    shutil.copy(runs.nvme.output / "run.json", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    refused("has no step to draw")
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    refused("metrics.jsonl is damaged")
    (tmp_path / "run.json").write_text('{"version": 2}')
    refused("run.json is damaged: version: Input should be 1")


@pytest.mark.slow
def test_a_plan_is_drawn_without_a_run(runs: Runs, tmp_path: Path) -> None:
    drawn, config = tmp_path / "plan.html", runs.nvme.config
    result = zinf("plan", config, "--html", drawn)
    assert f"The plan is drawn in {drawn}." in result.stdout
    figures = figures_in(drawn.read_text())
    assert list(figures) == ["timeline", "held"]
    assert {trace["xaxis"] for trace in figures["timeline"]["data"]} == {"x"}
    assert "a plan, which has not run" in drawn.read_text()
    zinf("plan", config, config, "--html", drawn, code=2)


@pytest.mark.slow
def test_a_second_run_keeps_the_first_and_a_third_goes_on(
    runs: Runs, tmp_path: Path
) -> None:
    """The numbers of the first are moved, and `zinf report` draws them there."""
    output = tmp_path / "again"
    shutil.copytree(runs.nvme.output, output)
    first = (output / "metrics.jsonl").read_bytes()
    given = [f"run.output={output}", "run.evaluate_every=null"]
    given.append(f"memory.nvme=[{tmp_path / 'nvme'}]")
    train_config(runs.nvme.config, [*given, "run.steps=1"], None, 3, Alone())
    assert (output / "run.1" / "metrics.jsonl").read_bytes() == first
    assert steps_drawn(run_page(output / "run.1"))[-1] == 8
    assert steps_drawn(run_page(output)) == [1]
    rest = [*given, "run.steps=2", "run.resume=true"]
    train_config(runs.nvme.config, rest, None, 3, Alone())
    html = run_page(output)
    assert steps_drawn(html) == [1, 2]
    assert "2 of 2 steps" in html and "resumed after step 1" in html
    # The trace is of the first step since then.
    assert "Step 2, by link" in html
