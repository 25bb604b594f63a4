"""Cross entropy from logits, with one array of that size in the backward pass."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label], in nats: (..., V) and integers (...) to (...).

    The derivative is softmax minus one at the label, computed in the memory of the
    logits. With jax's own derivative of `logsumexp`, XLA keeps the logits and their
    exponentials: 196 MiB instead of 98 for 512 x 50257 float32 logits.
    """
    labels = jnp.expand_dims(labels, -1)
    # A matmul with a one-hot array would hold a second (..., V) array.
    at_label = jnp.take_along_axis(logits, labels, axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - at_label


@cross_entropy.defjvp
def _jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    logits, labels = primals
    direction, _ = tangents
    losses = cross_entropy(logits, labels)
    labels = jnp.expand_dims(labels, -1)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    mean = jnp.sum(jnp.exp(logits - normalizer) * direction, axis=-1)
    return losses, mean - jnp.take_along_axis(direction, labels, axis=-1)[..., 0]
