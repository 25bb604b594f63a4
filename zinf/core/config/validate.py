"""Validation that reports every problem at once."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from zinf.core.config.messages import KeyPath, Problem, can_be_left_out, explain
from zinf.core.config.section import Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Checked(Generic[S]):
    """The result of validating the keys and values of a section.

    Attributes:
        config: None if there are problems.
        problems: everything that is wrong.
        left_out: unsupported keys that were left out instead of refused.
    """

    config: S | None
    problems: tuple[Problem, ...]
    left_out: tuple[Problem, ...]


def validate(
    schema: type[S],
    raw: Mapping[str, Any],
    *,
    context: Mapping[str, Any],
    ignores_unsupported: bool = False,
) -> Checked[S]:
    """The config of class `schema` in `raw`, or None and everything wrong with it.

    pydantic checks combinations of keys only if every key is right. So keys with
    problems are removed and the rest is validated again, until no problem is left.
    """
    problems: list[Problem] = []
    left_out: list[Problem] = []
    rest: dict[str, Any] = copy.deepcopy(dict(raw))
    while True:
        try:
            config = schema.model_validate(rest, context=context)
        except ValidationError as error:
            seen = [problem.path for problem in problems]
            changed = False
            for problem in explain(error, schema, rest):
                # Removing a key in an earlier round may have caused the problem.
                follows = overlaps(problem.path, seen)
                may_go = can_be_left_out(problem, schema, rest)
                if not follows:
                    kept = left_out if ignores_unsupported and may_go else problems
                    kept.append(replace(problem, is_unsupported=may_go))
                path = problem.path[:1] if follows else problem.path
                changed = _leave_out(rest, path) or changed
            if not changed:
                return Checked(None, tuple(problems), tuple(left_out))
        else:
            found = None if problems else config
            return Checked(found, tuple(problems), tuple(left_out))


def overlaps(path: KeyPath, others: Sequence[KeyPath]) -> bool:
    """Whether `path` is equal to, above or below one of `others`."""
    return any(path[: len(o)] == o or o[: len(path)] == path for o in others)


def _leave_out(raw: dict[str, Any], path: KeyPath) -> bool:
    """Removes the deepest part of `path` that exists; False if no part does."""
    found: tuple[dict[str, Any], Any] | None = None
    value: Any = raw
    for key in path:
        if not isinstance(value, dict) or key not in value:
            break
        found = (value, key)
        value = value[key]
    if found is None:
        return False
    del found[0][found[1]]
    return True
