"""Experts of which a program may read those alone that its tokens chose.

In a program that does not change them, `zinf.moe` writes such experts as one equation,
so that whoever cuts the program finds them. Operands are `choice (T, k)`, `x (T, D)`,
`gate (T, k)`, for weights in slots `slot_of (E,)`, and the weights of all experts
`(E, ...)`, or of as many as there are slots. `zinf/moe/chosen.py` has its parameters.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax

from zinf.core.program import is_worthwhile

CHOSEN_EXPERTS = "chosen_experts"
# Operands before the weights, without and with the slot of each expert.
NUM_OPERANDS = 3
# Whether the program that is traced leaves experts as they are. jax traces a cached
# function again if it changes.
_context = jax.make_user_context(False)
_whole: ContextVar[list[tuple[int, int, int]]] = ContextVar("whole")


def on_demand(function: Callable) -> Callable:
    """A function in which experts are equations that may be read on demand.

    It is traceable only.
    """

    @wraps(function, updated=())
    def wrapped(*arguments: Any) -> Any:
        with tracing_on_demand(True):
            return function(*arguments)

    return wrapped


@contextmanager
def tracing_on_demand(is_on: bool) -> Generator[list[tuple[int, int, int]], None, None]:
    """What is traced in the `with` block has such equations, if `is_on`.

    Yields:
        the experts that are no such equation, as the arguments of `is_on_demand`.
    """
    whole: list[tuple[int, int, int]] = []
    token = _whole.set(whole)
    try:
        with _context(is_on):
            yield whole
    finally:
        _whole.reset(token)


def is_on_demand(num_experts: int, k: int, num_tokens: int) -> bool:
    """Whether experts that so many tokens choose are such an equation, in this trace.

    It depends on shapes alone, so no bit of a result depends on where weights rest.
    """
    if not _context.value:
        return False
    found = is_worthwhile(num_experts, k, num_tokens)
    if not found:
        _whole.get().append((num_experts, k, num_tokens))
    return found
