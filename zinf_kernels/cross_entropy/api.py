"""`cross_entropy` and `token_losses`: signatures, checks, choice of implementation."""

from importlib import import_module
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.device import Device, device_for, hopper_obstacle
from zinf_kernels.dispatch import Implementation, choose_name
from zinf_kernels.pieces import varying_as
from zinf_kernels.tiles import TILES

# XLA first, until the kernel has been measured to be faster on a GPU: XLA's pieces of
# logits cost traffic, but no more memory.
EXISTING = ("xla", "mosaic_gpu", "reference")
CHUNKS = Chunks()
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16)


class Loss(NamedTuple):
    """A sum of losses and the weight of the tokens in it, float32 scalars.

    Add both over microbatches or devices, and take the mean last: it is then exact,
    even if the microbatches have different numbers of tokens that count.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """Loss per unit of weight; zero, with zero gradient, if no token counts."""
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
    chunk_tokens: int = CHUNKS.tokens,
    chunk_vocab: int = CHUNKS.vocab,
    implementation: Implementation = None,
) -> Loss:
    """Cross-entropy of the labels under softmax(x @ weight), summed over tokens.

        total = sum of token_weights * (loss + z_loss * lse**2)
        weight = sum of token_weights

    over tokens whose label is not negative, with loss and lse of `token_losses`; see
    there for arguments that are not described here, for memory and for rounding.

    Args:
        token_weights: a mask, or weights of any sign and size; by default all are 1.
            The weight of a token without a label is ignored, even NaN; the token's
            vector must still be finite.
        z_loss: weight of the square of the logsumexp (PaLM, arXiv:2204.02311, section
            5, has 1e-4), which keeps logits from drifting.

    Returns:
        Sum and weight; `.mean` is the usual loss.

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
    """`cross_entropy` from the losses and logsumexps of tokens."""
    if token_weights is None:
        token_weights = jnp.ones(labels.shape, losses.dtype)
    elif token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights has shape {token_weights.shape} and labels {labels.shape}. "
            "Give one weight for each label."
        )
    counts = labels >= 0
    weights = jnp.where(counts, token_weights.astype(losses.dtype), 0)
    # A loss that is not finite must not reach the sum, or a gradient, with weight 0.
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
    chunk_tokens: int = CHUNKS.tokens,
    chunk_vocab: int = CHUNKS.vocab,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """-log softmax(x @ weight)[label] and logsumexp(x @ weight) of each token.

    Both differentiable (in reverse) by `x` and `weight`. "xla" never holds more than
    `chunk_tokens` x `chunk_vocab` logits. Besides arguments and results, its backward
    pass takes 4 N D bytes, 4 D chunk_vocab, and a few times 4 chunk_tokens chunk_vocab.

    Rounding: matmuls of bfloat16 or float16 are summed in float32, exponentials and
    sums are float32, in pieces that are added in order; gradients by logits are rounded
    to the dtype of `x` before they are multiplied, and results to that of their
    argument once. The sizes of the pieces change only the order of sums.

    In `jax.shard_map` the weight may be the same on all devices: its gradient is then
    summed over them. Under `jax.jit` alone XLA would gather tokens that are sharded
    over devices: it does not split a loop over a sharded axis.

    Args:
        x: the last activations; float32, bfloat16, float16 or float64.
        weight: of the last layer, [dim, vocab], or [vocab, dim] with `vocab_axis=0` as
            embeddings are, of the dtype of `x`.
        labels: integers. A negative one is no label: the loss is the logsumexp alone.
            One that is not below the size of the vocabulary gives NaN.
        vocab_axis: which axis of the weight is the vocabulary.
        chunk_tokens: most tokens in a piece of the logits.
        chunk_vocab: largest part of the vocabulary in a piece.
        implementation: "xla"; "mosaic_gpu", whose logits never leave the registers
            forward, and go to memory as gradients in the dtype of `x` backward;
            "reference"; or names in order of preference.

    Returns:
        Losses and logsumexps in float32 (float64 of float64).

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is not positive.
    """
    _check(x, weight, labels, vocab_axis)
    if min(chunk_tokens, chunk_vocab) < 1:
        raise ValueError(
            f"chunk_tokens is {chunk_tokens} and chunk_vocab {chunk_vocab}. Pass at "
            "least 1 for each."
        )
    chunks = Chunks(chunk_tokens, chunk_vocab, vocab_axis)
    device = device_for(x, weight)
    name = choose_name(
        implementation,
        op="token_losses",
        existing=EXISTING,
        obstacles=obstacles(device, x=x, weight=weight, chunks=chunks),
    )
    # Imported late: Pallas takes 1.4 s to import, and most programs never need it.
    backend = import_module(f"zinf_kernels.cross_entropy.{name}")
    # In shard_map, results vary over devices if any argument does. The transpose of
    # marking an argument as varying is the sum of its gradient over devices.
    arrays = x, weight, labels
    x, weight, labels = (varying_as(a, *arrays) for a in arrays)
    flat = x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1)
    losses, lse = backend.token_losses(*flat, chunks, num_cores=device.num_cores)
    losses, lse = losses.reshape(labels.shape), lse.reshape(labels.shape)
    # Code under jit cannot raise, and NaN is better than a wrong number.
    is_wrong = labels >= weight.shape[vocab_axis]
    return jnp.where(is_wrong, jnp.nan, losses), lse


def obstacles(
    device: Device, *, x: Any, weight: Any, chunks: Chunks = CHUNKS
) -> dict[str, str]:
    """For each implementation that cannot run there on such arrays, the reason.

    `implementation=None` takes the first of `EXISTING` that is not among them.
    """
    found = hopper_obstacle(device)
    if found is None and x.dtype not in KERNEL_DTYPES:
        found = f"its matrices are bfloat16 or float16, not {x.dtype}."
    dim, vocab = x.shape[-1], weight.shape[chunks.vocab_axis]
    sizes = {
        "the tokens": (x.size // max(dim, 1), vocab),
        "chunk_tokens and chunk_vocab": (chunks.tokens, chunks.vocab),
    }
    for name, (tokens, words) in sizes.items():
        reason = TILES.obstacle(tokens, words, dim)
        if found is None and reason is not None:
            found = f"of {name}, words and channels as m, n and k, {reason}"
    return {} if found is None else {"mosaic_gpu": found}


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
