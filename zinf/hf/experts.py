"""Routed experts of `transformers` models, computed by `zinf.moe.experts`.

`transformers`' own ways either have shapes that depend on the routing, copy the weights
of an expert for each token, or use a grouped product, which XLA computes for every
expert on CPUs.
"""

from functools import partial

import jax
import jax.extend
import torch
from torchax.interop import jax_view, torch_view
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from zinf.moe.experts import default_block, experts

NAME = "zinf"

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
    block = default_block(choice.size, weights["down_proj"].shape[0])
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

    return torch_view(experts(one_expert, weights, x, choice, gate, block=block))


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
