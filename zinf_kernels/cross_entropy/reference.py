"""What `token_losses` means, in plain jnp: it holds all logits, and takes any dtype."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zinf_kernels.cross_entropy.chunks import Chunks


def token_losses(
    x: Float[Array, "tokens dim"],
    weight: Float[Array, "..."],
    labels: Int[Array, " tokens"],
    chunks: Chunks,
    *,
    num_cores: int,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Loss and logsumexp of each token; differentiated by jax itself."""
    del num_cores
    logits = chunks.logits(x, weight)
    lse = jax.nn.logsumexp(logits, axis=1)
    index = jnp.clip(labels, 0, logits.shape[1] - 1)[:, None]
    picked = jnp.take_along_axis(logits, index, axis=1)[:, 0]
    return lse - jnp.where(labels < 0, 0, picked), lse
