"""Configs as tables in YAML files, and what they come to as text for golden files."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from zinf.core.config import Config, grouping
from zinf.core.config.section import Section
from zinf.core.config.settings import Settings
from zinf.core.config.typed import TypedSection

FOLDER = Path(__file__).parent
PUBLIC = {path.stem: path for path in sorted((FOLDER / "public").glob("*.json"))}
# Lists of keys in messages; the whole list is checked where it is short.
LISTED = re.compile(r"((?:Allowed keys here:|with keys among) .{50})[^.]*\.")
LONGEST_TITLE = 160


def table(name: str) -> list[dict[str, Any]]:
    """The configs of a file beside this one."""
    return yaml.safe_load((FOLDER / name).read_text())


def title(raw: Mapping[str, Any]) -> str:
    """A config on one line."""
    return yaml.safe_dump(
        json.loads(json.dumps(raw)),
        default_flow_style=True,
        width=10**6,
        sort_keys=False,
    ).strip()


def entry(raw: Mapping[str, Any], lines: list[str]) -> str:
    """A config, and below it lines about it; what is long is cut short."""
    name = title(raw)
    name = name if len(name) <= LONGEST_TITLE else f"{name[:LONGEST_TITLE]}..."
    return "\n  ".join([name, *(LISTED.sub(r"\1...", line) for line in lines)])


def properties(config: Config) -> Iterator[tuple[str, Any]]:
    """What the rest of zinf reads of a config, by name."""
    for name, found in vars(Settings).items():
        if isinstance(found, property) and not name.startswith("_"):
            yield name, getattr(config, name)
    yield "optimizer.type", config.optimizer and config.optimizer.type
    yield "data.paths", config.data.paths


def values(raw: Mapping[str, Any], **named: Any) -> list[str]:
    """The properties in which a config differs from an empty one, a line each."""
    usual, config = dict(properties(Config())), Config.load(raw, **named)
    lines = [
        f"{name} {shown(value)}"
        for name, value in properties(config)
        if value != usual[name]
    ]
    found = grouping(raw)
    return [*lines, str(found)] if found.is_given else lines


def shown(value: Any) -> str:
    """A value without the class of paths, which depends on the system."""
    return re.sub(r"PosixPath\('([^']*)'\)", r"\1", repr(value))


def sections(
    section: type[Section] = Config, path: tuple[str, ...] = ()
) -> Iterator[tuple[type[Section], tuple[str, ...], dict[str, Any]]]:
    """Every section class, its path, and what a config needs beside the path."""
    yield section, path, {}
    for key in section.model_fields:
        below = section.section_at(key, {})
        if below is None:
            continue
        if not issubclass(below, TypedSection):
            yield from sections(below, (*path, key))
            continue
        for name, params in below.KNOWN.items():
            yield below, (key,), {key: {"type": name}}
            yield params, (key, "params"), {key: {"type": name}}


# Keys of the data section that not all objectives read, with unusual values.
OF_SOME: dict[str, Any] = {
    "assistant_only": True,
    "beta": 0.7,
    "bin_dtype": "int32",
    "cache": "cache",
    "center_rewards_coefficient": 0.5,
    "completion_only": False,
    "desirable_weight": 2.0,
    "evaluation_paths": ["lines.jsonl"],
    "field": "content",
    "glob": "*.txt",
    "images": 3,
    "labels": ["no", "yes"],
    "max_buckets": 4,
    "packing": True,
    "simpo_gamma": 0.9,
    "too_long": "drop",
    "truncate": True,
    "undesirable_weight": 3.0,
    "validation_fraction": 0.5,
}
