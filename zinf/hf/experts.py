"""Routed experts of `transformers` models: a loop over blocks of one expert's rows.

`transformers`' own ways either have shapes that depend on the routing, copy the weights
of an expert for each token, or use a grouped product, which XLA computes for every
expert on CPUs. Here rows are sorted by expert, and each expert's are padded to whole
blocks (as in MegaBlocks, https://arxiv.org/abs/2211.15841, section 5): no row is
dropped, and beside its result the loop holds one block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import torch
from torchax.interop import jax_view, torch_view
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "zinf"
# Rows of a block. With 16 experts, 2,048 tokens and top 2 on two cores, 128 took 329 ms
# and 64 took 417 ms; larger blocks are mostly padding in small batches.
BLOCK_ROWS = 128

Weights = dict[str, jax.Array]


def register() -> None:
    """Make the experts known to `transformers`; doing so again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, route)


def route(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, with `transformers`' arguments."""
    x, choice, gate = map(jax_view, (hidden_states, top_k_index, top_k_weights))
    up = "gate_up" if module.has_gate else "up"
    names = [f"{up}_proj", "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
    weights = {name: jax_view(getattr(module, name)) for name in names}
    if module.has_post_expert_norm:
        raise NotImplementedError(
            f"{type(module).__name__} normalises what each expert gives, which zinf "
            "does not compute yet."
        )
    mean_rows = -(-choice.size // weights["down_proj"].shape[0])
    block = min(BLOCK_ROWS, mean_rows)
    # Traced here: jax calls the rules of a derivative when torchax is not active.
    closed = jax.make_jaxpr(partial(_expert, module, up))(
        {
            name: jax.ShapeDtypeStruct(w.shape[1:], w.dtype)
            for name, w in weights.items()
        },
        jax.ShapeDtypeStruct((block, x.shape[1]), x.dtype),
    )
    function = jax.extend.core.jaxpr_as_fun(closed)

    def one_expert(own: Weights, rows: jax.Array) -> jax.Array:
        return function(*jax.tree.leaves(own), rows)[0]

    return torch_view(experts(one_expert, weights, x, choice, gate, block))


def _expert(
    module: torch.nn.Module, up: str, weights: Weights, x_BD: jax.Array
) -> jax.Array:
    """One expert's output for a block of rows, by the module's own activation."""
    inner = _linear(module, weights, f"{up}_proj", x_BD)
    activation = module._apply_gate if module.has_gate else module.act_fn
    inner = jax_view(activation(torch_view(inner)))
    return _linear(module, weights, "down_proj", inner)


def _linear(
    module: torch.nn.Module, weights: Weights, name: str, x: jax.Array
) -> jax.Array:
    weight = weights[name] if module.is_transposed else weights[name].T
    out = x @ weight
    return out + weights[f"{name}_bias"] if module.has_bias else out


@partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def experts(
    function: Callable[[Any, jax.Array], jax.Array],
    weights: Weights,
    x_TD: jax.Array,
    choice_TK: jax.Array,
    gate_TK: jax.Array,
    block: int,
) -> jax.Array:
    """The sum over k of `gate[t, k] * function(weights[choice[t, k]], x[t])`.

    Args:
        function: from one expert's weights and rows to rows.
        weights: leaves with a leading dim of experts.
    """
    return _forward(function, weights, x_TD, choice_TK, gate_TK, block)[0]


def _blocks(
    choice_TK: jax.Array, num_experts: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The choice in each row of each block, each block's expert, and their number.

    A choice is its position in `choice_TK`; rows of padding have `choice_TK.size`.
    """
    count = choice_TK.size
    choice = choice_TK.reshape(-1)
    sizes = jnp.bincount(choice, length=num_experts)
    padded = -(-sizes // block) * block
    ends = jnp.cumsum(padded)
    order = jnp.argsort(choice)
    owner = choice[order]
    rank = jnp.arange(count) - (jnp.cumsum(sizes) - sizes)[owner]
    num_rows = (count // block + num_experts) * block
    place = (ends - padded)[owner] + rank
    rows = jnp.full(num_rows, count, order.dtype).at[place].set(order)
    starts = jnp.arange(num_rows // block) * block
    owners = jnp.searchsorted(ends, starts, side="right")
    return rows, jnp.minimum(owners, num_experts - 1), ends[-1] // block


def _taken(
    weights: Weights, x: jax.Array, gate: jax.Array, owner: jax.Array, rows: jax.Array
) -> tuple[Weights, jax.Array, jax.Array]:
    """One expert's weights, and the tokens and gates of a block; 0 in its padding."""
    mine: Weights = {
        name: jax.lax.dynamic_index_in_dim(w, owner, 0, False)
        for name, w in weights.items()
    }
    x_rows = x.at[rows // gate.shape[1]].get(mode="fill", fill_value=0)
    return mine, x_rows, gate.reshape(-1).at[rows].get(mode="fill", fill_value=0)


def _forward(
    function: Callable,
    weights: Weights,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
    block: int,
) -> tuple[jax.Array, tuple]:
    num_experts = weights["down_proj"].shape[0]
    rows, owners, total = _blocks(choice, num_experts, block)

    def body(number: jax.Array, y: jax.Array) -> jax.Array:
        here = jax.lax.dynamic_slice_in_dim(rows, number * block, block)
        w, own, g = _taken(weights, x, gate, owners[number], here)
        out = function(w, own) * g[:, None]
        return y.at[here // gate.shape[1]].add(out.astype(y.dtype), mode="drop")

    zeros = jnp.zeros(x.shape, jnp.float32)
    y = jax.lax.fori_loop(0, total, body, zeros)
    return y.astype(x.dtype), (weights, x, choice, gate)


def _backward(
    function: Callable, block: int, saved: tuple, dy: jax.Array
) -> tuple[Weights, jax.Array, None, jax.Array]:
    weights, x, choice, gate = saved
    rows, owners, total = _blocks(choice, weights["down_proj"].shape[0], block)

    def body(number: jax.Array, sums: tuple) -> tuple:
        dw, dx, dg = sums
        here = jax.lax.dynamic_slice_in_dim(rows, number * block, block)
        taken = _taken(weights, x, gate, owners[number], here)
        _, vjp = jax.vjp(lambda w, own, g: function(w, own) * g[:, None], *taken)
        tokens = here // gate.shape[1]
        dy_rows = dy.at[tokens].get(mode="fill", fill_value=0)
        one, own, g = vjp(dy_rows.astype(jnp.result_type(x, gate)))
        dw = {
            name: total.at[owners[number]].add(one[name].astype(total.dtype))
            for name, total in dw.items()
        }
        dx = dx.at[tokens].add(own.astype(dx.dtype), mode="drop")
        return dw, dx, dg.at[here].set(g.astype(dg.dtype), mode="drop")

    def zeros(array: jax.Array) -> jax.Array:
        return jnp.zeros(array.shape, jnp.float32)

    start = {n: zeros(w) for n, w in weights.items()}, zeros(x), zeros(gate.reshape(-1))
    dw, dx, dg = jax.lax.fori_loop(0, total, body, start)
    dw = {name: dw[name].astype(w.dtype) for name, w in weights.items()}
    return dw, dx.astype(x.dtype), None, dg.reshape(gate.shape).astype(gate.dtype)


def _forward_rule(
    function: Callable,
    weights: Weights,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
    block: int,
) -> tuple[jax.Array, tuple]:
    return _forward(function, weights, x, choice, gate, block)


experts.defvjp(_forward_rule, _backward)
