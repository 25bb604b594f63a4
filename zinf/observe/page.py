"""A run or a plan as one HTML page that needs no other files and no network."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from zinf.core.config.section import dotted
from zinf.core.plan import show_bytes, show_seconds
from zinf.core.program import Tier
from zinf.core.text.complaint import naming
from zinf.core.text.json_text import from_json
from zinf.core.text.tables import html_table
from zinf.observe.advice import advice, what_ifs
from zinf.observe.colors import colors
from zinf.observe.figure_layout import Figure
from zinf.observe.figures import speed_figure, training_figure
from zinf.observe.record import RUN, RunRecord, read_record
from zinf.observe.step_figures import TIER_COLORS, held_figure, timeline_figure
from zinf.observe.traced import TracedStep, read_trace
from zinf.observe.writer import Metrics

FREE = "free"
EVERY_STEP = (
    *("step", "step_seconds", "tokens_per_second"),
    *(f"{tier}_bytes" for tier in Tier),
)
# A loss and a norm that are not finite are null.
NULLABLE = ("loss", "grad_norm", "learning_rate", "evaluation_loss")


def run_page(folder: Path) -> str:
    """The page of a run, from the files that `zinf train` wrote into its folder.

    Raises:
        OSError: a file of the run is absent or cannot be read.
        ValueError: a file is damaged, or the run ended before its first step was over.
    """
    record = read_record(folder)
    metrics = _read_metrics(_beside(record.metrics, folder))
    if not metrics:
        raise ValueError(
            f"{folder} has no step to draw: the run ended before its first step was "
            "over. Train on, or draw what is planned: zinf plan CONFIG --html FILE."
        )
    step = read_trace(_beside(record.trace, folder))[-1]
    return page(record, metrics, step)


def page(record: RunRecord, metrics: Sequence[Metrics], step: TracedStep) -> str:
    """The page as HTML; without metrics it shows a plan that has not run."""
    figures: dict[str, Figure] = {}
    parts = [_heading(record, metrics), _facts(record, metrics, step)]
    if metrics:
        figures["training"] = training_figure(metrics)
        parts += [_title("Loss and learning rate"), _figure("training")]
        tokens = median(m["tokens_per_second"] * m["step_seconds"] for m in metrics)
        figures["speed"] = speed_figure(metrics, tokens / record.predicted_seconds)
        parts += [_title("Speed"), _figure("speed")]
    parts += [_title("What binds, and what would help"), *_binding(record, step)]
    figures["timeline"] = timeline_figure(step)
    parts += [*_timeline_words(step), _figure("timeline")]
    parts += [_title("Bytes held, by tier"), *_held(record, metrics)]
    if step.held_bytes:
        budgets = {tier: record.held[tier].budget for tier in Tier}
        figures["held"] = held_figure(step, budgets)
        how = "at the times measured" if step.measured else "at the times predicted"
        parts += [
            _note(f"What the tiers hold in the course of that step, {how}."),
            _figure("held"),
        ]
    parts += [_title("Config"), *_config(record)]
    parts += [_title("Versions"), _versions(record)]
    here = Path(__file__).parent
    return Template((here / "page.html").read_text("utf-8")).substitute(
        title=escape(record.title.partition(":")[0]),
        body="\n".join(parts),
        plotly=(files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8"),
        # Escaped, because "</script>" in a name would end the script element.
        figures=json.dumps(figures, separators=(",", ":")).replace("</", "<\\/"),
    )


def write_page(html: str, path: Path) -> None:
    """Writes a page; replaces a file of that name.

    Raises:
        OSError: the page cannot be written; the earlier file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with naming(fresh):
        fresh.write_text(html, encoding="utf-8")
    fresh.replace(path)


def _beside(path: Path | None, folder: Path) -> Path:
    """The file of this name in `folder` (a run may have been moved), else `path`."""
    if path is None:
        raise ValueError(
            f"{folder / RUN} names no metrics or no trace, so it is of a plan. Name "
            "the folder of a run."
        )
    moved = folder / path.name
    return moved if moved.exists() else path


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of each line; an incomplete last line (after a crash) is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    found = []
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            found.append(_metrics(line))
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged in line {number}: {error}. Delete the line."
            ) from error
    return found


def _metrics(line: bytes) -> dict[str, Any]:
    """The metrics of a line.

    Raises:
        ValueError: it is no JSON, or no mapping of numbers and lists, or lacks one that
            every step has.
    """
    found = from_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"it is no mapping, but {found!r:.40}")
    for key in dict.fromkeys([*EVERY_STEP, *found]):
        value = found.get(key)
        is_number = isinstance(value, int | float) and abs(value) < 2**63
        is_other = value is None or (isinstance(value, list) and key not in NULLABLE)
        if not is_number and (key in EVERY_STEP or not is_other):
            raise ValueError(f"{key} = {value!r:.40} is no number")
    return found


def _heading(record: RunRecord, metrics: Sequence[Metrics]) -> str:
    name, _, size = record.title.partition(": ")
    if metrics:
        state = f"{metrics[-1]['step']:,} of {record.num_steps:,} steps"
        state += f", begun {record.begun}" if record.begun else ""
        if record.after_step:
            state += f", resumed after step {record.after_step:,}"
    else:
        state = "a plan, which has not run"
    return (
        f"<h1>{escape(name)}</h1>\n"
        f"<p class='note'>{escape(size)}<br>{escape(state)}</p>"
    )


