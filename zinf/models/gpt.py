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

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zinf.core.problem.cross_entropy import cross_entropy
from zinf.models.divergence import divergence
from zinf.models.gpt_config import GPTConfig
from zinf.models.gpt_decode import Cache, decode, init_cache
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


def next_token_loss(
    model: GPT, batch: Batch, *, dropout_key: jax.Array | None = None
) -> jax.Array:
    """The first result of `loss_and_aux`."""
    return loss_and_aux(model, batch, dropout_key=dropout_key)[0]


def loss_and_aux(
    model: GPT,
    batch: Batch,
    *,
    dropout_key: jax.Array | None = None,
    coefficient: float = 1.0,
    temperature: float = 1.0,
) -> tuple[jax.Array, dict[str, Any]]:
    """Mean cross entropy in nats of each token given those before it, in float32.

    With experts, `aux_loss_coefficient` times the mean load-balancing loss of the
    blocks is added. With a teacher's logits in the batch, `coefficient` times the mean
    `divergence` from them is added.

    Args:
        batch: {"tokens": integers (B, T + 1)}; the first token is not predicted, and
            the last is not an input. With "kept", integers (B, S, P), those of
            `random_ltd_layers` run on these positions alone. With "teacher_logits",
            (B, T, V), the model is their student.
        dropout_key: Turns dropout on.
        coefficient, temperature: of the divergence.

    Returns:
        the loss, and what metrics show of it: {"experts": usage of each block}, see
        `GPT.with_usage`, and with a teacher {"divergence": its mean}.
    """
    tokens = batch["tokens"]
    logits_BTV, usages = model.with_usage(
        tokens[:, :-1], dropout_key=dropout_key, kept_BSP=batch.get("kept")
    )
    loss = jnp.mean(cross_entropy(logits_BTV, tokens[:, 1:]))
    loss = _with_balance(model, loss, usages)
    aux: dict[str, Any] = {"experts": usages}
    if "teacher_logits" in batch:
        teacher_BTV = batch["teacher_logits"]
        losses_BT = divergence(logits_BTV, teacher_BTV, temperature=temperature)
        aux["divergence"] = jnp.mean(losses_BT)
        loss += coefficient * aux["divergence"]
    return loss, aux


def _with_balance(
    model: GPT,
    loss: jax.Array,
    usages: Mapping[str, Usage],
    weight: jax.Array | float = 1.0,
) -> jax.Array:
    """`loss` with the mean load-balancing loss of the blocks that have experts."""
    aux_losses = [usage["balance_loss"] for usage in usages.values()]
    if not aux_losses:
        return loss
    aux_loss = sum(aux_losses[1:], aux_losses[0]) / len(aux_losses)
    return loss + weight * model.config.aux_loss_coefficient * aux_loss


