"""Which experts a token goes to, and with which weight: DeepSpeed's three gatings.

The numbers are those of DeepSpeed's `top1gating`, `top2gating` and `topkgating`
(deepspeed/moe/sharded_moe.py; GShard, https://arxiv.org/abs/2006.16668, and Switch
Transformers, https://arxiv.org/abs/2101.03961), in float32. Their results are large
[tokens, experts, capacity] tensors; these are the same routes as indices, which
`zinf.moe.experts` takes.

Randomness comes in as arrays that the caller has drawn, so that a gating is a pure
function, and can be compared on recorded draws.

Shape suffixes:
  S  tokens of a routing group   E  experts
  k  choices a token             C  capacity, in tokens an expert
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NO_EXPERT = -1


class Capacity(NamedTuple):
    """Each expert takes at most so many of every `group_size` consecutive tokens."""

    tokens: int
    group_size: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The routes of tokens.

    Attributes:
        choice: int32 [tokens, k], the experts of each token; -1 is a dropped route.
        gate: float32 [tokens, k], what each expert's result is multiplied with; zero
            where the route is dropped.
        aux_loss: float32 scalar, the load-balancing loss, before any coefficient. One
            if all experts get equally many tokens with equal probability.
        counts: int32 [experts], the tokens that chose each expert, dropped ones
            included.
        capacity: what the choices keep to; None: an expert may take every token. Static
            in jax's sense.
    """

    choice: Int[Array, "tokens k"]
    gate: Float[Array, "tokens k"]
    aux_loss: Float[Array, ""]
    counts: Int[Array, " experts"]
    capacity: Capacity | None = field(default=None, metadata={"static": True})

    @property
    def dropped(self) -> Float[Array, ""]:
        """The share of routes that were dropped."""
        return jnp.mean(self.choice == NO_EXPERT, dtype=jnp.float32)


def capacity_of(
    num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int
) -> int:
    """Tokens that an expert takes at most, of a routing group of `num_tokens`."""
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity)


def top1(
    logits_SE: Float[Array, "tokens experts"],
    *,
    capacity: int | None,
    gumbel: Float[Array, "tokens experts"] | None = None,
    uniform: Float[Array, "tokens experts"] | None = None,
) -> Routing:
    """One expert a token, gated by its probability (Switch Transformers).

    Args:
        capacity: tokens that an expert takes; `None`: no token is dropped.
        gumbel: Gumbel noise that is added to the logits for the choice alone
            (`noisy_gate_policy: RSample`).
        uniform: if given, an expert that is chosen too often takes the tokens with the
            largest of these numbers (`use_rts`, random token selection); otherwise the
            first tokens.
    """
    num_tokens, num_experts = logits_SE.shape
    gates_SE = jax.nn.softmax(logits_SE.astype(jnp.float32), axis=1)
    noisy_SE = gates_SE if gumbel is None else logits_SE + gumbel
    index_S = jnp.argmax(noisy_SE, axis=1).astype(jnp.int32)
    mask_SE = jax.nn.one_hot(index_S, num_experts, dtype=jnp.float32)
    aux_loss = jnp.sum(gates_SE.mean(0) * mask_SE.mean(0)) * num_experts
    kept_SE = mask_SE
    if capacity is not None and capacity < num_tokens:
        if uniform is None:
            kept_SE = mask_SE * (jnp.cumsum(mask_SE, axis=0) <= capacity)
        else:
            kept_SE = mask_SE * _largest(mask_SE * uniform, capacity)
    gate_S1 = jnp.sum(gates_SE * kept_SE, axis=1, keepdims=True)
    is_kept_S1 = kept_SE.any(axis=1, keepdims=True)
    choice_S1 = jnp.where(is_kept_S1, index_S[:, None], NO_EXPERT)
    counts_E = mask_SE.sum(0).astype(jnp.int32)
    return Routing(choice_S1, gate_S1, aux_loss, counts_E)


