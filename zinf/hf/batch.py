"""The leaves of a batch of a causal model: checks, labels, several samples in a row."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.problem.cross_entropy import cross_entropy

Batch = Mapping[str, jax.Array]

IGNORED = -100  # The label of a token that is not trained on, as in `transformers`.
# The logit of a token that is not written: finite, as others would be errors.
NEVER = -1e9
LABELS = f", and {IGNORED} for tokens that are not trained on"


def check_leaves(
    batch: Batch, name: str, needed: Sequence[str], optional: Sequence[str]
) -> None:
    """Refuse a batch without all leaves of `needed`, or with one of neither list.

    Args:
        name: of the model, for the message.

    Raises:
        ValueError: see above.
    """
    if set(needed) <= set(batch) <= {*needed, *optional}:
        return
    raise ValueError(
        f"A batch of {name} has {', '.join(needed)} and may have "
        f"{', '.join(optional)}; this one has {', '.join(batch)}."
    )


def by_sequence(batch: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Leaves whose rows are single sequences, also of a batch with pairs of them.

    Args:
        batch: `input_ids` (..., tokens), and leaves with as many dims of rows.
    """
    num_dims = batch["input_ids"].ndim - 1
    return {n: batch[n].reshape(-1, *batch[n].shape[num_dims:]) for n in names}


def check_tokens(
    batch: Any,
    *,
    name: str,
    vocab_size: int,
    max_length: int | None,
    keys: tuple[str, ...] = ("input_ids", "labels"),
) -> None:
    """Refuse tokens that a model cannot know.

    Args:
        name, vocab_size, max_length: of the model.
        keys: what has tokens in the batch; in `labels`, -100 is one that is ignored.

    Raises:
        ValueError: a token is beyond the vocabulary, or a sample is longer than the
            model was made for. The message names the sample.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return  # Said when the loss is traced.
    for key in keys:
        if key not in batch:
            continue
        values = np.asarray(batch[key])
        rows = values.reshape(-1, values.shape[-1])
        is_known = (rows >= 0) & (rows < vocab_size)
        if key == "labels":
            is_known |= rows == IGNORED
        if not is_known.all():
            row, place = map(int, np.argwhere(~is_known)[0])
            raise ValueError(
                f"{key} of sample {row} of the batch has {rows[row, place]} at token "
                f"{place}, and {name} has {vocab_size:,} words. Use the "
                f"tokenizer of this model{LABELS if key == 'labels' else ''}."
            )
    length = np.shape(batch["input_ids"])[-1]
    if max_length is not None and length > max_length:
        raise ValueError(
            f"The samples of the batch have {length:,} tokens, and {name} was "
            f"made for {max_length:,} (max_position_embeddings). Cut them."
        )


def check_some_label(labels: Any) -> None:
    """Refuse a batch of a causal model that trains on no token.

    Args:
        labels: (..., tokens); None if all tokens are trained on.

    Raises:
        ValueError: no token but first ones has a label.
    """
    if labels is not None and np.all(np.asarray(labels)[..., 1:] == IGNORED):
        raise ValueError(
            f"No token of the batch is trained on: all labels are {IGNORED}, or only "
            "first tokens have others, which nothing predicts. Leave such samples out."
        )


def packed(batch: Batch) -> dict[str, jax.Array]:
    """A batch with positions that begin anew at each segment, and a mask of ones.

    Without a mask `transformers` would look for segments in the values of positions.
    """
    segments = batch["segment_ids"]
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    before = jnp.concatenate([segments[:, :1] - 1, segments[:, :-1]], axis=1)
    starts = jnp.where(segments != before, index, 0)
    positions = index - jax.lax.cummax(starts, axis=1)
    ones = jnp.ones_like(batch["input_ids"])
    return {"position_ids": positions, "attention_mask": ones} | dict(batch)


def next_labels(batch: Batch) -> jax.Array:
    """The label that each token predicts, (batch, tokens); -100 where there is none.

    A token predicts none of another segment.
    """
    labels = _labels(batch)
    ends = jnp.full_like(labels[:, :1], IGNORED)
    found = jnp.concatenate([labels[:, 1:], ends], axis=1)
    if "segment_ids" not in batch:
        return found
    segments = batch["segment_ids"]
    last = jnp.zeros_like(segments[:, :1])
    following = jnp.concatenate([segments[:, 1:], last], axis=1)
    return jnp.where(following == segments, found, IGNORED)


def _labels(batch: Batch) -> jax.Array:
    """The labels of a batch, or its tokens without the padding."""
    labels = batch.get("labels")
    if labels is not None:
        return labels
    tokens = batch["input_ids"]
    if "attention_mask" not in batch:
        return tokens
    return jnp.where(batch["attention_mask"] != 0, tokens, IGNORED)


def without(tokens: Sequence[int], logits: jax.Array) -> jax.Array:
    """Logits (..., words) of a model that does not write some tokens."""
    return logits.at[..., jnp.array(tokens)].set(NEVER) if tokens else logits


def entropies(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of the token after each, and whether it has a label.

    Both (batch, tokens); where there is no label, the loss is 0.

    Args:
        logits: float32 (batch, tokens, words).
    """
    labels = next_labels(batch)
    is_trained = labels != IGNORED
    losses = cross_entropy(logits, jnp.where(is_trained, labels, 0))
    return jnp.where(is_trained, losses, 0.0), is_trained
