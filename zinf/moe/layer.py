"""The MoE layer as a Flax NNX module, around any expert module."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from zinf.moe.experts import experts
from zinf.moe.gating import balanced_bias
from zinf.moe.routing import Router

ROUTER_INIT = nnx.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixed:
    """What an MoE layer returns.

    `output, aux_loss, counts = mixed` takes what DeepSpeed's layer returns.

    Attributes:
        output: of the shape and dtype of the input.
        aux_loss: float32 scalar, the load-balancing loss, to be added to the loss times
            a coefficient such as 0.01.
        counts: int32 [experts], tokens that chose each expert, dropped ones included.
        dropped: float32 scalar, the share of routes that were dropped.
    """

    output: Float[Array, "*batch dim"]
    aux_loss: Float[Array, ""]
    counts: Int[Array, " experts"]
    dropped: Float[Array, ""]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.output, self.aux_loss, self.counts))

    @property
    def usage(self) -> dict[str, jax.Array]:
        """How experts are used, for the auxiliary output of a loss and its metrics."""
        return {
            "tokens": self.counts,
            "dropped": self.dropped,
            "balance_loss": self.aux_loss,
        }


def weighed(
    output: Float[Array, "tokens dim"],
    residual: Float[Array, "tokens dim"],
    logits: Float[Array, "tokens 2"],
) -> Float[Array, "tokens dim"]:
    """PR-MoE's sum of the experts' output and the dense expert's, weighed by token."""
    weight = jax.nn.softmax(logits, axis=-1)
    return output * weight[:, :1] + residual * weight[:, 1:]


class RouterBias(nnx.Variable):
    """Biases that a router adds to scores of experts when it chooses; not trained."""


def check_bias(router: Router) -> None:
    """Raise ValueError if a router takes no bias."""
    if router.score_func != "sigmoid":
        raise ValueError(
            'load_balance_coeff moves a bias that only score_func="sigmoid" has. Set '
            "it, or leave load_balance_coeff out and add aux_loss to the loss."
        )


class MoE(nnx.Module):
    """A mixture of experts in place of a dense module, as `deepspeed.moe.layer.MoE`.

    The parameters of all experts are one expert's, stacked along a leading dim. Expert
    i starts from the numbers of `expert(nnx.Rngs(fold_in(key, i)))`.

    With `use_residual` it is a residual expert of PR-MoE
    (https://arxiv.org/abs/2201.05596, section 4.1): every token also passes one dense
    expert, and two learned, normalised coefficients weigh the sum.

    Args:
        hidden_size: the width of tokens.
        expert: makes one expert: a module from (rows, hidden_size) to the same shape,
            each row by itself. Its variables must be parameters alone.
        num_experts: how many.
        k: experts a token.
        use_residual: see above.
        shared_expert: makes a dense module whose result is added for every token
            (DeepSeekMoE, https://arxiv.org/abs/2401.06066).
        load_balance_coeff: with `score_func="sigmoid"`, the experts are balanced by a
            bias of the router and not by a loss: each call in training moves it by so
            much (`zinf.moe.balanced_bias`). It is a `RouterBias`, which is state of the
            model and has no gradient; 0.001 in DeepSeek-V3.
        block, splits: see `zinf.moe.experts`.
        options: of `Router`: capacity_factor, min_capacity, drop_tokens, ...

    Raises:
        ValueError: as `Router` and `zinf.moe.experts` do, or an expert has variables
            that are not parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: Callable[[nnx.Rngs], nnx.Module],
        num_experts: int,
        k: int = 1,
        *,
        use_residual: bool = False,
        shared_expert: Callable[[nnx.Rngs], nnx.Module] | None = None,
        load_balance_coeff: float | None = None,
        block: int | None = None,
        splits: int = 1,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.router = Router(num_experts=num_experts, k=k, **options)
        self.load_balance_coeff = load_balance_coeff
        self.router_bias: RouterBias | None = nnx.data(None)
        if load_balance_coeff is not None:
            check_bias(self.router)
            self.router_bias = RouterBias(jnp.zeros(num_experts, jnp.float32))
        self.block, self.splits = block, splits
        self.deterministic = False  # `module.eval()` sets it.
        kernel = ROUTER_INIT(rngs.params(), (hidden_size, num_experts), jnp.float32)
        self.router_kernel = nnx.Param(kernel)
        self.experts = _stacked(expert, num_experts, rngs.params())
        self.shared_expert = nnx.data(
            None if shared_expert is None else shared_expert(rngs)
        )
        self.residual: nnx.Module | None = nnx.data(None)
        self.coefficient: nnx.Linear | None = nnx.data(None)
        if use_residual:
            self.residual = expert(rngs)
            self.coefficient = nnx.Linear(hidden_size, 2, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*batch dim"],
        *,
        key: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> Mixed:
        """Sends each token through its experts.

        Args:
            x: tokens; all dims but the last are tokens.
            key: a random key, if the router draws in training (`router.needs_key`).
            deterministic: True: `eval_capacity_factor`, no noise and no key. None: what
                `module.eval()` or `module.train()` has set.
        """
        if deterministic is None:
            deterministic = self.deterministic
        rows = x.reshape(-1, x.shape[-1])
        state, rate = self.router_bias, self.load_balance_coeff
        bias = None if state is None else state[...]
        routing = self.router(
            self.router_kernel[...],
            rows,
            key=key,
            train=not deterministic,
            bias_E=bias,
        )
        if state is not None and rate is not None and not deterministic:
            state[...] = balanced_bias(state[...], routing.counts, rate)
        graphdef, weights = nnx.split(self.experts)

        def apply(weights: Any, rows: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, weights)(rows)

        output = experts(
            apply,
            weights,
            rows,
            routing.choice,
            routing.gate,
            block=self.block,
            splits=self.splits,
            capacity=routing.capacity,
        )
        if self.coefficient is not None and self.residual is not None:
            output = weighed(output, self.residual(rows), self.coefficient(rows))
        if self.shared_expert is not None:
            output = output + self.shared_expert(rows)
        output = output.astype(x.dtype).reshape(x.shape)
        return Mixed(output, routing.aux_loss, routing.counts, routing.dropped)


def _stacked(
    expert: Callable[[nnx.Rngs], nnx.Module], num_experts: int, key: jax.Array
) -> nnx.Module:
    """One module whose parameters are all experts', along a leading dim."""

    @nnx.vmap
    def create(key: jax.Array) -> nnx.Module:
        return expert(nnx.Rngs(key))

    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    made = create(fold_in(key, jnp.arange(num_experts)))
    others = jax.tree.leaves(nnx.state(made, nnx.Not(nnx.Param)))
    if others:
        raise ValueError(
            f"An expert has {len(others)} variables that are not nnx.Param, such as "
            "random keys of dropout or running averages. Experts compute rows in "
            "blocks, so these cannot be kept; move them out of the expert."
        )
    return made
