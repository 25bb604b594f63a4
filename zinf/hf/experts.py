"""Routed experts of `transformers` models, computed by `zinf.moe.experts`.

`transformers`' own ways either have shapes that depend on the routing, copy the weights
of an expert for each token, or use a grouped product, which XLA computes for every
expert on CPUs. Two classes have ways of their own, which `make_static` replaces.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType

import jax
import jax.extend
import jax.numpy as jnp
import torch
from torchax.interop import jax_view, torch_view
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from zinf.moe.experts import default_block, experts

NAME = "zinf"

Weights = dict[str, jax.Array]
# Experts of the modules that were called, and the choices of tokens among them.
Choices = list[tuple[torch.nn.Module, jax.Array]]
_CHOICES: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextmanager
def recorded() -> Generator[Choices, None, None]:
    """The choices (tokens, k) of tokens in the `with` block, in the order of calls."""
    found: Choices = []
    token = _CHOICES.set(found)
    try:
        yield found
    finally:
        _CHOICES.reset(token)


def is_routed(module: torch.nn.Module) -> bool:
    """Whether a module has stacked experts that `route` computes."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def routed(module: torch.nn.Module) -> dict[str, int]:
    """The number of experts of each module that `route` computes, by its name."""
    return {
        name: next(each.parameters()).shape[0]
        for name, each in module.named_modules()
        if is_routed(each)
    }


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
    choices = _CHOICES.get()
    if choices is not None:
        choices.append((module, choice))
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
    one_expert = _traced(partial(_expert, module, up), weights, block, x)
    return torch_view(experts(one_expert, weights, x, choice, gate, block=block))


def _traced(
    function: Callable, weights: Weights, block: int, x: jax.Array
) -> Callable[[Weights, jax.Array], jax.Array]:
    """A function of one expert's weights and rows, as it is traced here.

    jax calls the rules of a derivative when torchax is not active.
    """
    closed = jax.make_jaxpr(function)(
        {
            name: jax.ShapeDtypeStruct(w.shape[1:], w.dtype)
            for name, w in weights.items()
        },
        jax.ShapeDtypeStruct((block, x.shape[1]), x.dtype),
    )
    run = jax.extend.core.jaxpr_as_fun(closed)
    return lambda own, rows: run(*jax.tree.leaves(own), rows)[0]


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


def make_static(model: torch.nn.Module) -> None:
    """Replace experts of a model whose shapes depend on the routing."""
    for module in model.modules():
        forward = STATIC.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)


def _with_identities(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts of LongCat-Flash, of which the last ones return their input."""
    x, choice, gate = map(jax_view, (hidden_states, top_k_index, top_k_weights))
    count = module.num_routed_experts
    is_identity = choice >= count
    share = jnp.sum(jnp.where(is_identity, gate, 0), axis=1, keepdims=True)
    unchanged = (share * x).astype(x.dtype)
    if not count:
        return torch_view(unchanged)
    # `gate_up_proj` has rows for the identities too, which nothing reads.
    weights = {
        "up": jax_view(module.gate_up_proj)[:count],
        "down": jax_view(module.down_proj),
    }

    def one_expert(own: Weights, rows: jax.Array) -> jax.Array:
        first, second = jnp.split(rows @ own["up"].T, 2, axis=-1)
        return (jax_view(module.act_fn(torch_view(first))) * second) @ own["down"].T

    block = default_block(choice.size, count)
    traced = _traced(one_expert, weights, block, x)
    choice = jnp.where(is_identity, -1, choice)
    return torch_view(
        unchanged + experts(traced, weights, x, choice, gate, block=block)
    )


def _route_by_counts(
    module: torch.nn.Module, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The routing of JetMoE, with the number of rows of each expert as a tensor.

    Args:
        hidden_states: (tokens, dim).

    Returns:
        the routes in the order of their experts, the tokens and gates of these, rows of
        each expert, and the scores (tokens, experts).
    """
    scores = module.layer(hidden_states).float()
    top, chosen = scores.topk(module.top_k, dim=1)
    gates = torch.softmax(top, dim=1).to(hidden_states.dtype).flatten()
    flat = jax_view(chosen).reshape(-1)
    order = jnp.argsort(flat)
    counts = jnp.bincount(flat, length=module.num_experts)
    routes, tokens = torch_view(order), torch_view(order // module.top_k)
    return routes, tokens, gates[routes], torch_view(counts), scores


def _linear_by_counts(
    module: torch.nn.Module, inputs: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Rows in the order of their experts, times the weights of these."""
    weight = jax_view(module.weight).swapaxes(1, 2)
    return torch_view(jax.lax.ragged_dot(jax_view(inputs), weight, jax_view(counts)))


# What replaces the `forward` of a class, by its name.
STATIC = {
    "LongcatFlashExperts": _with_identities,
    "JetMoeTopKGating": _route_by_counts,
    "JetMoeParallelExperts": _linear_by_counts,
}
