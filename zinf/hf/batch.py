"""Checks the tokens of a batch, as a model computes with wrong ones all the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np

IGNORED = -100  # The label of a token that is not trained on, as in `transformers`.
LABELS = f", and {IGNORED} for tokens that are not trained on"


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
