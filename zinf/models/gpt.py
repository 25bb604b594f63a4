"""A decoder-only Transformer in Flax NNX, with GPT-2 and Llama style options.

An ordinary NNX model: it knows nothing of segments, tiers or plans. Blocks are pre-norm
(GPT-2: Radford et al. 2019; Llama: Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

Shape suffixes:
  B  sequences in the batch          N  query heads
  T  tokens in a sequence            K  key and value heads
  D  embed_dim                       H  head_dim
  V  vocab_size                      R  head_dim / 2, the rotated pairs
  L  num_layers
  S  layers that drop tokens
  P  tokens that those keep
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zinf.core.problem.cross_entropy import cross_entropy
from zinf.models.gpt_config import GPTConfig
from zinf.models.gpt_decode import Cache, decode, decode_all, init_cache, take_back
from zinf.models.gpt_layers import (
    INIT_STDDEV,
    Block,
    Rope,
    Usage,
    drop,
    norm,
    rope_tables,
)
from zinf.models.random_ltd import random_ltd
from zinf.moe import keeps_exchanged

Params = dict[str, Any]  # Nested dicts of arrays, from `nnx.to_pure_dict`.
Batch = Mapping[str, jax.Array]


def _layer_key(
    key: jax.Array | None, layer: int | jax.Array | None
) -> jax.Array | None:
    return None if key is None or layer is None else jax.random.fold_in(key, layer)


class GPT(nnx.Module):
    """A decoder-only Transformer: tokens to the logits of each next token.

    All state is `nnx.Param`, float32 when created. The model computes in the dtype of
    the parameters that it is given; logits are always float32. Each layer draws its
    weights from its own key, so stacked and separate blocks start from equal weights,
    and one leaf can be initialised without the others.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        table = nnx.initializers.normal(INIT_STDDEV)
        token_shape = (config.vocab_size, config.embed_dim)
        self.config = config
        self.token_embedding = nnx.Param(table(rngs.params(), token_shape))
        self.position_embedding: nnx.Param | None = nnx.data(None)
        if config.position == "learned":
            self.position_embedding = nnx.Param(
                table(rngs.params(), (config.max_length, config.embed_dim))
            )
        self.blocks = _blocks(config, rngs.params())
        self.norm = norm(config, rngs=rngs)
        self.output_embedding: nnx.Param | None = nnx.data(None)
        if not config.tied_embeddings:
            self.output_embedding = nnx.Param(table(rngs.params(), token_shape))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        kept_BSP: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits (B, T, V) of the token after each of `tokens_BT`.

        A token outside the vocabulary gives NaN logits, so the loss is NaN.

        Args:
            tokens_BT: Integers below `vocab_size`; T is at most `max_length`.
            dropout_key: Turns dropout on; layer i uses `fold_in(dropout_key, i)`.
            kept_BSP: The positions of the tokens on which each of `random_ltd_layers`
                runs, ascending; see `random_ltd`. None: all tokens.
        """
        named = {"dropout_key": dropout_key, "kept_BSP": kept_BSP}
        return self.with_usage(tokens_BT, **named)[0]

    def with_usage(
        self,
        tokens_BT: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        kept_BSP: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, Usage]]:
        """The logits, and how experts are used in each block that has any.

        The second is `zinf.moe.Mixed.usage` by the name of the block, "blocks/0".
        """
        config, length = self.config, tokens_BT.shape[1]
        if length > config.max_length:
            raise ValueError(
                f"The sequence has {length} tokens but max_length is "
                f"{config.max_length}. Raise max_length, or cut the sequence."
            )
        x_BTD = jnp.take(self.token_embedding[...], tokens_BT, axis=0)
        if self.position_embedding is not None:
            x_BTD += self.position_embedding[None, :length]
        x_BTD = drop(self.dropout, x_BTD, _layer_key(dropout_key, config.num_layers))
        # Computed once, outside the layers: the tables depend on no parameter.
        is_rope = config.position == "rope"
        rope = rope_tables(length, config.head_dim) if is_rope else None
        x_BTD, usages = self._run_blocks(x_BTD, rope, dropout_key, kept_BSP)
        x_BTD = self.norm(x_BTD)
        output = self.output_embedding
        output_VD = (self.token_embedding if output is None else output)[...]
        # One row per token: if a matmul sums over several dims of an operand, XLA:CPU
        # transposes it, and in the backward pass the operand is the logits' gradient.
        x_RD = x_BTD.reshape(-1, config.embed_dim)
        logits_RV = jnp.einsum(
            "RD,VD->RV", x_RD, output_VD, preferred_element_type=jnp.float32
        )
        return logits_RV.reshape(*tokens_BT.shape, -1), usages

    def _run_blocks(
        self,
        x_BTD: jax.Array,
        rope: Rope | None,
        dropout_key: jax.Array | None,
        kept_BSP: jax.Array | None,
    ) -> tuple[jax.Array, dict[str, Usage]]:
        if isinstance(self.blocks, nnx.List):
            run_one = self._remat(_run_block)
            usages = {}
            for layer, block in enumerate(self.blocks):
                key = _layer_key(dropout_key, layer)
                one = functools.partial(run_one, block)
                kept_BP = self._kept(layer, kept_BSP)
                # Rope tables are (1, T, 1, R): kept tokens keep their positions.
                on_kept = random_ltd(one, kept_BP, dims={1: 1})
                x_BTD, usage = on_kept(x_BTD, rope, key)
                if usage is not None:
                    usages[f"blocks/{layer}"] = usage
            return x_BTD, usages
        assert kept_BSP is None, "GPTConfig refuses it"

        def run(x_BTD: jax.Array, block: Block, layer: jax.Array | None) -> jax.Array:
            return block(x_BTD, rope, _layer_key(dropout_key, layer))[0]

        run = self._remat(run)
        layers_L = None if dropout_key is None else jnp.arange(self.config.num_layers)
        scan = nnx.scan(run, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        return scan(x_BTD, self.blocks, layers_L), {}

    def _remat(self, run: Callable) -> Callable:
        if not self.config.remat:
            return run
        is_aware = self.config.communication_aware_remat
        return nnx.remat(run, policy=keeps_exchanged() if is_aware else None)

    # What `zinf.nnx.Decodes` asks for.
    like_cache = "token_embedding"

    @property
    def max_length(self) -> int:
        return self.config.max_length

    def init_cache(self, starts_B: jax.Array, length: int, *, dtype: Any) -> Cache:
        return init_cache(self.config, starts_B, length, dtype)

    def decode(self, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return decode(self, tokens_BT, cache)

    def decode_all(self, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return decode_all(self, tokens_BT, cache)

    take_back = staticmethod(take_back)

    def token_scores(self, batch: Batch, *, temperature: float = 1.0) -> jax.Array:
        """The log-probability of each token given those before it, float32 (B, T).

        Args:
            batch: as for `next_token_loss`.
            temperature: logits are divided by it.
        """
        tokens = batch["tokens"]
        logits = self(tokens[:, :-1])
        if temperature != 1:
            logits = logits / temperature
        return -cross_entropy(logits, tokens[:, 1:])

    def _kept(self, layer: int, kept_BSP: jax.Array | None) -> jax.Array | None:
        if kept_BSP is None or layer not in self.config.random_ltd_layers:
            return None
        number = self.config.random_ltd_layers.index(layer)
        # The number is an operand here, so that all layers can share one executable.
        return jax.lax.dynamic_index_in_dim(kept_BSP, number, 1, keepdims=False)


def _run_block(
    block: Block, x_BTD: jax.Array, rope: Rope | None, key: jax.Array | None
) -> tuple[jax.Array, Usage | None]:
    return block(x_BTD, rope, key)


def _blocks(config: GPTConfig, key: jax.Array) -> nnx.List | Block:
    """The blocks, each from its own key: a list, or one block of stacked parameters."""

    # Under jit, one trace serves all equal layers: tracing 96 layers separately took
    # 20 s.
    @functools.cache
    def creates(num_experts: int) -> Callable[[jax.Array], Block]:
        @nnx.jit
        def create(key: jax.Array) -> Block:
            return Block(config, num_experts, rngs=nnx.Rngs(key))

        return create

    if not config.scan_layers:
        keys = (jax.random.fold_in(key, layer) for layer in range(config.num_layers))
        counts = config.experts_of_blocks
        return nnx.List([creates(n)(k) for k, n in zip(keys, counts, strict=True)])
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return nnx.vmap(creates(0))(fold_in(key, jnp.arange(config.num_layers)))
