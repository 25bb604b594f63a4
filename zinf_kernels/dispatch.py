"""Chooses the implementation of an op: one that was asked for, or an error."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Implementation = str | Sequence[str] | None
NO_OBSTACLES: Mapping[str, str] = MappingProxyType({})


def choose(
    implementation: Implementation, *, op: str, existing: Mapping[str, Callable]
) -> Callable[..., Any]:
    """The implementation to run, where all can run anywhere: see `choose_name`."""
    return existing[choose_name(implementation, op=op, existing=existing)]


def choose_name(
    implementation: Implementation,
    *,
    op: str,
    existing: Iterable[str],
    obstacles: Mapping[str, str] = NO_OBSTACLES,
) -> str:
    """The name of the implementation to run.

    Args:
        implementation: its name; or names in order of preference, of which the first
            that exists and can run is taken; or `None` for the first of `existing` that
            can.
        op: what to call the op in errors.
        existing: all implementations of the op, the preferred one first.
        obstacles: for each of `existing` that cannot run here, the reason as a
            sentence. The function `obstacles` of an op returns this.

    Raises:
        ValueError: none of those asked for exists and can run; nothing else takes
            their place.
    """
    existing = tuple(existing)
    if implementation is None:
        names: Sequence[str] = existing
    else:
        names = (implementation,) if isinstance(implementation, str) else implementation
    known = [name for name in names if name in existing]
    able = [name for name in known if name not in obstacles]
    if able:
        return able[0]
    free = [repr(name) for name in existing if name not in obstacles]
    instead = f"Pass implementation=None or one of {', '.join(free)}." if free else ""
    if not known:
        asked = " or ".join(map(repr, names))
        raise ValueError(f"{op} has no implementation {asked}. {instead}")
    reasons = " ".join(f"{name!r} cannot run: {obstacles[name]}" for name in known)
    raise ValueError(f"{op}: {reasons} {instead}".rstrip())
