"""A GPT as pure functions of its parameters, and its counts."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zinf.core.problem.cross_entropy import cross_entropy
from zinf.models.gpt import GPT, Batch, Params
from zinf.models.gpt_config import GPTConfig
from zinf.models.gpt_decode import Cache, decode, init_cache
from zinf.models.gpt_loss import loss_and_aux, next_token_logits, with_balance


def held_out_sums(
    config: GPTConfig,
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """A function that sums an evaluation's losses, in which each token counts alike.

    Without dropout and without a teacher. With experts, the load-balancing loss and the
    tokens that exceed an expert's capacity still depend on what is in a batch.

    Returns:
        `sums(params, batch) -> (total, weight)`, float32 scalars for a `zinf.Weighted`.
        The weight is the number of tokens that are predicted: those of the rows that
        `text_dataset` fills a batch with are negative, and do not count.
    """

    def sums(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        # Here, so that a run without evaluations does not trace the model once more.
        model, tokens = nnx.merge(graphdef_of(config), params), batch["tokens"]
        logits_BTV, usages = model.with_usage(jnp.maximum(tokens[:, :-1], 0))
        labels = tokens[:, 1:]
        losses = cross_entropy(logits_BTV, jnp.maximum(labels, 0))
        is_token = labels >= 0
        weight = jnp.sum(is_token.astype(jnp.float32))
        total = jnp.sum(jnp.where(is_token, losses, 0))
        return with_balance(model, total, usages, weight), weight

    return sums


def graphdef_of(config: GPTConfig) -> nnx.GraphDef[GPT]:
    """The structure of a model, which does not depend on its parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))


def logits_of(config: GPTConfig) -> Callable[[Params, Batch], jax.Array]:
    """`next_token_logits` as a pure function of the parameters and a batch."""
    graphdef = graphdef_of(config)
    return lambda params, batch: next_token_logits(nnx.merge(graphdef, params), batch)


def decoding(config: GPTConfig, dtype: Any) -> tuple[Callable, Callable]:
    """`(params, tokens, cache) -> (logits, cache)`, and what makes its first cache.

    Args:
        dtype: of the cache: that of the parameters.
    """
    graphdef = graphdef_of(config)

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

    graphdef = graphdef_of(config)

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
    """Number of entries of the experts that do not get a token, over all blocks."""
    kernels = 3 if config.activation == "swiglu" else 2
    expert = kernels * config.embed_dim * config.hidden_dim
    if config.use_bias:
        expert += (kernels - 1) * config.hidden_dim + config.embed_dim
    counts = config.experts_of_blocks
    return expert * sum(max(0, n - config.experts_per_token) for n in counts)
