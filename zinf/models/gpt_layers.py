"""The layers of `gpt.py`, whose shape suffixes these are."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from zinf.models.gpt_config import GPTConfig
from zinf.moe import MoE, exchanged
from zinf_kernels.attention import attention

Usage = dict[str, jax.Array]  # `zinf.moe.Mixed.usage`
Rope = tuple[jax.Array, jax.Array]  # cosines_1T1R, sines_1T1R

INIT_STDDEV = 0.02  # GPT-2
NORM_EPSILON = 1e-5  # GPT-2 and Llama 2
ROPE_BASE = 10_000.0  # RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2


def _linear(
    config: GPTConfig,
    in_dim: int,
    out_dim: int,
    *,
    rngs: nnx.Rngs,
    adds_to_residual: bool = False,
) -> nnx.Linear:
    # GPT-2, section 2.3: 2L sublayers add to the residual stream. Each has 1/sqrt(2L)
    # of the standard deviation, so the sum does not grow with depth.
    scale = (2 * config.num_layers) ** -0.5 if adds_to_residual else 1.0
    return nnx.Linear(
        in_dim,
        out_dim,
        use_bias=config.use_bias,
        kernel_init=nnx.initializers.normal(INIT_STDDEV * scale),
        rngs=rngs,
    )


def norm(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.embed_dim, epsilon=NORM_EPSILON, rngs=rngs)
    return nnx.LayerNorm(
        config.embed_dim, epsilon=NORM_EPSILON, use_bias=config.use_bias, rngs=rngs
    )


def rope_tables(length: int, head_dim: int) -> Rope:
    """Float32 cosines and sines of the rotary angles (RoFormer, section 3.2.2)."""
    positions_1T11 = jnp.arange(length)[None, :, None, None]
    exponents_111R = jnp.arange(0, head_dim, 2)[None, None, None] / head_dim
    angles_1T1R = positions_1T11 * ROPE_BASE**-exponents_111R
    return jnp.cos(angles_1T1R), jnp.sin(angles_1T1R)


def rotate(x_BTNH: jax.Array, rope: Rope) -> jax.Array:
    """Rotates entry i of each head with entry i + R, the pairs of Llama's checkpoints.

    Computes in float32, because bfloat16 angles cannot tell distant positions apart.
    """
    cos_1T1R, sin_1T1R = rope
    a_BTNR, b_BTNR = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated_BTNH = jnp.concatenate(
        (a_BTNR * cos_1T1R - b_BTNR * sin_1T1R, b_BTNR * cos_1T1R + a_BTNR * sin_1T1R),
        axis=-1,
    )
    return rotated_BTNH.astype(x_BTNH.dtype)


class Attention(nnx.Module):
    """Causal self-attention, with one key and value head per group of query heads."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        query_dim = config.num_heads * config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.query = _linear(config, config.embed_dim, query_dim, rngs=rngs)
        self.key = _linear(config, config.embed_dim, kv_dim, rngs=rngs)
        self.value = _linear(config, config.embed_dim, kv_dim, rngs=rngs)
        self.out = _linear(
            config, query_dim, config.embed_dim, rngs=rngs, adds_to_residual=True
        )

    def __call__(self, x_BTD: jax.Array, rope: Rope | None) -> jax.Array:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        query_BTNH = self.query(x_BTD).reshape(heads)
        key_BTKH = self.key(x_BTD).reshape(heads)
        value_BTKH = self.value(x_BTD).reshape(heads)
        if rope is not None:
            query_BTNH, key_BTKH = rotate(query_BTNH, rope), rotate(key_BTKH, rope)
        mixed_BTNH = attention(query_BTNH, key_BTKH, value_BTKH, causal=True)
        return self.out(mixed_BTNH.reshape(*x_BTD.shape[:2], -1))


class MLP(nnx.Module):
    """Two kernels around a GELU, or the three kernels of SwiGLU."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(_linear, config, rngs=rngs)
        self.gate: nnx.Linear | None = nnx.data(None)
        if config.activation == "swiglu":
            self.gate = linear(config.embed_dim, config.hidden_dim)
        self.up = linear(config.embed_dim, config.hidden_dim)
        self.down = linear(config.hidden_dim, config.embed_dim, adds_to_residual=True)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x_BTD)))
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


def _experts(config: GPTConfig, num_experts: int, *, rngs: nnx.Rngs) -> MoE:
    # The likeliest experts and the first tokens: nothing is drawn, so no key is needed.
    return MoE(
        config.embed_dim,
        lambda rngs: MLP(config, rngs=rngs),
        num_experts,
        config.experts_per_token,
        drop_tokens=config.capacity_factor is not None,
        capacity_factor=config.capacity_factor or 1.0,
        eval_capacity_factor=config.capacity_factor or 1.0,
        min_capacity=1,
        group_size=config.routing_group_size,
        use_rts=False,
        top2_2nd_expert_sampling=False,
        use_residual=config.residual_experts,
        splits=config.expert_splits,
        rngs=rngs,
    )


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm and added to its input.

    Experts may stand in place of the MLP.
    """

    def __init__(self, config: GPTConfig, num_experts: int = 0, *, rngs: nnx.Rngs):
        self.attention_norm = norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config, rngs=rngs)
        self.mlp: MLP | MoE
        if num_experts:
            self.mlp = _experts(config, num_experts, rngs=rngs)
        else:
            self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.keeps_exchanged = config.communication_aware_remat

    def __call__(
        self, x_BTD: jax.Array, rope: Rope | None, key: jax.Array | None
    ) -> tuple[jax.Array, Usage | None]:
        """The output, and how experts are used where there are any."""
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        attended_BTD = self.attention(self.attention_norm(x_BTD), rope)
        if self.keeps_exchanged:  # Devices along `tensor` have added their heads.
            attended_BTD = exchanged(attended_BTD)
        x_BTD = x_BTD + drop(self.dropout, attended_BTD, attention_key)
        hidden_BTD = self.mlp_norm(x_BTD)
        usage = None
        if isinstance(self.mlp, MoE):
            mixed = self.mlp(hidden_BTD)
            hidden_BTD, usage = mixed.output, mixed.usage
        else:
            hidden_BTD = self.mlp(hidden_BTD)
            if self.keeps_exchanged:
                hidden_BTD = exchanged(hidden_BTD)
        return x_BTD + drop(self.dropout, hidden_BTD, mlp_key), usage


def drop(dropout: nnx.Dropout, x: jax.Array, key: jax.Array | None) -> jax.Array:
    return dropout(x, rngs=key, deterministic=key is None)
