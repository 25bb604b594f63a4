"""JSON from outside as values."""

import json
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