def _facts(record: RunRecord, metrics: Sequence[Metrics], step: TracedStep) -> str:
    predicted = show_seconds(record.predicted_seconds)
    found: list[tuple[str, str, str]] = []
    if metrics:
        losses = [m["loss"] for m in metrics if m.get("loss") is not None]
        if losses:
            found.append(("loss", f"{losses[-1]:.4f}", f"{losses[0]:.4f} at first"))
        evaluated = [m for m in metrics if m.get("evaluation_loss") is not None]
        if evaluated:
            newest = evaluated[-1]
            text = f"{newest['evaluation_loss']:.4f}"
            found.append(("evaluation loss", text, f"after step {newest['step']:,}"))
        rate = median(m["tokens_per_second"] for m in metrics)
        found.append(("tokens a second", f"{rate:,.0f}", "median of all steps"))
        seconds = median(m["step_seconds"] for m in metrics)
        found.append(("a step", show_seconds(seconds), f"predicted {predicted}"))
    else:
        rate = record.num_tokens / record.predicted_seconds
        found.append(("a step", predicted, "predicted"))
        found.append(("tokens a second", f"{rate:,.0f}", "predicted"))
        count = record.resolved["instructions of a step"]
        found.append(("instructions", count, record.resolved["execution"]))
    spans = step.measured or step.predicted
    busiest = max(
        what_ifs(spans), key=lambda one: (len(one.links) == 1, one.busy_share)
    )
    share = f"busy {busiest.busy_share:.0%} of a step"
    found.append(("binds", busiest.name, share))
    skipped = sum(bool(m.get("skipped")) for m in metrics)
    if skipped:
        found.append(("skipped", f"{skipped:,}", "steps: gradients were not finite"))
    items = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        f"<small>{escape(more)}</small></dd></div>"
        for name, value, more in found
    )
    return f"<dl class='facts'>\n{items}\n</dl>"


def _binding(record: RunRecord, step: TracedStep) -> list[str]:
    sentences = "\n".join(f"<li>{escape(x)}</li>" for x in advice(record, step))
    rows = [
        (one.name, f"{one.busy_share:.0%}", f"{max(0.0, one.gain):.0%}")
        for one in sorted(
            what_ifs(step.measured or step.predicted), key=lambda one: -one.gain
        )
    ]
    head = ("link", "busy", "saved if twice as fast")
    return [
        f"<ul class='advice'>\n{sentences}\n</ul>",
        html_table(rows, head, numbers=(1, 2)),
        _note(
            "Of the time of a step. What would be saved is found by playing the "
            "instructions of the step again on a clock, with that link faster."
        ),
    ]


def _timeline_words(step: TracedStep) -> list[str]:
    which = f"Step {step.number}, by link" if step.measured else "A step, by link"
    kinds = colors(
        span.kind for span in (*step.measured, *step.predicted) if span.kind != FREE
    )
    items = "".join(
        f"<li><i style='background:{color}'></i>{escape(kind)}</li>"
        for kind, color in kinds.items()
    )
    return [
        _title(which),
        _note(
            "White is idle. Point at an instruction, or tap it, for its arrays, bytes "
            "and times. Drag over a stretch of time to zoom in, and double-click to "
            "see the whole step again; on a phone the buttons zoom. What is shorter "
            "than a pixel is drawn a pixel wide."
        ),
        f"<ul class='legend'>{items}</ul>",
    ]


def _held(record: RunRecord, metrics: Sequence[Metrics]) -> list[str]:
    parts = []
    for tier in Tier:
        planned = record.held[tier]
        if not (planned.peak or planned.rest):
            continue
        measured = max((m[f"{tier}_bytes"] for m in metrics), default=None)
        most = planned.peak if measured is None else measured
        budget = max(planned.budget, 1)
        words = [f"planned {show_bytes(planned.peak)}"] if metrics else []
        words.append(f"{show_bytes(planned.rest)} at rest")
        mark = (
            f"<u style='left:{_percent(planned.peak, budget)}'></u>" if metrics else ""
        )
        parts.append(
            f"<div class='tier' id='tier-{tier}'><div class='label'>"
            f"<span><b>{tier}</b> {show_bytes(most)} of {show_bytes(planned.budget)} "
            f"({most / budget:.0%})</span>"
            f"<span class='note'>{', '.join(words)}</span></div>"
            f"<div class='bar'><i style='width:{_percent(most, budget)};"
            f"background:{TIER_COLORS[tier]}'></i>{mark}</div></div>"
        )
    what = (
        "The most that any step held, as a bar; the mark is what was planned. The "
        "whole width is the budget, which is never exceeded."
        if metrics
        else "The most that a step holds. The whole width is the budget."
    )
    return [_note(what), *parts]


def _percent(amount: int, whole: int) -> str:
    return f"{100 * min(1.0, amount / whole):.2f}%"


def _config(record: RunRecord) -> list[str]:
    keys, given = dotted(record.config), set(record.given)
    own = [(key, _shown(keys[key])) for key in keys if key in given]
    rest = [(key, _shown(keys[key])) for key in keys if key not in given]
    return [
        *(f"<p>{escape(notice)}</p>" for notice in record.notices),
        _note("What automatic settings became:"),
        html_table(record.resolved.items()),
        _note("Keys that the config has:"),
        html_table(own, code=True),
        f"<details><summary>{len(rest)} more keys, at their defaults</summary>"
        f"{html_table(rest, code=True)}</details>",
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _versions(record: RunRecord) -> str:
    tables = html_table(record.versions.items()), html_table(record.machine.items())
    return f"<div class='columns'>{tables[0]}{tables[1]}</div>"


def _title(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>"


def _figure(name: str) -> str:
    return f"<div id='{name}'></div>"