def held_out_sums(
    config: GPTConfig,
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """The sum of losses of an evaluation, in which each token counts alike.

    Without dropout and without a teacher. With experts, the load-balancing loss and the
    tokens that exceed an expert's capacity still depend on what is in a batch.

    Returns:
        `sums(params, batch) -> (total, weight)`, float32 scalars for a `zinf.Weighted`.
        The weight is the number of tokens that are predicted: those of the rows that
        `text_dataset` fills a batch with are negative, and do not count.
    """

    def sums(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        # Here, so that a run without evaluations does not trace the model once more.
        model, tokens = nnx.merge(_graphdef(config), params), batch["tokens"]
        logits_BTV, usages = model.with_usage(jnp.maximum(tokens[:, :-1], 0))
        labels = tokens[:, 1:]
        losses = cross_entropy(logits_BTV, jnp.maximum(labels, 0))
        is_token = labels >= 0
        weight = jnp.sum(is_token.astype(jnp.float32))
        total = jnp.sum(jnp.where(is_token, losses, 0))
        return _with_balance(model, total, usages, weight), weight

    return sums


def next_token_logits(model: GPT, batch: Batch) -> jax.Array:
    """The logits (B, T, V) of each token given those before it.

    Args:
        batch: as for `next_token_loss`.
    """
    return model(batch["tokens"][:, :-1])


def _graphdef(config: GPTConfig) -> nnx.GraphDef[GPT]:
    """The structure of a model, which does not depend on its parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))


def logits_of(config: GPTConfig) -> Callable[[Params, Batch], jax.Array]:
    """`next_token_logits` as a pure function of the parameters and a batch."""
    graphdef = _graphdef(config)
    return lambda params, batch: next_token_logits(nnx.merge(graphdef, params), batch)


def decoding(config: GPTConfig, dtype: Any) -> tuple[Callable, Callable]:
    """`(params, tokens, cache) -> (logits, cache)`, and what makes its first cache.

    Args:
        dtype: of the cache: that of the parameters.
    """
    graphdef = _graphdef(config)

    def apply(
        params: Params, tokens: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        return decode(nnx.merge(graphdef, params), tokens, cache)

    return apply, functools.partial(init_cache, config, dtype=dtype)


def init_and_loss(
    config: GPTConfig,
    *,
    seed: int,
    has_aux: bool = False,
    coefficient: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Callable[[], Params], Callable[..., Any]]:
    """The model as two pure functions, for `zinf.initialize`.

    Args:
        has_aux: the loss function returns both results of `loss_and_aux`.
        coefficient, temperature: of a teacher, see `loss_and_aux`.

    Returns:
        `init() -> params`: a nested dict of float32 arrays, such as
        params["blocks"][0]["attention"]["query"]["kernel"]. Traceable: nothing is
        allocated under `jax.eval_shape` or `jax.make_jaxpr`.
        `loss(params, batch) -> loss`, see `next_token_loss`; with dropout
        `loss(params, batch, key, train=True)`, which drops nothing if `train` is false.
    """

    def create() -> GPT:
        return GPT(config, rngs=nnx.Rngs(seed))

    graphdef = _graphdef(config)

    def init() -> Params:
        return nnx.to_pure_dict(nnx.state(create()))

    def results(params: Params, batch: Batch, dropout_key: jax.Array | None) -> Any:
        model = nnx.merge(graphdef, params)
        loss, aux = loss_and_aux(
            model,
            batch,
            dropout_key=dropout_key,
            coefficient=coefficient,
            temperature=temperature,
        )
        return (loss, aux) if has_aux else loss

    def loss(params: Params, batch: Batch) -> Any:
        return results(params, batch, None)

    def loss_with_dropout(
        params: Params, batch: Batch, key: jax.Array, *, train: bool = True
    ) -> Any:
        return results(params, batch, key if train else None)

    return init, loss_with_dropout if config.dropout else loss


def num_parameters(config: GPTConfig) -> int:
    """Number of entries of all parameters; tied embeddings count once."""
    # Stacked blocks have the same entries, and only one block is traced.
    stacks = not any(config.experts_of_blocks)
    traced = dataclasses.replace(config, scan_layers=stacks, random_ltd_layers=())
    model = nnx.eval_shape(lambda: GPT(traced, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model)))


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations per token of forward and backward, without remat.

    6N + 12 LNHT at T = max_length, as in PaLM (https://arxiv.org/abs/2204.02311),
    appendix B. The 6N counts only parameters of matmuls, so the position table and an
    untied token embedding, which are looked up, are left out. Attention counts in full,
    though causal attention needs only half. Of experts only those count that a token
    passes, as if none were dropped.
    """
    looked_up = _idle_parameters(config)
    if config.position == "learned":
        looked_up += config.max_length * config.embed_dim
    if not config.tied_embeddings:
        looked_up += config.vocab_size * config.embed_dim
    attention = 12 * config.num_layers * config.embed_dim * config.max_length
    return 6 * (num_parameters(config) - looked_up) + attention


def _idle_parameters(config: GPTConfig) -> int:
    """Entries of experts that a token does not pass."""
    kernels = 3 if config.activation == "swiglu" else 2
    expert = kernels * config.embed_dim * config.hidden_dim
    if config.use_bias:
        expert += (kernels - 1) * config.hidden_dim + config.embed_dim
    counts = config.experts_of_blocks
    return expert * sum(max(0, n - config.experts_per_token) for n in counts)
