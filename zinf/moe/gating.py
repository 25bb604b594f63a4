"""Which experts a token goes to, and with which weight.

The numbers are those of DeepSpeed's `top1gating`, `top2gating` and `topkgating`
(deepspeed/moe/sharded_moe.py; GShard, https://arxiv.org/abs/2006.16668, and Switch
Transformers, https://arxiv.org/abs/2101.03961), in float32. Their results are large
[tokens, experts, capacity] tensors; these are the same routes as indices, which
`zinf.moe.experts` takes. DeepSeek's router and expert choice are here too.

Randomness comes in as arrays that the caller has drawn, so that a gating is a pure
function, and can be compared on recorded draws.

Shape suffixes:
  S  tokens of a routing group   E  experts
  k  choices a token             C  capacity, in tokens an expert
"""

import math
from dataclasses import dataclass, field, replace
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
    _, index_Sk = jax.lax.top_k(gates_SE, k)
    routing = _kept(gates_SE, index_Sk, capacity, drop_policy)
    mask_E = routing.counts / num_tokens
    aux_loss = jnp.mean(gates_SE.mean(0) * mask_E) * num_experts**2 / k
    gate_Sk = routing.gate / _at_least_epsilon(routing.gate.sum(1, keepdims=True))
    return replace(routing, gate=gate_Sk, aux_loss=aux_loss)


def _kept(
    gates_SE: jax.Array, index_Sk: jax.Array, capacity: int | None, drop_policy: str
) -> Routing:
    """The routes to chosen experts without those that are dropped.

    Gates are entries of `gates_SE`; the balancing loss is left to the caller.
    """
    num_tokens, num_experts = gates_SE.shape
    chosen = jax.nn.one_hot(index_Sk, num_experts, dtype=jnp.float32)
    mask_SE = chosen.sum(1)
    kept_SE = mask_SE
    if capacity is not None and capacity < num_tokens:
        if drop_policy == "probs":
            kept_SE = mask_SE * _largest(mask_SE * gates_SE, capacity)
        else:
            kept_SE = mask_SE * (jnp.cumsum(mask_SE, axis=0) <= capacity)
    is_kept_Sk = jnp.einsum("SkE,SE->Sk", chosen, kept_SE) > 0
    top_Sk = jnp.take_along_axis(gates_SE, index_Sk, axis=1)
    gate_Sk = jnp.where(is_kept_Sk, top_Sk, 0.0)
    choice_Sk = jnp.where(is_kept_Sk, index_Sk, NO_EXPERT).astype(jnp.int32)
    counts_E = mask_SE.sum(0).astype(jnp.int32)
    return Routing(choice_Sk, gate_Sk, jnp.float32(0), counts_E)


def sigmoid_top_k(
    logits_SE: Float[Array, "tokens experts"],
    k: int,
    *,
    bias_E: Float[Array, " experts"] | None = None,
    num_groups: int = 1,
    num_limited_groups: int | None = None,
    is_normalised: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
    drop_policy: str = "probs",
) -> Routing:
    """The router of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.2).

    Each expert has a score of its own, the sigmoid of its logit. A bias, which balances
    the experts (`balanced_bias`), takes part in the choice alone, not in the gate. With
    groups of experts a token chooses in its best groups only: those whose two highest
    biased scores have the largest sum.

    The balancing loss is that of the paper's equation 17, over the routing group in
    place of a sequence.

    Args:
        num_groups: the experts are so many groups of neighbours.
        num_limited_groups: a token chooses in so many of them; `None`: in all.
        is_normalised: the gates of a token are divided by their sum.
        scale: what gates are multiplied with at last.
        capacity, drop_policy: see `top_k`; "probs" compares scores without the bias.
    """
    num_experts = logits_SE.shape[1]
    scores_SE = jax.nn.sigmoid(logits_SE.astype(jnp.float32))
    # The choice has no derivative, so neither has the bias.
    biased_SE = jax.lax.stop_gradient(scores_SE)
    if bias_E is not None:
        biased_SE += jax.lax.stop_gradient(bias_E.astype(jnp.float32))[None]
    if num_limited_groups is not None and num_limited_groups < num_groups:
        grouped = biased_SE.reshape(-1, num_groups, num_experts // num_groups)
        best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[2]))
        _, chosen = jax.lax.top_k(best_two.sum(-1), num_limited_groups)
        is_open = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(1)
        is_open = jnp.repeat(is_open, num_experts // num_groups, axis=1)
        biased_SE = jnp.where(is_open, biased_SE, -jnp.inf)
    _, index_Sk = jax.lax.top_k(biased_SE, k)
    shares_SE = scores_SE / _at_least_epsilon(scores_SE.sum(1, keepdims=True))
    routing = _kept(scores_SE, index_Sk, capacity, drop_policy)
    mask_E = routing.counts / (k * logits_SE.shape[0])
    aux_loss = jnp.sum(mask_E * shares_SE.mean(0)) * num_experts
    gate_Sk = routing.gate
    if is_normalised:
        gate_Sk /= _at_least_epsilon(gate_Sk.sum(1, keepdims=True))
    return replace(routing, gate=gate_Sk * scale, aux_loss=aux_loss)


def balanced_bias(
    bias_E: Float[Array, " experts"], counts_E: Int[Array, " experts"], rate: float
) -> Float[Array, " experts"]:
    """The bias of the next step: up by `rate` for experts with few tokens, else down.

    Balance without a loss (https://arxiv.org/abs/2408.15664, algorithm 1).
    """
    counts_E = counts_E.astype(bias_E.dtype)
    return bias_E + rate * jnp.sign(counts_E.mean() - counts_E)


def expert_choice(
    logits_SE: Float[Array, "tokens experts"], *, capacity: int
) -> Routing:
    """Each expert chooses tokens (https://arxiv.org/abs/2202.09368, section 3).

    Every expert takes exactly `capacity` tokens, those that give it the largest
    probability, so there is nothing to balance: the balancing loss is zero. A token
    goes to any number of experts, or to none. Which ones depends on the other tokens of
    the routing group, later ones too.

    Returns:
        a routing with one column for each expert.
    """
    num_tokens, num_experts = logits_SE.shape
    capacity = min(capacity, num_tokens)
    gates_SE = jax.nn.softmax(logits_SE.astype(jnp.float32), axis=1)
    kept_SE = _largest(gates_SE, capacity)
    numbers_E = jnp.arange(num_experts, dtype=jnp.int32)[None]
    choice_SE = jnp.where(kept_SE > 0, numbers_E, NO_EXPERT)
    counts_E = jnp.full(num_experts, capacity, jnp.int32)
    return Routing(choice_SE, gates_SE * kept_SE, jnp.float32(0), counts_E)


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
