"""`cross_entropy` and `token_losses`: signatures, checks, choice of implementation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zinf_kernels.cross_entropy import reference, xla
from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.device import Device
from zinf_kernels.dispatch import Implementation, choose
from zinf_kernels.pieces import varying_as

EXISTING = {"xla": xla.token_losses, "reference": reference.token_losses}


class Loss(NamedTuple):
    """A sum of losses and the weight of the tokens in it, float32 scalars.

    Over microbatches or devices add both up, and take the mean last: it is then exact
    however unevenly the tokens that count are spread.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """Loss for a unit of weight; zero, and flat, if no token counts."""
        is_empty = self.weight == 0
        return jnp.where(is_empty, 0, self.total / jnp.where(is_empty, 1, self.weight))


def cross_entropy(
    x: Float[Array, "*batch dim"],
    weight: Float[Array, "..."],
    labels: Int[Array, "*batch"],
    *,
    token_weights: Float[Array, "*batch"] | None = None,
    z_loss: float = 0.0,
    vocab_axis: int = 1,
    chunk_tokens: int = 2048,
    chunk_vocab: int = 8192,
    implementation: Implementation = None,
) -> Loss:
    """Cross-entropy of the labels under softmax(x @ weight), summed over tokens.

        total = sum of token_weights * (loss + z_loss * lse**2)
        weight = sum of token_weights

    over tokens whose label is not negative, with loss and lse of `token_losses`; see
    there for arguments that are not described here, for memory and for rounding.

    Args:
        token_weights: a mask, or weights of any sign and size; by default all are 1.
            What a token without a label has here, NaN too, does not matter; its
            vector has to be finite all the same.
        z_loss: weight of the square of the logsumexp (PaLM, arXiv:2204.02311, section
            5, has 1e-4), which keeps logits from drifting.

    Returns:
        Sum and weight; `.mean` is what one usually minimises.

    Raises:
        ValueError: as `token_losses`, or `token_weights` has another shape than labels.
    """
    losses, lse = token_losses(
        x,
        weight,
        labels,
        vocab_axis=vocab_axis,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        implementation=implementation,
    )
    return weighted(losses, lse, labels, token_weights=token_weights, z_loss=z_loss)


def weighted(
    losses: Float[Array, "*batch"],
    lse: Float[Array, "*batch"],
    labels: Int[Array, "*batch"],
    *,
    token_weights: Float[Array, "*batch"] | None = None,
    z_loss: float = 0.0,
) -> Loss:
    """What `cross_entropy` makes of the losses and logsumexps of tokens."""
    if token_weights is None:
        token_weights = jnp.ones(labels.shape, losses.dtype)
    elif token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights has shape {token_weights.shape} and labels {labels.shape}. "
            "Give one weight for each label."
        )
    counts = labels >= 0
    weights = jnp.where(counts, token_weights.astype(losses.dtype), 0)
    # Where no weight is, nothing may come of a loss that is not finite.
    matters = weights != 0
    lse, losses = jnp.where(matters, lse, 0), jnp.where(matters, losses, 0)
    total = jnp.sum(weights * (losses + z_loss * jnp.square(lse)))
    return Loss(total, jnp.sum(weights))


def token_losses(
    x: Float[Array, "*batch dim"],
    weight: Float[Array, "..."],
    labels: Int[Array, "*batch"],
    *,
    vocab_axis: int = 1,
    chunk_tokens: int = 2048,
    chunk_vocab: int = 8192,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """-log softmax(x @ weight)[label] and logsumexp(x @ weight) of each token.

    Both differentiable (in reverse) by `x` and `weight`. "xla" never holds more than
    `chunk_tokens` x `chunk_vocab` logits. Beside arguments and results its backward
    pass takes 4 N D bytes, 4 D chunk_vocab, and a few times 4 chunk_tokens chunk_vocab.

    Rounding: products of bfloat16 or float16 are summed in float32, exponentials and
    sums are float32, in pieces that are added in order; gradients by logits are rounded
    to the dtype of `x` before they are multiplied, and results to that of their
    argument once. The sizes of the pieces change the order of sums, nothing else.

    In `jax.shard_map` the weight may be the same on all devices: its gradient is then
    summed over them. Under `jax.jit` alone, tokens that lie on several devices would be
    gathered, because XLA does not cut a loop over a cut axis.

    Args:
        x: the last activations; float32, bfloat16, float16 or float64.
        weight: of the last layer, [dim, vocab], or [vocab, dim] with `vocab_axis=0` as
            embeddings are, of the dtype of `x`.
        labels: integers. Where negative, no label: the loss is the logsumexp alone.
            From the size of the vocabulary on: the loss is NaN.
        vocab_axis: which axis of the weight is the vocabulary.
        chunk_tokens: most tokens in a piece of the logits.
        chunk_vocab: largest part of the vocabulary in a piece.
        implementation: "xla", "reference", or names in order of preference.

    Returns:
        Losses and logsumexps in float32 (float64 of float64).

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is not positive.
    """
    run = choose(implementation, op="token_losses", existing=EXISTING)
    _check(x, weight, labels, vocab_axis)
    if min(chunk_tokens, chunk_vocab) < 1:
        raise ValueError(
            f"chunk_tokens is {chunk_tokens} and chunk_vocab {chunk_vocab}. Pass at "
            "least 1 for each."
        )
    # Whatever differs between devices makes the results differ; the transpose of
    # saying so is the sum over devices.
    arrays = x, weight, labels
    x, weight, labels = (varying_as(a, *arrays) for a in arrays)
    chunks = Chunks(chunk_tokens, chunk_vocab, vocab_axis)
    flat = x.reshape(-1, x.shape[-1])
    losses, lse = run(flat, weight, labels.reshape(-1), chunks)
    losses, lse = losses.reshape(labels.shape), lse.reshape(labels.shape)
    # An error cannot be raised inside of jit, and a wrong number would be worse.
    is_wrong = labels >= weight.shape[vocab_axis]
    return jnp.where(is_wrong, jnp.nan, losses), lse


def obstacles(device: Device) -> dict[str, str]:
    """Why the implementations that cannot run there cannot: all can, anywhere."""
    del device
    return {}


def _check(x: Any, weight: Any, labels: Any, vocab_axis: int) -> None:
    if vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis is {vocab_axis}. Pass 1, or 0 for embeddings.")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and weight {weight.dtype}. Convert both to one floating "
            "dtype."
        )
    if not jnp.issubdtype(labels.dtype, jnp.signedinteger):
        raise ValueError(
            f"labels are {labels.dtype}, but negative ones have a meaning. Convert "
            "them to int32."
        )
    if weight.ndim != 2 or x.shape[-1:] != (weight.shape[1 - vocab_axis],):
        raise ValueError(
            f"x has shape {x.shape} and weight {weight.shape}. With vocab_axis="
            f"{vocab_axis}, axis {1 - vocab_axis} of weight must be as long as the "
            "last of x."
        )
    if not weight.shape[vocab_axis]:
        raise ValueError("The vocabulary is empty.")
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"x has shape {x.shape} and labels {labels.shape}. Give a label for each "
            "vector of x."
        )
