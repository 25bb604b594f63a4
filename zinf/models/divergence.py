"""The distance of a student's predictions from those of its teacher."""

import jax
import jax.numpy as jnp


def divergence(
    logits: jax.Array, teacher_logits: jax.Array, *, temperature: float = 1.0
) -> jax.Array:
    """KL(teacher || student) of each token, in nats, times the temperature squared.

    The logits are divided by the temperature before; the square keeps the gradient's
    size (https://arxiv.org/abs/1503.02531, section 2). DeepSpeed's Mixture-of-Students
    adds the mean of this to the loss.

    Args:
        logits, teacher_logits: (..., V); no gradient flows to the teacher's.

    Returns:
        float32 (...).

    Raises:
        ValueError: the shapes differ.
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"The student's logits are {list(logits.shape)} and the teacher's "
            f"{list(teacher_logits.shape)}. Both must read the same tokens, and have "
            "the same vocabulary."
        )
    teacher_logits = jax.lax.stop_gradient(teacher_logits)
    ours = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    theirs = jax.nn.log_softmax(teacher_logits.astype(jnp.float32) / temperature)
    return temperature**2 * jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
