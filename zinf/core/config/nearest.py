"""The nearest match of a mistyped name, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The option most like `name`, upper or lower case; None if none is similar."""
    by_lower_case = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(name.lower(), by_lower_case, 1, cutoff)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(name: str, options: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The question " Did you mean 'x'?", or "" if no option is similar."""
    match = nearest(name, options, cutoff=cutoff)
    return f" Did you mean {match!r}?" if match else ""


def unknown_key(key: str, allowed: Iterable[str]) -> str:
    """The message for a key that is not one of `allowed`."""
    names = sorted(allowed)
    hint = did_you_mean(key, names)
    return f"unknown key.{hint} Allowed keys here: {', '.join(names)}."
