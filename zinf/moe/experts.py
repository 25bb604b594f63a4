"""`zinf.moe.experts`: applies experts to the tokens that chose them, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zinf.core.jaxpr.chosen import is_on_demand
from zinf.core.sharding.axes.experts import current_mesh
from zinf.moe.blocks import ExpertFunction
from zinf.moe.chosen import sum_of_chosen
from zinf.moe.exchange import check_divides, divided
from zinf.moe.gating import Capacity
from zinf.moe.loop import in_blocks

DEFAULT_BLOCK = 128


def experts(
    function: ExpertFunction,
    stacked_weights: Any,
    x: Float[Array, "tokens dim"],
    choice: Int[Array, "tokens k"],
    gate: Float[Array, "tokens k"],
    *,
    block: int | None = None,
    splits: int = 1,
    capacity: Capacity | None = None,
) -> Float[Array, "tokens dim"]:
    """The sum over j of gate[t, j] * function(weights of choice[t, j], x[t]).

    Beside inputs, result and gradients it holds the values of one block of rows: the
    backward pass computes each block again. Sums over the choices of a token, and over
    the rows of an expert's gradient, are made in float32, always in the same order.

    On a mesh of devices a training step divides tokens among all of them, and experts
    along its axis `expert`: `zinf.moe.exchange` says how tokens reach their experts.

    Args:
        function: `function(weights_of_one, rows)`, from (block, dim) to (block, dim),
            each row by itself. It must not close over traced values: what it needs
            comes with `stacked_weights`.
        stacked_weights: a pytree of arrays whose dim 0 is the expert.
        x: one row for each token.
        choice: the experts of each token. A negative number is no expert: a dropped
            route, which adds nothing and costs nothing.
        gate: what each route is multiplied with.
        block: rows of one expert that are computed at once; 128 unless given, or fewer
            where an expert gets fewer on average. It changes the rounding of the
            gradients of weights, nothing else.
        splits: how many blocks of experts are computed one after another. Each is a
            piece of the program that reads the weights of its own experts alone, so
            that zinf streams experts which do not fit the device at once.
        capacity: what the choices keep to, as `Routing.capacity` says; None: nothing.
            On a mesh it bounds what devices send each other, and changes no number.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        ValueError: shapes that do not fit together, an expert that changes the width,
            no expert at all, or experts that the devices along `expert` cannot divide.
        NotImplementedError: `splits` on a mesh with an axis `expert`.
    """
    arrays = jax.tree.map(jnp.asarray, (stacked_weights, x, choice, gate))
    stacked_weights, x, choice, gate = arrays
    num_experts = _check(function, stacked_weights, x, choice, gate, block)
    if block is None:
        block = default_block(choice.size, num_experts)
    if splits < 1 or num_experts % splits:
        raise ValueError(
            f"splits is {splits}; it must divide the {num_experts} experts evenly."
        )
    mesh = current_mesh()
    if mesh is not None:
        check_divides(num_experts, splits, mesh)
    size = num_experts // splits
    total = jnp.zeros(x.shape, jnp.float32)
    for first in range(0, num_experts, size):
        own = _rows_of(stacked_weights, range(first, first + size))
        # An expert of another block becomes negative, or too large: no expert here.
        operands = function, block, own, x, choice - first, gate
        if mesh is None:
            chosen = is_on_demand(size, choice.shape[1], choice.shape[0])
            total += (sum_of_chosen if chosen else in_blocks)(*operands)
        else:
            total += divided(*operands, mesh=mesh, capacity=capacity)
    return total.astype(x.dtype)


def _rows_of(weights: Any, rows: range) -> Any:
    # Row by row: zinf makes each row that is read alone an array of its own, which has
    # a home and is fetched by itself (`zinf/core/segment/rows.py`).
    if len(rows) == jax.tree.leaves(weights)[0].shape[0]:
        return weights
    return jax.tree.map(lambda w: jnp.stack([w[i] for i in rows]), weights)


def default_block(num_routes: int, num_experts: int) -> int:
    """Rows of a block: a power of two near the mean number of an expert, at most 128.

    Each expert's rows are padded to whole blocks, so a block of many times their
    number would mostly compute padding.
    """
    mean = max(1, num_routes // num_experts)
    return min(DEFAULT_BLOCK, max(8, 1 << (mean - 1).bit_length()))


def _check(
    function: ExpertFunction,
    weights: Any,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
    block: int | None,
) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    if not leaves:
        raise ValueError(
            "stacked_weights has no array. Stack the weights of all experts along dim "
            "0, for example with jax.vmap(init)(keys)."
        )
    counts = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape[:1]
        for path, leaf in leaves
    }
    num_experts = sum(next(iter(counts.values())))
    if not num_experts or len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {sum(shape)}" for name, shape in counts.items())
        raise ValueError(
            "The leaves of stacked_weights must have the same dim 0, the number of "
            f"experts; found {found}. Stack the weights of all experts along dim 0."
        )
    if x.ndim != 2 or choice.ndim != 2 or choice.shape != gate.shape:
        raise ValueError(
            f"x is {x.shape}, choice {choice.shape} and gate {gate.shape}; they must "
            "be (tokens, dim), (tokens, k) and (tokens, k). Reshape (batch, time, dim) "
            "to (batch * time, dim)."
        )
    if choice.shape[0] != x.shape[0]:
        raise ValueError(
            f"choice is for {choice.shape[0]} tokens but x has {x.shape[0]}."
        )
    if not jnp.issubdtype(choice.dtype, jnp.signedinteger):
        raise ValueError(
            f"choice has dtype {choice.dtype}; it must be a signed integer, because a "
            "negative choice is a dropped route."
        )
    if block is not None and block < 1:
        raise ValueError(f"block is {block}; it must be at least 1 row.")
    one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights)
    rows = jax.ShapeDtypeStruct((block or 1, x.shape[1]), x.dtype)
    result = jax.eval_shape(function, one, rows)
    if getattr(result, "shape", None) != rows.shape:
        raise ValueError(
            f"The expert turns rows of shape {rows.shape} into {result}. It must "
            "return an array of the same shape: results of experts are added up."
        )
    return num_experts
