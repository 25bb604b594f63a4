"""Experts of which a program may read those alone that its tokens chose.

In a program that only runs forward, `zinf.moe` writes such experts as one equation, so
that whoever cuts the program finds them. Operands are `choice (T, k)`, `x (T, D)`,
`gate (T, k)`, for weights in slots `slot_of (E,)`, and the weights of all experts
`(E, ...)`, or of as many as there are slots. `zinf/moe/chosen.py` has its parameters.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from zinf.core.program import is_worthwhile

CHOSEN_EXPERTS = "chosen_experts"
# Operands before the weights, without and with the slot of each expert.
NUM_OPERANDS = 3
# Whether the program that is traced only runs forward. jax traces a cached function
# again if it changes.
_context = jax.make_user_context(False)


def on_demand(function: Callable) -> Callable:
    """A function in which experts are equations that may be read on demand.

    It is traceable only.
    """

    @wraps(function, updated=())
    def wrapped(*arguments: Any) -> Any:
        with _context(True):
            return function(*arguments)

    return wrapped


def is_on_demand(num_experts: int, k: int, num_tokens: int) -> bool:
    """Whether experts that so many tokens choose are such an equation, in this trace.

    It depends on shapes alone, so no bit of a result depends on where weights rest.
    """
    return bool(_context.value) and is_worthwhile(num_experts, k, num_tokens)
