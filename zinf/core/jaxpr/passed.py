"""Which outputs of a program are its inputs, unchanged."""

from collections.abc import Sequence
from typing import Any

from zinf.core.jaxpr.compat import Equation, open_jaxpr
from zinf.core.jaxpr.walk import Follower

# The number of the input that a value is, and the scans whose current row of it it is.
Source = tuple[int, tuple[int, ...]]


def passed(closed: Any) -> list[int | None]:
    """For each output of a closed jaxpr, the number of the input that it is, or None.

    An input is followed through calls, `jax.checkpoint`, branches that all return it,
    and loops that carry or stack it unchanged.
    """
    inputs: list[Source | None] = [
        (n, ()) for n, _ in enumerate(open_jaxpr(closed)[0].invars)
    ]
    found = _Passed().walk(closed, inputs)
    return [None if source is None else source[0] for source in found]


class _Passed(Follower[Source | None]):
    nothing = None

    def visit(
        self, equation: Equation, facts: list[Source | None]
    ) -> Sequence[Source | None]:
        return [None for _ in equation.outvars]

    def meet(self, first: Source | None, second: Source | None) -> Source | None:
        return first if first == second else None

    def row(self, equation: Equation, fact: Source | None) -> Source | None:
        return None if fact is None else (fact[0], (*fact[1], id(equation)))

    def stack(self, equation: Equation, fact: Source | None) -> Source | None:
        if fact is None or fact[1][-1:] != (id(equation),):
            return None
        return fact[0], fact[1][:-1]
