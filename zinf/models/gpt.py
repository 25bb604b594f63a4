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
from zinf.models.random_ltd import random_ltd
from zinf.moe import MoE, exchanged, keeps_exchanged
from zinf_kernels.attention import attention

Params = dict[str, Any]  # Nested dicts of arrays, from `nnx.to_pure_dict`.
Batch = Mapping[str, jax.Array]
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


def _norm(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
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
        self.attention_norm = _norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs=rngs)
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
        x_BTD = x_BTD + _drop(self.dropout, attended_BTD, attention_key)
        hidden_BTD = self.mlp_norm(x_BTD)
        usage = None
        if isinstance(self.mlp, MoE):
            mixed = self.mlp(hidden_BTD)
            hidden_BTD, usage = mixed.output, mixed.usage
        else:
            hidden_BTD = self.mlp(hidden_BTD)
            if self.keeps_exchanged:
                hidden_BTD = exchanged(hidden_BTD)
        return x_BTD + _drop(self.dropout, hidden_BTD, mlp_key), usage


def _drop(dropout: nnx.Dropout, x: jax.Array, key: jax.Array | None) -> jax.Array:
    return dropout(x, rngs=key, deterministic=key is None)


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
        self.norm = _norm(config, rngs=rngs)
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
        x_BTD = _drop(self.dropout, x_BTD, _layer_key(dropout_key, config.num_layers))
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


def token_scores(model: GPT, batch: Batch) -> jax.Array:
    """The log-probability of each token given those before it, float32 (B, T).

    Args:
        batch: as for `next_token_loss`.
    """
    tokens = batch["tokens"]
    return -cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


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
