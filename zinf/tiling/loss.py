"""The last layer of a language model and its loss, without whole logits or weights."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from zinf.tiling.splits import shared
from zinf_kernels.cross_entropy import Loss, token_losses, weighted

IGNORED = -1


def cross_entropy(
    tiles: Sequence[Float[Array, "..."]],
    x: Float[Array, "*batch dim"],
    labels: Int[Array, "*batch"],
    *,
    token_weights: Float[Array, "*batch"] | None = None,
    z_loss: float = 0.0,
    vocab_axis: int = 1,
    **options: Any,
) -> Loss:
    """`zinf_kernels.cross_entropy.cross_entropy` with a weight in tiles of words.

    Each tile gives the logsumexp of its logits and, if it has the label, the label's
    logit. Nothing else of a tile is kept. The logits of one tile are never whole
    either.

    Rounding: logsumexps of tiles are added in float32 (float64 of float64), which adds
    a few units of rounding of the logsumexp. The gradient by `x` is rounded to its
    dtype for each tile, summed in float32, and rounded once more.

    Args:
        tiles: of the weight, each [dim, words] or, with `vocab_axis=0`, [words, dim];
            `split(weight, n, axis=vocab_axis)` makes them. One tile is a whole weight.
        x: the last activations.
        labels: integers. Negative ones are ignored; one that is not below the number of
            words of all tiles gives NaN.
        token_weights: a mask or weights, by default all 1.
        z_loss: weight of the square of the logsumexp.
        options: `chunk_tokens`, `chunk_vocab` and `implementation`, of each tile.

    Returns:
        Sum and weight, to be added over microbatches or devices; `.mean` is the loss.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    options = {"vocab_axis": vocab_axis, **options}
    wide, first, parts = shared(x, len(tiles)), 0, []
    for tile in tiles:
        words = tile.shape[vocab_axis]
        inside = (labels >= first) & (labels < first + words)
        mine = jnp.where(inside, labels - first, IGNORED)
        parts.append(token_losses(wide.astype(x.dtype), tile, mine, **options))
        first += words
    losses, lse = parts[0]
    if len(parts) > 1:
        # The loss of a tile without the label is its logsumexp.
        picked = lse - losses
        for loss, other in parts[1:]:
            lse, picked = jnp.logaddexp(lse, other), picked + (other - loss)
        losses = lse - picked
    losses = jnp.where(labels >= first, jnp.nan, losses)
    return weighted(losses, lse, labels, token_weights=token_weights, z_loss=z_loss)


def cross_entropy_over(
    mesh: Mesh,
    axes: str | tuple[str, ...],
    tiles: Sequence[Float[Array, "..."]],
    x: Float[Array, "*batch dim"],
    labels: Int[Array, "*batch"],
    *,
    token_weights: Float[Array, "*batch"] | None = None,
    **options: Any,
) -> Loss:
    """`cross_entropy`, where each device of a mesh takes its part of the batch.

    Under `jax.jit` alone XLA would gather tokens that lie on several devices. Sum and
    weight are added over all devices, so the mean is exact, even if different numbers
    of tokens count on each. A batch that does not divide is padded with ignored tokens.

    Args:
        mesh: of the devices.
        axes: axes of the mesh along which the batch is cut. Each device has the whole
            weight; XLA gathers it if it is sharded.
    """
    names = (axes,) if isinstance(axes, str) else axes
    num_devices = 1
    for name in names:
        num_devices *= mesh.shape[name]
    if token_weights is None:
        token_weights = jnp.ones(labels.shape, jnp.float32)
    arrays = _filled((x, labels, token_weights), -len(x) % num_devices)

    def local(tiles: Any, x: Array, labels: Array, token_weights: Array) -> Loss:
        run = partial(cross_entropy, token_weights=token_weights, **options)
        return Loss(*jax.lax.psum(run(tiles, x, labels), names))

    rows, whole = PartitionSpec(names), PartitionSpec()
    specs = whole, rows, rows, rows
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole)
    return mapped(tuple(tiles), *arrays)


def _filled(arrays: Any, num_rows: int) -> Any:
    """The batch, padded with so many ignored rows."""
    if not num_rows:
        return arrays
    x, labels, weights = (
        jnp.pad(a, [(0, num_rows)] + [(0, 0)] * (a.ndim - 1)) for a in arrays
    )
    is_real = jnp.arange(len(labels)) < len(labels) - num_rows
    is_real = is_real.reshape(-1, *[1] * (labels.ndim - 1))
    return x, jnp.where(is_real, labels, IGNORED), weights
