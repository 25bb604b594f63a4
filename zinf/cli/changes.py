"""Compares the settings of a run with those that it began with."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Changed = dict[str, tuple[Any, Any]]


def check_changed(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    allowed: Sequence[str],
    *,
    what: str,
    instead: str,
) -> Changed:
    """The settings that differ, each with its old and its new value.

    Args:
        allowed: keys that may differ, whole or up to a dot: model, model.num_heads.
        what: what the settings of before are of, such as "the run in runs/a".
        instead: what else to do than to allow it.

    Raises:
        ValueError: a setting differs that may not; the message names all of them.
    """
    keys = sorted(key for key in before.keys() | now.keys())
    changed = {
        key: (before.get(key), now.get(key))
        for key in keys
        if _as_json(before.get(key)) != _as_json(now.get(key))
    }
    refused = [key for key in changed if not _is_allowed(key, allowed)]
    if refused:
        lines = [f"  {key}: {_shown(*changed[key])}" for key in refused]
        options = " ".join(f"--allow-changed {key}" for key in refused)
        raise ValueError(
            f"These settings are others than those of {what} (old -> new):\n"
            + "\n".join(lines)
            + f"\nThe result would be of neither. Set them as they were, or {instead}. "
            f"To go on with the new ones, which is recorded, add {options}"
        )
    return changed


def told(changed: Changed) -> str:
    """The changed settings with their old and new values, in one line."""
    return ", ".join(f"{key} {_shown(*values)}" for key, values in changed.items())


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in allowed)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(old: Any, new: Any) -> str:
    texts = ("default" if x is None else _as_json(x) for x in (old, new))
    return " -> ".join(texts)
