"""GPT with a cache of keys and values, for generation.

A cache is {"at": int32 (B,), "starts": int32 (B,), "layers": [{"key": (B, C, K, H),
"value": (B, C, K, H)}, ...]}. Sequences are padded on the left: position p of a
sequence is in slot `start + p`, and slots before `start` are never attended to. The
next token of a sequence goes to slot `at`. The suffixes are those of `gpt.py`; also

  C  slots of the cache
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zinf.models.gpt_config import GPTConfig
from zinf.models.gpt_layers import ROPE_BASE, Attention, Block, Rope, rotate
from zinf.moe import MoE
from zinf_kernels.attention import attention

Cache = dict[str, Any]


def init_cache(
    config: GPTConfig, starts_B: jax.Array, length: int, dtype: Any = jnp.float32
) -> Cache:
    """The cache before the first token, with room for `length` slots.

    Args:
        starts_B: the first slot of each sequence that holds a token.
        dtype: of keys and values: that of the parameters.
    """
    if config.capacity_factor is not None and any(config.experts_of_blocks):
        raise NotImplementedError(
            "Experts with a capacity_factor drop tokens, and which ones depends on the "
            "other sequences. Generate with capacity_factor=None."
        )
    shape = len(starts_B), length, config.kv_heads, config.head_dim
    layer = lambda: {n: jnp.zeros(shape, dtype) for n in ("key", "value")}  # noqa: E731
    return {
        "at": jnp.zeros(len(starts_B), jnp.int32),
        "starts": jnp.asarray(starts_B, jnp.int32),
        "layers": [layer() for _ in range(config.num_layers)],
    }


def decode(model: Any, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Float32 logits (B, V) of the token after `tokens_BT`, and the new cache.

    Args:
        model: a `GPT`, whose module imports this one.
    """
    x_BTD, new = _read(model, tokens_BT, cache)
    return _logits(model, x_BTD[:, -1]), new


def decode_all(
    model: Any, tokens_BT: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """As `decode`, with logits of the token after each: float32 (B, T, V)."""
    x_BTD, new = _read(model, tokens_BT, cache)
    return _logits(model, x_BTD), new


def take_back(cache: Cache, num_tokens_B: jax.Array) -> Cache:
    """The cache before the last `num_tokens_B` tokens of each sequence were read."""
    return {**cache, "at": cache["at"] - num_tokens_B}


def _read(model: Any, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """The outputs of the last block, (B, T, D), and the new cache."""
    config, at_B, starts_B = model.config, cache["at"], cache["starts"]
    num_slots, length = cache["layers"][0]["key"].shape[1], tokens_BT.shape[1]
    slots_BT = at_B[:, None] + jnp.arange(length)[None]
    # The padding has position 0. Guesses may reach beyond the longest sequence, and are
    # dropped there. Nothing that is read depends on either.
    positions_BT = jnp.clip(slots_BT - starts_B[:, None], 0, config.max_length - 1)
    # Slots before a sequence's first token are padding, of another segment.
    sees: dict[str, Any] = {
        "q_positions": slots_BT,
        "q_segments": jnp.ones((len(starts_B), length), jnp.int32),
        "k_segments": jnp.asarray(
            jnp.arange(num_slots)[None] >= starts_B[:, None], jnp.int32
        ),
    }
    x_BTD = jnp.take(model.token_embedding[...], tokens_BT, axis=0)
    if model.position_embedding is not None:
        x_BTD += jnp.take(model.position_embedding[...], positions_BT, axis=0)
    rope = None
    if config.position == "rope":
        rope = _rope_at(positions_BT, config.head_dim)
    layers = []
    for i, old in enumerate(cache["layers"]):
        block = _block(model, i)
        x_BTD, new = _run_block(block, x_BTD, rope, sees, at_B, old)
        layers.append(new)
    return x_BTD, {"at": at_B + length, "starts": starts_B, "layers": layers}


def _logits(model: Any, x: jax.Array) -> jax.Array:
    """Float32 logits (..., V) of the outputs (..., D) of the last block."""
    x, output = model.norm(x), model.output_embedding
    output_VD = (model.token_embedding if output is None else output)[...]
    return jnp.einsum("...D,VD->...V", x, output_VD, preferred_element_type=jnp.float32)


def _block(model: Any, layer: int) -> Block:
    if isinstance(model.blocks, nnx.List):
        return model.blocks[layer]
    graphdef, stacked = nnx.split(model.blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[layer], stacked))


def _rope_at(positions_BT: jax.Array, head_dim: int) -> Rope:
    """The tables of `rope_tables`, for these positions."""
    exponents_111R = jnp.arange(0, head_dim, 2)[None, None, None] / head_dim
    angles_BT1R = positions_BT[..., None, None] * ROPE_BASE**-exponents_111R
    return jnp.cos(angles_BT1R), jnp.sin(angles_BT1R)


def _run_block(
    block: Block,
    x_BTD: jax.Array,
    rope: Rope | None,
    sees: dict[str, Any],
    at_B: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    hidden_BTD = block.attention_norm(x_BTD)
    attended_BTD, new = _attend(block.attention, hidden_BTD, rope, sees, at_B, cache)
    x_BTD = x_BTD + attended_BTD
    hidden_BTD = block.mlp_norm(x_BTD)
    if isinstance(block.mlp, MoE):
        hidden_BTD = block.mlp(hidden_BTD).output
    else:
        hidden_BTD = block.mlp(hidden_BTD)
    return x_BTD + hidden_BTD, new


def _attend(
    layer: Attention,
    x_BTD: jax.Array,
    rope: Rope | None,
    sees: dict[str, Any],
    at_B: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    heads = (*x_BTD.shape[:2], -1, layer.head_dim)
    query_BTNH = layer.query(x_BTD).reshape(heads)
    key_BTKH = layer.key(x_BTD).reshape(heads)
    value_BTKH = layer.value(x_BTD).reshape(heads)
    if rope is not None:
        query_BTNH, key_BTKH = rotate(query_BTNH, rope), rotate(key_BTKH, rope)
    made = {"key": key_BTKH, "value": value_BTKH}
    new = {
        name: jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(
            cache[name], part.astype(cache[name].dtype), at_B, 0
        )
        for name, part in made.items()
    }
    mixed_BTNH = attention(query_BTNH, new["key"], new["value"], causal=True, **sees)
    return layer.out(mixed_BTNH.reshape(*x_BTD.shape[:2], -1)), new
