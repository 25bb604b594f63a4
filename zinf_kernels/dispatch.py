"""Which implementation of an op runs: one that was asked for, or an error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Implementation = str | Sequence[str] | None


def choose(
    implementation: Implementation, *, op: str, existing: Mapping[str, Callable]
) -> Callable[..., Any]:
    """The implementation to run.

    Args:
        implementation: its name; names in order of preference, the first that exists
            being taken; or `None` for the first of `existing`.
        op: what to call the op in errors.
        existing: all implementations of the op by name, the preferred one first.

    Raises:
        ValueError: none of those asked for exists; nothing else takes their place.
    """
    if implementation is None:
        return next(iter(existing.values()))
    names = (implementation,) if isinstance(implementation, str) else implementation
    for name in names:
        if name in existing:
            return existing[name]
    raise ValueError(
        f"{op} has no implementation {' or '.join(map(repr, names))}. "
        f"Pass implementation=None or one of {', '.join(map(repr, existing))}."
    )
