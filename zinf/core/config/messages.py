"""Messages about a config: every problem has its full key path and what is allowed."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zinf.core.config.nearest import did_you_mean, nearest, unknown_key
from zinf.core.config.opaque import known_below
from zinf.core.config.section import Section, Violations
from zinf.core.text.complaint import one_line

KeyPath = tuple[str | int, ...]
QUOTED = re.compile(r"'([^']*)'")
WORDS = {
    "Input should be": "must be",
    "a valid dictionary": "a mapping",
    "a valid tuple": "a list",
    "String should have": "must have",
    "Tuple should have": "must have",
}
LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a config: the key to change, and its value if that is wrong.

    `is_unsupported`: training is possible without the key (`can_be_left_out`).
    """

    path: KeyPath
    text: str
    value: str = ""
    is_unsupported: bool = False

    def __str__(self) -> str:
        found = f" = {self.value}" if self.value else ""
        return f"{dotted(self.path)}{found}: {self.text}"


@dataclass(frozen=True, slots=True)
class Notice:
    """What a user should know about a key of a valid config."""

    path: KeyPath
    text: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


class ConfigError(ValueError):
    """Everything that is wrong with a config; `problems` has one entry per key."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        lines = [f"  {problem}" for problem in self.problems]
        if any(problem.is_unsupported for problem in self.problems):
            lines.append(
                "  To train without what is not supported: ignore_unsupported: true in "
                "the config (in a command, --set ignore_unsupported=true)."
            )
        super().__init__("\n".join([f"{source} has {count}:", *lines]))


def dotted(path: KeyPath) -> str:
    """The path as `--set` takes it; numbers of list entries are in brackets.

    Control characters are escapes.
    """
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return one_line(text.removeprefix("."))


def explain(
    error: ValidationError, schema: type[Section], raw: Mapping[str, Any]
) -> Iterator[Problem]:
    """The problems behind pydantic's error about `raw`, a config of class `schema`."""
    told: set[KeyPath] = set()
    for details in error.errors(include_url=False):
        path = tuple(key for key in details["loc"] if not _is_type(key))
        # Each type of a union has an error; one is enough.
        if len(path) < len(details["loc"]):
            if path in told:
                continue
            told.add(path)
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Violations):
            for below, text in cause.found:
                yield Problem((*path, *below), text)
        elif details["type"] == "extra_forbidden":
            yield Problem(path, _unknown(path, schema, raw))
        elif details["type"] == "missing":
            yield Problem(path, "is required here, but missing.")
        else:
            text = _message(dict(details), section_of(path, schema, raw))
            yield Problem(path, text, _shown(details["input"]))


def section_of(
    path: Sequence[str | int], schema: type[Section], raw: Mapping[str, Any]
) -> type[Section] | None:
    """The class of the section at `path`; None when a plain value is there."""
    section: type[Section] | None = schema
    value: Any = raw
    for key in path:
        if section is None or not isinstance(key, str):
            return None
        siblings = value if isinstance(value, Mapping) else {}
        section = section.section_at(key, siblings)
        value = siblings.get(key)
    return section


def paths_of(key: str, schema: type[Section], above: str = "") -> Iterator[str]:
    """Dotted paths of all keys of that name."""
    for name in schema.known_keys():
        if name == key:
            yield f"{above}{name}"
        section = schema.section_at(name, {})
        if section is not None:
            yield from paths_of(key, section, f"{above}{name}.")


def can_be_left_out(
    problem: Problem, schema: type[Section], raw: Mapping[str, Any]
) -> bool:
    """Whether `ignore_unsupported` may leave out the key of a problem.

    True for keys that change nothing or are unsupported, and for unknown keys. A wrong
    value and an unknown key that resembles a known one are exceptions: they are
    mistakes, and without them the config may ask for something else.
    """
    section: type[Section] | None = schema
    value: Any = raw
    for depth, key in enumerate(problem.path):
        if section is None or not isinstance(key, str):
            return False
        rest = problem.path[depth + 1 :]
        if key in section.UNREAD:
            return not _is_mistyped(rest, known_below(key))
        field = section.model_fields.get(key)
        siblings = value if isinstance(value, Mapping) else {}
        below = section.section_at(key, siblings)
        if field is None and below is None:
            known = [*section.known_keys(), *schema.known_keys()]
            return nearest(key, known) is None and not any(paths_of(key, schema))
        section, value = below, siblings.get(key)
    return False


def _is_mistyped(path: KeyPath, known: Iterable[str]) -> bool:
    """Whether an unknown key, if the path has one, resembles a known one."""
    return bool(path) and nearest(str(path[0]), known) is not None


def without_effect(
    raw: Mapping[str, Any], schema: type[Section], above: KeyPath = ()
) -> Iterator[Notice]:
    """A notice for each unread key that asks for something zinf does not do."""
    for key, value in raw.items():
        row, below = schema.UNREAD.get(key), schema.section_at(key, raw)
        if row and row.is_missed(value):
            yield Notice((*above, key), f"has no effect here. {row.sentence}")
        elif below and isinstance(value, Mapping):
            yield from without_effect(value, below, (*above, key))


def _is_type(key: str | int) -> bool:
    """Whether pydantic put the name of a type of a union into a path."""
    return str(key).startswith(("function-", "tuple["))


def _unknown(path: KeyPath, schema: type[Section], raw: Mapping[str, Any]) -> str:
    section = section_of(path[:-1], schema, raw) or Section
    key = str(path[-1])
    elsewhere = list(paths_of(key, schema))
    text = unknown_key(key, section.known_keys())
    return f"{text} It exists as {', '.join(elsewhere)}." if elsewhere else text


def _message(details: dict[str, Any], section: type[Section] | None) -> str:
    message = details["msg"].removeprefix("Value error, ").rstrip(".")
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    if details["type"] == "literal_error":
        options = QUOTED.findall(details["ctx"]["expected"])
        # The message names the only option there is.
        several = options if len(options) > 1 else ()
        return f"{message}.{did_you_mean(str(details['input']), several)}"
    if section is not None and details["type"].startswith(("model_", "dict_")):
        return f"must be a mapping with keys among {', '.join(section.known_keys())}."
    return message if message.endswith("?") else f"{message}."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
