"""JSON from outside as values."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def from_json(text: str | bytes | bytearray) -> Any:
    """`json.loads(text)`, where all that is wrong with a text is a ValueError.

    Raises:
        ValueError: it is no JSON, or is nested more deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unreadable_object(folder: Path, names: Iterable[str]) -> str | None:
    """The error of the first of these files that holds no JSON object.

    None if all that are there do. For the error of a library that names no file.
    """
    for name in names:
        try:
            found = from_json((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            return f"{name}: {error}."
        if not isinstance(found, dict):
            return f"{name}: it is no object with names and values."
    return None
