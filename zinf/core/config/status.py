"""How keys are classified: used, unsupported, or ignored for one of three reasons."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic.fields import FieldInfo


class Status(StrEnum):
    """What zinf does with a key."""

    USED = "used"
    AUTOMATIC = "automatic here"
    MOOT = "without meaning under XLA"
    NO_EFFECT = "no effect here"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class _AcceptsAuto:
    """Marks a key for which "auto" means the same as no key."""


AUTO = _AcceptsAuto()
AUTO_WORD = "auto"
T = TypeVar("T")
Auto = Annotated[T, AUTO]
Unsupported = Annotated[T, Status.UNSUPPORTED, AUTO]


def status_of(field: FieldInfo) -> Status:
    """How the key is classified; keys without a mark are used."""
    marks = (mark for mark in field.metadata if isinstance(mark, Status))
    return next(marks, Status.USED)


def asks(value: object, default: object) -> bool:
    """Whether `value` asks for something other than `default`, which is what zinf does.

    A mapping with flags such as "enabled" at any depth asks only if one of them is on.
    """
    if isinstance(value, Mapping):
        switches = list(_switches(value))
        return any(switches) if switches else bool(value)
    if value in (default, AUTO_WORD):
        return False
    return bool(default) or bool(value)


def _switches(mapping: Mapping[str, Any]) -> Iterator[bool]:
    for key, value in mapping.items():
        if key == "enabled":
            yield bool(value) and value != "auto"
        elif key == "autotp_size":
            yield value not in (0, 1)
        elif isinstance(value, Mapping):
            yield from _switches(value)