def top2(
    logits_SE: Float[Array, "tokens experts"],
    *,
    capacity: int | None,
    gumbel: Float[Array, "tokens experts"] | None = None,
) -> Routing:
    """Two experts a token, gated by their shares of the kept probability (GShard).

    A token's second choice comes behind all first choices in an expert's queue.

    Args:
        capacity: tokens that an expert takes; `None`: no token is dropped.
        gumbel: Gumbel noise that is added to the logits for the second choice
            (`top2_2nd_expert_sampling`).
    """
    num_experts = logits_SE.shape[1]
    logits_SE = logits_SE.astype(jnp.float32)
    gates_SE = jax.nn.softmax(logits_SE, axis=1)
    first_S = jnp.argmax(gates_SE, axis=1).astype(jnp.int32)
    first_SE = jax.nn.one_hot(first_S, num_experts, dtype=jnp.float32)
    noisy_SE = logits_SE if gumbel is None else logits_SE + gumbel
    others_SE = jnp.where(first_SE > 0, -jnp.inf, noisy_SE)
    second_S = jnp.argmax(others_SE, axis=1).astype(jnp.int32)
    second_SE = jax.nn.one_hot(second_S, num_experts, dtype=jnp.float32)
    aux_loss = jnp.mean(gates_SE.mean(0) * first_SE.mean(0)) * num_experts**2
    counts_E = (first_SE + second_SE).sum(0).astype(jnp.int32)
    if capacity is not None:
        ahead_E = first_SE.sum(0, keepdims=True)
        first_SE = first_SE * (jnp.cumsum(first_SE, axis=0) <= capacity)
        second_SE = second_SE * (jnp.cumsum(second_SE, axis=0) + ahead_E <= capacity)
    kept = jnp.stack([first_SE, second_SE], axis=1)
    gate_Sk = jnp.einsum("SE,SkE->Sk", gates_SE, kept)
    gate_Sk = gate_Sk / _at_least_epsilon(gate_Sk.sum(1, keepdims=True))
    index_Sk = jnp.stack([first_S, second_S], axis=1)
    choice_Sk = jnp.where(kept.any(axis=2), index_Sk, NO_EXPERT)
    return Routing(choice_Sk, gate_Sk, aux_loss, counts_E)


def top_k(
    logits_SE: Float[Array, "tokens experts"],
    k: int,
    *,
    capacity: int | None,
    drop_policy: str = "probs",
) -> Routing:
    """The k likeliest experts of a token, gated by shares of the kept probability.

    Args:
        capacity: tokens that an expert takes; `None`: no token is dropped.
        drop_policy: which tokens an expert takes that is chosen too often: "probs",
            those of the largest probability, or "position", the first.
    """
    num_tokens, num_experts = logits_SE.shape
    gates_SE = jax.nn.softmax(logits_SE.astype(jnp.float32), axis=1)
    top_Sk, index_Sk = jax.lax.top_k(gates_SE, k)
    chosen = jax.nn.one_hot(index_Sk, num_experts, dtype=jnp.float32)
    mask_SE = chosen.sum(1)
    aux_loss = jnp.mean(gates_SE.mean(0) * mask_SE.mean(0)) * num_experts**2 / k
    kept_SE = mask_SE
    if capacity is not None and capacity < num_tokens:
        if drop_policy == "probs":
            kept_SE = mask_SE * _largest(mask_SE * gates_SE, capacity)
        else:
            kept_SE = mask_SE * (jnp.cumsum(mask_SE, axis=0) <= capacity)
    is_kept_Sk = jnp.einsum("SkE,SE->Sk", chosen, kept_SE) > 0
    gate_Sk = jnp.where(is_kept_Sk, top_Sk, 0.0)
    gate_Sk = gate_Sk / _at_least_epsilon(gate_Sk.sum(1, keepdims=True))
    choice_Sk = jnp.where(is_kept_Sk, index_Sk, NO_EXPERT).astype(jnp.int32)
    return Routing(choice_Sk, gate_Sk, aux_loss, mask_SE.sum(0).astype(jnp.int32))


def z_loss(logits: Float[Array, "tokens experts"]) -> Float[Array, ""]:
    """Mean squared log of the softmax's denominator: keeps router logits small.

    ST-MoE, https://arxiv.org/abs/2202.08906, equation 5. Weighted by 1e-3 there.
    """
    log_z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return jnp.mean(log_z**2)


def _largest(values_SE: jax.Array, count: int) -> jax.Array:
    """One where a value is among the `count` largest of its column, else zero."""
    _, index_EC = jax.lax.top_k(values_SE.T, count)
    rows_E1 = jnp.arange(values_SE.shape[1])[:, None]
    return jnp.zeros(values_SE.shape[::-1]).at[rows_E1, index_EC].set(1.0).T


def _at_least_epsilon(values: jax.Array) -> jax.Array:
    return jnp.maximum(values, jnp.finfo(jnp.float32).eps)
