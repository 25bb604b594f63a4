"""Compares values that must be equal in all processes, and words the differences."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any


def differences(values: Sequence[Mapping[str, Any]]) -> str | None:
    """How processes differ, one line per key; None if all values are equal.

    Args:
        values: The values of each process, in process order.
    """
    keys = dict.fromkeys(key for value in values for key in value)
    lines = [_difference(key, values) for key in keys]
    return "\n".join(line for line in lines if line) or None


def _difference(key: str, values: Sequence[Mapping[str, Any]]) -> str | None:
    holders: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        text = str(value[key]) if key in value else "nothing"
        holders.setdefault(text, []).append(index)
    if len(holders) == 1:
        return None
    held = (f"{text} on {processes(where)}" for text, where in holders.items())
    return f"  {key}: {'; '.join(held)}"


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, so that an error names the exact key."""
    found = {}
    for key, value in tree.items():
        below = flat(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{key}.{name}".rstrip("."): below[name] for name in below}
    return found


def processes(indices: Sequence[int]) -> str:
    """[1] -> "process 1", [0, 1, 2, 5] -> "processes 0-2, 5"."""
    runs = []
    for _, run in groupby(enumerate(sorted(indices)), lambda at: at[1] - at[0]):
        numbers = [number for _, number in run]
        first, last = numbers[0], numbers[-1]
        runs.append(str(first) if first == last else f"{first}-{last}")
    return f"process{'es' * (len(indices) > 1)} {', '.join(runs)}"
