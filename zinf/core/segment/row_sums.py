"""Gradients of lookups: sums of the rows that were read, and zero elsewhere.

The transpose of a lookup adds its rows to zeros of the size of the table, and these are
then added to the table's other gradients. For an embedding table that is also the
output layer this takes twice its memory and four passes over it, to add one row a
token. As rows they are added to the other gradient in place. The result is bit-equal,
except the sign of zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode, ScatterDimensionNumbers, scatter_add

from zinf.core.jaxpr import Graph
from zinf.core.jaxpr.compat import Equation, Literal, Var

# With more rows than this share of the table, they save too little.
LARGEST_PART = 0.5
# In other modes a number beyond the table is not dropped.
LEAVING_OUT = (
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


@dataclass(frozen=True)
class Lookup:
    """The rows (..., D) that are added, and their numbers (..., 1)."""

    rows: Var
    numbers: Var


def find_lookups(graph: Graph, count: int) -> dict[int, Lookup]:
    """The lookups among the first `count` outputs, by position: sums of few rows."""
    makers = {v: e for e in graph.equations for v in e.outvars}
    found = {}
    for i, out in enumerate(graph.outvars[:count]):
        maker = None if isinstance(out, Literal) else makers.get(out)
        if maker is not None and _adds_rows_to_zeros(maker, makers):
            _, numbers, rows = maker.invars
            found[i] = Lookup(rows, numbers)
    return found


def leave_as_rows(graph: Graph, lookups: dict[int, Lookup]) -> Graph:
    """The program with rows in place of these outputs; row numbers come last."""
    outvars = [
        lookups[i].rows if i in lookups else v for i, v in enumerate(graph.outvars)
    ]
    outvars += [lookup.numbers for lookup in lookups.values()]
    return graph.needed_for(outvars)


@partial(jax.jit, donate_argnums=0)
def add_rows(total: jax.Array, rows: jax.Array, numbers: jax.Array) -> jax.Array:
    """Adds rows to a float32 sum, in place.

    Rows with equal numbers are summed first, in order and in their own dtype, as the
    transpose of the lookup would.
    """
    numbers = numbers.reshape(-1)
    rows = rows.reshape(numbers.size, *total.shape[1:])
    # The fill value is beyond the table, so it adds to nothing.
    unique, places = jnp.unique(
        numbers, return_inverse=True, size=numbers.size, fill_value=len(total)
    )
    sums = jnp.zeros_like(rows).at[places].add(rows)
    dims = tuple(range(1, total.ndim))
    return scatter_add(
        total,
        unique[:, None],
        sums.astype(total.dtype),
        ScatterDimensionNumbers(dims, (0,), (0,)),
        indices_are_sorted=True,
        unique_indices=False,  # the padding is equal
        mode=GatherScatterMode.FILL_OR_DROP,
    )


def _adds_rows_to_zeros(equation: Equation, makers: dict[Var, Equation]) -> bool:
    if equation.primitive.name != "scatter-add":
        return False
    zeros, numbers, rows = equation.invars
    if isinstance(numbers, Literal) or isinstance(rows, Literal):
        return False
    shape, row_shape = zeros.aval.shape, zeros.aval.shape[1:]
    num_dims = len(numbers.aval.shape) - 1
    dims = equation.params["dimension_numbers"]
    wanted = ScatterDimensionNumbers(
        update_window_dims=tuple(range(num_dims, num_dims + len(row_shape))),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    is_by_row = (
        dims == wanted
        and numbers.aval.shape == (*rows.aval.shape[:num_dims], 1)
        and rows.aval.shape[num_dims:] == row_shape
        and equation.params["mode"] in LEAVING_OUT
    )
    is_few = prod(rows.aval.shape) <= LARGEST_PART * prod(shape)
    return is_by_row and is_few and is_zeros(zeros, makers)


def is_zeros(atom: Any, makers: Mapping[Var, Equation]) -> bool:
    """Whether the equation that makes a value shows that it is all zeros."""
    maker = None if isinstance(atom, Literal) else makers.get(atom)
    if maker is None or maker.primitive.name != "broadcast_in_dim":
        return False
    (source,) = maker.invars
    return isinstance(source, Literal) and not np.any(source.val)
