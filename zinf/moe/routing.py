"""The router of an MoE layer: from tokens to routes, with DeepSpeed's options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf.moe.gating import (
    Capacity,
    Routing,
    capacity_of,
    expert_choice,
    sigmoid_top_k,
    top1,
    top2,
    top_k,
)

NoisyGatePolicy = Literal["Jitter", "RSample"]
DropPolicy = Literal["probs", "position"]
ScoreFunction = Literal["softmax", "sigmoid"]
JITTER = 1e-2  # Switch Transformers, table 11, and DeepSpeed's multiplicative_jitter.


@dataclass(frozen=True, kw_only=True)
class Router:
    """What decides on routes, under the names of `deepspeed.moe.layer.MoE`.

    Capacity is counted in each routing group of `group_size` tokens, so that the same
    tokens are dropped on any mesh; DeepSpeed counts on each rank, for as many tokens as
    the rank has.

    Attributes:
        num_experts: how many experts there are to choose from.
        k: experts a token.
        capacity_factor: in training an expert takes up to this times k times the tokens
            of a group over the number of experts.
        eval_capacity_factor: the same outside training.
        min_capacity: an expert's capacity is at least this.
        drop_tokens: False: no token is dropped, whatever the capacity.
        drop_policy: for k above 2, which tokens an expert takes that is chosen too
            often: "probs", those of the largest probability, or "position", the first.
        noisy_gate_policy: in training, "Jitter" multiplies the router's input by
            numbers within 1% of one; "RSample", for k = 1, adds Gumbel noise to the
            logits that choose.
        use_rts: for k = 1 in training, an expert that is chosen too often takes random
            tokens; otherwise the first.
        top2_2nd_expert_sampling: for k = 2 in training, the second expert is drawn in
            proportion to its probability.
        group_size: tokens of a routing group; None: all tokens are one group.
        score_func: "softmax", or "sigmoid" for DeepSeek-V3's router
            (`zinf.moe.sigmoid_top_k`). This and the next four have the names of
            DeepSpeed's AutoEP.
        num_expert_groups, num_limited_groups: with "sigmoid", a token chooses in so
            many of so many groups of neighbouring experts.
        route_norm, route_scale: with "sigmoid", whether the gates of a token are
            divided by their sum, and what they are multiplied with then.
        expert_choice: each expert chooses as many tokens as its capacity
            (`zinf.moe.expert_choice`); k is the mean number of experts a token.
        may_see_later_tokens: must be true with `expert_choice`: which experts a token
            gets depends on all tokens of its group. A causal model would learn from
            tokens that it does not have when it generates.

    Raises:
        ValueError: an option out of its range, or k above the number of experts.
    """

    num_experts: int
    k: int = 1
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    drop_tokens: bool = True
    drop_policy: DropPolicy = "probs"
    noisy_gate_policy: NoisyGatePolicy | None = None
    use_rts: bool = True
    top2_2nd_expert_sampling: bool = True
    group_size: int | None = None
    score_func: ScoreFunction = "softmax"
    num_expert_groups: int = 1
    num_limited_groups: int | None = None
    route_norm: bool = True
    route_scale: float = 1.0
    expert_choice: bool = False
    may_see_later_tokens: bool = False

    def __post_init__(self) -> None:
        _at_least(1, num_experts=self.num_experts, k=self.k)
        _at_least(0, min_capacity=self.min_capacity)
        if self.k > self.num_experts:
            raise ValueError(
                f"k is {self.k} but there are {self.num_experts} experts. Lower k, or "
                "raise num_experts."
            )
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if not factor > 0:
                raise ValueError(
                    f"{name} is {factor}; it must be above zero, or every token would "
                    "be dropped. drop_tokens=False drops none."
                )
        policies = (None, *get_args(NoisyGatePolicy))
        _one_of("noisy_gate_policy", self.noisy_gate_policy, policies)
        _one_of("drop_policy", self.drop_policy, get_args(DropPolicy))
        if self.noisy_gate_policy == "RSample" and self.k != 1:
            raise ValueError(
                f"noisy_gate_policy RSample is for k = 1, and k is {self.k}. Use "
                "Jitter, or k = 1."
            )
        if self.group_size is not None:
            _at_least(1, group_size=self.group_size)
        self._check_scores()
        self._check_expert_choice()

    def _check_scores(self) -> None:
        _one_of("score_func", self.score_func, get_args(ScoreFunction))
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if self.score_func == "softmax" and (
            groups != 1 or limited or not self.route_norm or self.route_scale != 1.0
        ):
            raise ValueError(
                "num_expert_groups, num_limited_groups, route_norm and route_scale are "
                'options of score_func="sigmoid". Set it, or leave them out.'
            )
        _at_least(1, num_expert_groups=groups)
        if self.num_experts % groups:
            raise ValueError(
                f"num_expert_groups is {groups}; it must divide the "
                f"{self.num_experts} experts evenly."
            )
        if limited is None:
            return
        if not 1 <= limited <= groups:
            raise ValueError(
                f"num_limited_groups is {limited}; it must be between 1 and "
                f"num_expert_groups, {groups}."
            )
        if self.k > limited * self.num_experts // groups:
            raise ValueError(
                f"k is {self.k}, but {limited} of {groups} groups have "
                f"{limited * self.num_experts // groups} experts. Raise "
                "num_limited_groups, or lower k."
            )

    def _check_expert_choice(self) -> None:
        if not self.expert_choice:
            return
        if not self.may_see_later_tokens:
            raise ValueError(
                "expert_choice lets the experts of a token depend on later tokens, so "
                "a causal model would train on what it does not have when it "
                "generates. Use it in encoders, or, if that is meant, pass "
                "may_see_later_tokens=True."
            )
        if (
            self.score_func == "sigmoid"
            or self.noisy_gate_policy
            or not self.drop_tokens
        ):
            raise ValueError(
                "expert_choice takes as many tokens as the capacity of an expert, by "
                'softmax and without noise. Leave out score_func="sigmoid", '
                "noisy_gate_policy and drop_tokens=False."
            )

    @property
    def needs_key(self) -> bool:
        """Whether training draws random numbers."""
        if self.expert_choice or self.score_func == "sigmoid":
            return self.noisy_gate_policy is not None
        draws_second = self.k == 2 and self.top2_2nd_expert_sampling
        selects = self.k == 1 and self.use_rts and self.drop_tokens
        return self.noisy_gate_policy is not None or draws_second or selects

    def capacity(self, num_tokens: int, *, train: bool) -> int | None:
        """Tokens that an expert takes of a group of `num_tokens`; None: any number."""
        if not self.drop_tokens:
            return None
        factor = self.capacity_factor if train else self.eval_capacity_factor
        return capacity_of(
            num_tokens, self.num_experts, factor * self.k, self.min_capacity
        )

    def __call__(
        self,
        kernel_DE: Float[Array, "dim experts"],
        x_TD: Float[Array, "tokens dim"],
        *,
        key: jax.Array | None = None,
        train: bool = True,
        bias_E: Float[Array, " experts"] | None = None,
    ) -> Routing:
        """Routes of the tokens, computed in float32 whatever the dtype of `x_TD`.

        Args:
            kernel_DE: the router's weights.
            key: a random key; needed in training if `needs_key`.
            train: False: no noise, and `eval_capacity_factor`.
            bias_E: with "sigmoid", what is added to scores for the choice alone.

        Raises:
            ValueError: a key is missing, the kernel has another number of experts,
                tokens do not divide into groups, or a group is smaller than
                `min_capacity`.
        """
        self._check(kernel_DE, x_TD, bias_E)
        if not train:
            key = None
        elif key is None and self.needs_key:
            raise ValueError(
                "The router draws random numbers in training (use_rts, "
                "top2_2nd_expert_sampling or noisy_gate_policy) and got no key. Pass "
                "key=, or train=False, or turn these options off."
            )
        x_TD = x_TD.astype(jnp.float32)
        noise_key, choice_key = (None, None) if key is None else jax.random.split(key)
        if noise_key is not None and self.noisy_gate_policy == "Jitter":
            low, high = 1.0 - JITTER, 1.0 + JITTER
            x_TD *= jax.random.uniform(noise_key, x_TD.shape, minval=low, maxval=high)
        # Routes depend on the last bits of logits, so these are never rounded to a
        # lower precision than the parameters' (https://arxiv.org/abs/2101.03961, 2.4).
        logits_TE = jnp.dot(
            x_TD, kernel_DE.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        num_tokens = x_TD.shape[0]
        group_size = self.group_size or num_tokens
        capacity = self.capacity(group_size, train=train)
        route = self._gating(capacity, bias_E)
        grouped = logits_TE.reshape(-1, group_size, self.num_experts)
        keys = None
        if choice_key is not None:
            keys = jax.random.split(choice_key, grouped.shape[0])
        routing = jax.vmap(route, in_axes=(0, None if keys is None else 0))(
            grouped, keys
        )
        return replace(
            routing,
            choice=routing.choice.reshape(num_tokens, -1),
            gate=routing.gate.reshape(num_tokens, -1),
            aux_loss=routing.aux_loss.mean(),
            counts=routing.counts.sum(0),
            capacity=None if capacity is None else Capacity(capacity, group_size),
        )

    def _gating(
        self, capacity: int | None, bias_E: jax.Array | None
    ) -> Callable[[jax.Array, jax.Array | None], Routing]:
        """A function that routes one group; without a key it draws no numbers."""

        def route(logits_SE: jax.Array, key: jax.Array | None) -> Routing:
            shape = logits_SE.shape
            if self.expert_choice:
                assert capacity is not None, "it needs drop_tokens"
                return expert_choice(logits_SE, capacity=capacity)
            if self.score_func == "sigmoid":
                return sigmoid_top_k(
                    logits_SE,
                    self.k,
                    bias_E=bias_E,
                    num_groups=self.num_expert_groups,
                    num_limited_groups=self.num_limited_groups,
                    is_normalised=self.route_norm,
                    scale=self.route_scale,
                    capacity=capacity,
                    drop_policy=self.drop_policy,
                )
            if self.k == 1:
                gumbel = uniform = None
                if key is not None and self.noisy_gate_policy == "RSample":
                    gumbel = jax.random.gumbel(jax.random.fold_in(key, 1), shape)
                if key is not None and self.use_rts:
                    uniform = jax.random.uniform(key, shape)
                return top1(
                    logits_SE, capacity=capacity, gumbel=gumbel, uniform=uniform
                )
            if self.k == 2:
                is_drawn = key is not None and self.top2_2nd_expert_sampling
                gumbel = jax.random.gumbel(key, shape) if is_drawn else None
                return top2(logits_SE, capacity=capacity, gumbel=gumbel)
            return top_k(
                logits_SE, self.k, capacity=capacity, drop_policy=self.drop_policy
            )

        return route

    def _check(
        self, kernel_DE: jax.Array, x_TD: jax.Array, bias_E: jax.Array | None
    ) -> None:
        if bias_E is not None and self.score_func != "sigmoid":
            raise ValueError('A bias of the router needs score_func="sigmoid".')
        if x_TD.ndim != 2 or kernel_DE.shape != (x_TD.shape[1], self.num_experts):
            raise ValueError(
                f"x is {x_TD.shape} and the router's kernel {kernel_DE.shape}; they "
                f"must be (tokens, dim) and (dim, {self.num_experts})."
            )
        num_tokens = x_TD.shape[0]
        group_size = self.group_size or num_tokens
        if num_tokens % group_size:
            raise ValueError(
                f"{num_tokens} tokens do not divide into routing groups of "
                f"{group_size}. Choose a group_size that divides them."
            )
        if self.drop_tokens and group_size < self.min_capacity:
            raise ValueError(
                f"A routing group has {group_size} tokens, fewer than min_capacity "
                f"({self.min_capacity}). Lower min_capacity, or raise the batch size."
            )


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")


def _one_of(name: str, value: str | None, allowed: tuple) -> None:
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {value!r}; it must be one of {names}.")
