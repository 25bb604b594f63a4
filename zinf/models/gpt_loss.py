"""The loss of next tokens, and what else a batch says of a GPT."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.problem.cross_entropy import cross_entropy
from zinf.models.divergence import divergence
from zinf.models.gpt import GPT, Batch
from zinf.models.gpt_layers import (
    Usage,
)


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
    loss = with_balance(model, loss, usages)
    aux: dict[str, Any] = {"experts": usages}
    if "teacher_logits" in batch:
        teacher_BTV = batch["teacher_logits"]
        losses_BT = divergence(logits_BTV, teacher_BTV, temperature=temperature)
        aux["divergence"] = jnp.mean(losses_BT)
        loss += coefficient * aux["divergence"]
    return loss, aux


def with_balance(
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


def next_token_logits(model: GPT, batch: Batch) -> jax.Array:
    """The logits (B, T, V) of each token given those before it.

    Args:
        batch: as for `next_token_loss`.
    """
    return model(batch["tokens"][:, :-1])
