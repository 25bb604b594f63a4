"""Errors as text, for golden files."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def error_of(call: Callable[[], Any]) -> Exception:
    """The error in which a call ends."""
    try:
        call()
    except Exception as error:
        return error
    pytest.fail(f"{call} ended without an error")


def text_of(errors: Mapping[str, Exception]) -> str:
    """Each error below its name."""
    pairs = errors.items()
    return "\n".join(f"{name}:\n  {type(e).__name__}: {e}" for name, e in pairs)


def refusals(cases: Mapping[str, Callable[[], Any]]) -> str:
    """The errors in which the calls end."""
    return text_of({name: error_of(call) for name, call in cases.items()})
