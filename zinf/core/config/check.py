"""`zinf config check`: what zinf does with each key of a config, and why."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from zinf.core.config.arguments import Key, default_values
from zinf.core.config.config import Config, check_raw
from zinf.core.config.grouping import grouping
from zinf.core.config.load import override, raw_config
from zinf.core.config.messages import Problem, dotted
from zinf.core.config.nearest import did_you_mean
from zinf.core.config.notices import notices, shown
from zinf.core.config.optimizer import AdamParams
from zinf.core.config.scheduler import DecayParams
from zinf.core.config.section import Section
from zinf.core.config.status import AUTO, Status, status_of
from zinf.core.text.tables import html_table

LONGEST_VALUE = 24
ABSENT = "As if absent. "


@dataclass(frozen=True, slots=True)
class Row:
    """What zinf does with one key of the file."""

    key: str
    value: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A row per key in file order, what is wrong, and what is worth knowing.

    Printed, and in a notebook, it is a table.
    """

    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        """Whether `Config.load` takes the file."""
        return not self.problems

    def __str__(self) -> str:
        table = [(r.key, r.value, str(r.status), r.reason) for r in self.rows]
        widths = [max((len(row[i]) for row in table), default=0) for i in range(3)]
        lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in table]
        lines += [f"error: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """In a notebook: the rows as a table, with errors and notes below it."""
        rows = [(r.key, r.value, str(r.status), r.reason) for r in self.rows]
        table = html_table(rows, ("key", "value", "status", "what zinf does"))
        below = [("error", str(problem)) for problem in self.problems]
        below += [("note", note) for note in self.notes]
        lines = "".join(
            f"<li><b>{kind}</b>: {escape(text)}</li>" for kind, text in below
        )
        return f"{table}<ul>{lines}</ul>" if lines else table


def report(
    source: Mapping[str, Any] | str | Path | Config | None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
) -> Report:
    """What zinf does with each key of `source`, also when it cannot be loaded.

    Args:
        overrides: "a.b=value" each, on top.
        world_size: data-parallel devices, for batch-size arithmetic; None: as many as
            the mesh of the config has, or 1 if that takes all devices.

    Raises:
        FileNotFoundError, ValueError: there is no file, or it is not YAML or JSON.
    """
    raw = override(raw_config(source), overrides)
    asked = grouping(raw).num_data_parallel if world_size is None else world_size
    found = check_raw(raw, world_size=asked or 1)
    return Report(
        rows=tuple(_with_choices(_rows(Config, raw), _chosen(raw, found.config))),
        problems=found.problems,
        notes=tuple(_notes(raw, found.config, knows_devices=asked is not None)),
    )


def _rows(
    section: type[Section], raw: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[Row]:
    for key, value in raw.items():
        path = (*above, str(key))
        below = section.section_at(key, raw)
        if below is not None and isinstance(value, Mapping) and value:
            yield from _rows(below, value, path)
        else:
            status, reason = _classified(section, key, value)
            yield from _leaves(path, value, status, reason)


def _chosen(raw: Mapping[str, Any], config: Config | None) -> dict[Key, Any]:
    """Keys that are "auto" and their values, also of a config that is refused."""
    return default_values(raw) if config is None else config.chosen


def _with_choices(rows: Iterable[Row], chosen: Mapping[Key, Any]) -> Iterator[Row]:
    """The rows; where "auto" was replaced, the reason names the value."""
    by_name = {dotted(key): shown(value) for key, value in chosen.items()}
    for row in rows:
        if row.key in by_name:
            reason = row.reason.removeprefix(ABSENT)
            row = replace(row, reason=f"Chosen here: {by_name[row.key]}. {reason}")
        yield row


def _leaves(
    path: tuple[str, ...], value: Any, status: Status, reason: str
) -> Iterator[Row]:
    """Rows of a key that is no section of zinf: one per value below it."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves((*path, str(key)), below, status, reason)
    else:
        yield Row(dotted(path), _shown(value), status, reason)


def _classified(section: type[Section], key: str, value: Any) -> tuple[Status, str]:
    reason = section.description_of(key)
    row, field = section.UNREAD.get(key), section.model_fields.get(key)
    if row is not None:
        is_lack = row.status in (Status.UNSUPPORTED, Status.NO_EFFECT)
        if is_lack and not row.asks(value):
            return Status.AUTOMATIC, "This value asks for nothing that zinf lacks."
        return row.status, reason
    if field is None:
        hint = did_you_mean(str(key), section.known_keys())
        return Status.UNKNOWN, f"There is no such key here.{hint}"
    status = status_of(field)
    if value == "auto" and status is Status.USED and AUTO in field.metadata:
        return Status.AUTOMATIC, f"{ABSENT}{reason}"
    return status, reason


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _notes(
    raw: Mapping[str, Any], config: Config | None, *, knows_devices: bool
) -> Iterator[str]:
    clipping = raw.get("gradient_clipping")
    if clipping is None:
        yield (
            "zinf clips only when told to. DeepSpeed clips the global gradient norm at "
            "1.0 when gradient_clipping is absent: set it to 1.0 for the same training."
        )
    if config is None:
        return
    yield from notices(config)
    yield _batch_note(config, knows_devices)
    yield from _training_notes(config)
    yield from _memory_notes(config)


def _batch_note(config: Config, knows_devices: bool) -> str:
    if config.batch_size is None:
        return "The batch size is that of the first batch."
    devices = f"each of {config.world_size} devices"
    if config.world_size == 1:
        devices = "one device"
    if not knows_devices:
        devices += ". mesh.fsdp does not say how many devices there are"
    return (
        f"One step is {config.batch_size} samples: {config.num_microbatches} "
        f"microbatches of {config.microbatch_size} on {devices}."
    )


def _training_notes(config: Config) -> Iterator[str]:
    yield f"Compute is in {config.compute_dtype}; masters stay in float32."
    optimizer = config.optimizer
    params = optimizer.params if optimizer and optimizer.type == "Adam" else None
    if isinstance(params, AdamParams):
        kind = "is AdamW" if params.adam_w_mode else "has an L2 penalty, as in torch"
        mode = _shown(params.adam_w_mode)
        yield f"Adam with adam_w_mode {mode} (DeepSpeed's default is true) {kind}."
    scheduler = config.scheduler.params if config.scheduler else None
    if isinstance(scheduler, DecayParams):
        total = scheduler.total_num_steps or config.run.steps
        if total < scheduler.warmup_num_steps:
            yield (
                f"The warm-up takes {scheduler.warmup_num_steps} steps, but the run "
                f"ends after {total}."
            )


def _memory_notes(config: Config) -> Iterator[str]:
    tiers = {"Parameters": config.param_tier, "Optimizer state": config.optimizer_tier}
    for what, tier in tiers.items():
        where = f"the {tier} tier" if tier else "the fastest tier with room"
        yield f"{what}: on {where}."
