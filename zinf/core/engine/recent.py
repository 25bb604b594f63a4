"""Keeps the most recently used of some objects that are costly to make."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """At most `limit` objects by key; the one used least recently goes first."""

    def __init__(self, limit: int):
        self._limit = limit
        self._made: dict[Hashable, Made] = {}

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The object of this key; `make` makes it if there is none."""
        found = self._made.pop(key) if key in self._made else make()
        self._made[key] = found
        if len(self._made) > self._limit:
            del self._made[next(iter(self._made))]
        return found

    def clear(self) -> None:
        self._made.clear()


class SameFunction:
    """A key that is equal for one and the same function, hashable or not."""

    def __init__(self, function: Callable):
        self.function = function

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameFunction):
            return False
        mine, theirs = self.function, other.function
        return mine is theirs or (_is_hashable(mine) and mine == theirs)

    def __hash__(self) -> int:
        function = self.function
        return hash(function) if _is_hashable(function) else id(function)


def _is_hashable(function: Callable) -> bool:
    try:
        hash(function)
    except TypeError:
        return False
    return True
