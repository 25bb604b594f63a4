"""The MoE layer as a Flax Linen module, around any expert module."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from zinf.moe.experts import experts
from zinf.moe.gating import balanced_bias
from zinf.moe.layer import ROUTER_INIT, Mixed, check_bias, weighed
from zinf.moe.routing import Router


class MoE(nn.Module):
    """`zinf.moe.MoE` for Linen: the same routes, experts and options.

    Parameters: "router" [dim, experts], and "experts", one expert's stacked along a
    leading dim; with `use_residual` also "residual" and "coefficient". With
    `load_balance_coeff` the router's bias is "router_bias" in the collection
    "router_state", which must be mutable in training.

    Attributes:
        expert: a module from (rows, dim) to the same shape, each row by itself, with
            no variables but parameters.
        router: what decides on routes, with the number of experts.
        use_residual: PR-MoE's residual expert.
        load_balance_coeff: see `zinf.moe.MoE`.
        block, splits: see `zinf.moe.experts`.
    """

    expert: nn.Module
    router: Router
    use_residual: bool = False
    load_balance_coeff: float | None = None
    block: int | None = None
    splits: int = 1

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch dim"],
        *,
        key: jax.Array | None = None,
        deterministic: bool = False,
    ) -> Mixed:
        dim = x.shape[-1]
        rows = x.reshape(-1, dim)
        expert = self.expert.clone(parent=None)
        one = jax.ShapeDtypeStruct((1, dim), x.dtype)

        def init(key: jax.Array) -> Any:
            variables = expert.init(key, jnp.zeros(one.shape, one.dtype))
            others = sorted(set(variables) - {"params"})
            if others:
                raise ValueError(
                    f"An expert has variables in {', '.join(others)}. Experts compute "
                    "rows in blocks, so only parameters can be kept; move the others "
                    "out of the expert."
                )
            return variables["params"]

        def init_all(key: jax.Array) -> Any:
            return jax.vmap(init)(jax.random.split(key, self.router.num_experts))

        def apply(weights: Any, rows: jax.Array) -> jax.Array:
            return jnp.asarray(expert.apply({"params": weights}, rows))

        shape = dim, self.router.num_experts
        kernel = self.param("router", ROUTER_INIT, shape, jnp.float32)
        weights = self.param("experts", init_all)
        bias, rate = None, self.load_balance_coeff
        if rate is not None:
            check_bias(self.router)
            zeros = jnp.zeros(self.router.num_experts, jnp.float32)
            bias = self.variable("router_state", "router_bias", lambda: zeros)
        routing = self.router(
            kernel,
            rows,
            key=key,
            train=not deterministic,
            bias_E=None if bias is None else bias.value,
        )
        is_trained = not (deterministic or self.is_initializing())
        if bias is not None and rate is not None and is_trained:
            bias.value = balanced_bias(bias.value, routing.counts, rate)
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
        if self.use_residual:
            logits = nn.Dense(2, name="coefficient")(rows)
            residual = apply(self.param("residual", init), rows)
            output = weighed(output, residual, logits)
        output = output.astype(x.dtype).reshape(x.shape)
        return Mixed(output, routing.aux_loss, routing.counts, routing.dropped)
