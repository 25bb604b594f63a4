"""Byte sizes as people write them: 4096, "120GiB", "500 MB"."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

from zinf.core.config.nearest import did_you_mean

_PREFIXES = "KMGTP"
UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate(_PREFIXES)},
}
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_ALLOWED = f"Write a whole number of bytes, or a number with {', '.join(UNITS)}."


def parse_size(value: object) -> int:
    """Bytes of a size: an integer, or text such as "120GiB", "500 MB" or "64KiB".

    Units are read in any case; KB is 1000 bytes and KiB is 1024.

    Raises:
        ValueError: the value is not a size, or not a whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a size. {_ALLOWED}")
    if not isinstance(value, str):
        if value != value or value in (float("inf"), float("-inf")) or value % 1:
            raise ValueError(f"not a whole number of bytes. {_ALLOWED}")
        return int(value)
    match = _PATTERN.fullmatch(value)
    if match is None:
        raise ValueError(f"not a size. {_ALLOWED}")
    number, unit = match.groups()
    if unit and unit.lower() not in _BY_LOWER_CASE:
        hint = did_you_mean(unit, UNITS, cutoff=0.5)
        raise ValueError(f"unknown unit {unit!r}.{hint} {_ALLOWED}")
    nbytes = Decimal(number) * (_BY_LOWER_CASE[unit.lower()] if unit else 1)
    if nbytes % 1:
        raise ValueError(f"{nbytes.normalize()} is not a whole number of bytes.")
    return int(nbytes)


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
"""A positive number of bytes, written as `parse_size` reads it."""

Threshold = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""A number of bytes that may be 0, written likewise."""
