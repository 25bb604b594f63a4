"""`token_losses` by XLA, a piece of the logits at a time.

Forward, sums over the vocabulary are kept as in FlashAttention (arXiv:2205.14135): the
largest logit so far, and the sum of exponentials relative to it. Backward recomputes
each piece of the logits: 8 operations for each weight and token, not 6.

The vocabulary is the outer loop. A piece of the weight's gradient is then complete
after one inner loop and is rounded to the weight's dtype at once. The activations'
gradient is summed in float32, which takes N D numbers more. With the loops exchanged,
the weight's gradient would be summed: V D numbers, which is more for most models, and
each read and written for every piece of the tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.pieces import (
    accumulator,
    for_pieces,
    matmul,
    part,
    put,
    varying_as,
)


def token_losses(
    x: Float[Array, "tokens dim"],
    weight: Float[Array, "..."],
    labels: Int[Array, " tokens"],
    chunks: Chunks,
    *,
    num_cores: int,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Loss and logsumexp of each token."""
    del num_cores  # XLA cuts the work itself.
    return _token_losses(x, weight, labels, chunks)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_losses(x: Array, weight: Array, labels: Array, chunks: Chunks) -> Any:
    num_tokens, vocab = len(x), weight.shape[chunks.vocab_axis]

    def fill(value: float) -> Array:
        return varying_as(jnp.full(num_tokens, value, accumulator(x.dtype)), x)

    def over_vocab(first: Any, width: int, carry: Any) -> Any:
        w = chunks.of_weight(weight, first, width)

        def over_tokens(start: Any, size: int, carry: Any) -> Any:
            logits = chunks.logits(part(x, start, size), w)
            old = [part(a, start, size) for a in carry]
            new = _extended(old, logits, part(labels, start, size) - first)
            return [put(a, b, start) for a, b in zip(carry, new, strict=True)]

        return for_pieces(num_tokens, chunks.tokens, over_tokens, carry)

    sums = [fill(-jnp.inf), fill(0), fill(0)]
    largest, total, picked = for_pieces(vocab, chunks.vocab, over_vocab, sums)
    lse = largest + jnp.log(total)
    return lse - picked, lse


def _extended(sums: list[Array], logits: Array, index: Array) -> list[Array]:
    """Largest logit, sum of exponentials and label's logit, after one more piece.

    `index` is the label's position in this piece; it may lie outside.
    """
    old, total, picked = sums
    largest = jnp.maximum(old, jnp.max(logits, axis=1))
    exponentials = jnp.sum(jnp.exp(logits - largest[:, None]), axis=1)
    total = total * jnp.exp(old - largest) + exponentials
    inside = (index >= 0) & (index < logits.shape[1])
    column = jnp.clip(index, 0, logits.shape[1] - 1)[:, None]
    found = jnp.take_along_axis(logits, column, axis=1)[:, 0]
    return [largest, total, jnp.where(inside, found, picked)]


def _forward(x: Array, weight: Array, labels: Array, chunks: Chunks) -> Any:
    losses, lse = _token_losses(x, weight, labels, chunks)
    return (losses, lse), (x, weight, labels, lse)


def _backward(chunks: Chunks, kept: Any, cotangents: Any) -> Any:
    return gradients(partial(_by_logits, chunks), chunks, kept, cotangents)


_token_losses.defvjp(_forward, _backward)


def _by_logits(
    chunks: Chunks,
    x: Array,
    weight: Array,
    index: Array,
    lse: Array,
    by_losses: Array,
    by_both: Array,
) -> Array:
    p = jnp.exp(chunks.logits(x, weight) - lse[:, None])
    is_label = lax.broadcasted_iota(index.dtype, p.shape, 1) == index[:, None]
    down = jnp.where(is_label, by_losses[:, None], 0)
    # Matrix units multiply only the short dtype of the model at full speed.
    return (p * by_both[:, None] - down).astype(x.dtype)


def gradients(
    by_logits: Callable[..., Array], chunks: Chunks, kept: Any, cotangents: Any
) -> Any:
    """Cotangents of activations, weight and labels.

    Args:
        by_logits: computes the gradient by some logits, in the dtype of the
            activations, from activations, a part of the weight, the labels' indices in
            it, logsumexps, the cotangents of losses, and those plus the cotangents of
            logsumexps.
        kept: activations, weight, labels and logsumexps.
        cotangents: of losses and logsumexps.
    """
    x, weight, labels, lse = kept
    by_losses, by_lse = cotangents
    of_tokens = lse, by_losses, by_losses + by_lse
    vocab_axis, wide = chunks.vocab_axis, accumulator(x.dtype)

    def over_vocab(first: Any, width: int, carry: Any) -> Any:
        grad_x, grad_weight = carry
        w = chunks.of_weight(weight, first, width)

        def over_tokens(start: Any, size: int, carry: Any) -> Any:
            grad_x, grad_w = carry
            x_part, index = (part(a, start, size) for a in (x, labels - first))
            rest = (part(a, start, size) for a in of_tokens)
            slope = by_logits(x_part, w, index, *rest)
            by_x = matmul(slope, w, (1, vocab_axis))
            grad_x = put(grad_x, part(grad_x, start, size) + by_x, start)
            sides = (x_part, slope) if vocab_axis else (slope, x_part)
            return grad_x, grad_w + matmul(*sides, (0, 0))

        grad_w = varying_as(jnp.zeros(w.shape, wide), x)
        grad_x, grad_w = for_pieces(
            len(x), chunks.tokens, over_tokens, (grad_x, grad_w)
        )
        rounded = grad_w.astype(weight.dtype)
        return grad_x, put(grad_weight, rounded, first, vocab_axis)

    grads = jnp.zeros(x.shape, wide), jnp.zeros(weight.shape, weight.dtype)
    carry = tuple(varying_as(grad, x) for grad in grads)
    vocab = weight.shape[vocab_axis]
    grad_x, grad_weight = for_pieces(vocab, chunks.vocab, over_vocab, carry)
    return grad_x.astype(x.dtype), grad_weight, None
