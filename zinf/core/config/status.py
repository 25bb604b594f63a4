"""How keys are classified: used, or not, for one of four reasons."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

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


def status_of(field: FieldInfo) -> Status:
    """How the key is classified; keys without a mark are used."""
    marks = (mark for mark in field.metadata if isinstance(mark, Status))
    return next(marks, Status.USED)
