"""The base class of all sections of a config: frozen, strict and documented."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from zinf.core.config.docstrings import docstrings
from zinf.core.config.opaque import unknown_below
from zinf.core.config.status import AUTO
from zinf.core.config.unread import Unread
from zinf.core.text.tables import html_table

Violation = tuple[tuple[str, ...], str]
"""The path of an offending key below its section, and what is wrong with it."""


class Violations(ValueError):
    """Everything wrong with one section, as an error that pydantic passes on."""

    def __init__(self, found: Iterable[Violation]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(f"{'.'.join(p)}: {text}" for p, text in self.found))


class Section(BaseModel):
    """A frozen group of keys; the docstring of a key is its line in `config check`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        # Validators are built when a config is first made, not at import.
        defer_build=True,
    )

    UNREAD: ClassVar[dict[str, Unread]] = {}
    """Keys that are allowed beside the fields, and that a section does not keep."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys that may be given."""
        return [*cls.model_fields, *cls.UNREAD]

    @classmethod
    def description_of(cls, key: str) -> str:
        """The sentence about a key, or "" if it has none."""
        unread = cls.UNREAD.get(key)
        return unread.sentence if unread else docstrings(cls).get(key, "")

    def violations(self) -> Iterator[Violation]:
        """Keys of this section that contradict each other."""
        yield from ()

    def asks(self, key: str) -> bool:
        """Whether a key was given, but not as null, the number 0, or as it is anyway.

        So a config that was written out with all its defaults is read again.
        """
        value, usual = getattr(self, key), type(self).model_fields[key].default
        asks_nothing = value in (None, usual) or (value == 0 and value is not False)
        return key in self.model_fields_set and not asks_nothing

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Only keys that were given; all others have their defaults."""
        for name, value in super().__repr_args__():
            if name in self.model_fields_set:
                yield name, value

    def _repr_html_(self) -> str:
        """In a notebook: a table of the keys that were given."""
        given = dotted(self.model_dump(mode="json", exclude_unset=True))
        if not given:
            return f"<p>{type(self).__name__}: every key has its default.</p>"
        rows = [
            (key, value if isinstance(value, str) else json.dumps(value))
            for key, value in given.items()
        ]
        return html_table(rows, ("key", "value"), code=True)

    @classmethod
    def section_at(
        cls, key: str, siblings: Mapping[str, Any]
    ) -> "type[Section] | None":
        """The class of the section at `key`, or None if no section is there.

        `siblings` are the raw values beside `key`: the class of `params` depends on
        their `type`.
        """
        del siblings
        field = cls.model_fields.get(key)
        return _section_in(field.annotation) if field else None

    @model_validator(mode="before")
    @classmethod
    def _omit_unread(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        found: list[Violation] = []
        for key, row in sorted(cls.UNREAD.items()):
            mistyped = list(unknown_below(key, data.get(key)))
            found += [((key, below), text) for below, text in mistyped]
            if row.is_refused(data.get(key)) and not mistyped:
                found.append(((key,), f"not supported yet. {row.sentence}"))
        if found:
            raise Violations(found)
        return {k: v for k, v in data.items() if not cls._is_omitted(k, v)}

    @classmethod
    def _is_omitted(cls, key: Any, value: Any) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            return key in cls.UNREAD
        if value is None:
            return _section_in(field.annotation) is not None
        return isinstance(value, str) and value == "auto" and AUTO in field.metadata

    @model_validator(mode="after")
    def _refuse_violations(self) -> Self:
        found = tuple(self.violations())
        if found:
            raise Violations(found)
        return self


def _section_in(annotation: Any) -> type[Section] | None:
    """The section class in a type such as `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{name}": below for name, below in dotted(value).items()}
        else:
            found[key] = value
    return found
