"""Checks the tokens of a batch, as a model computes with wrong ones all the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zinf.hf.model import IGNORED, Model

LABELS = f", and {IGNORED} for tokens that are not trained on"


def check_tokens(model: Model, batch: Any) -> None:
    """Refuse tokens that the model cannot know, and a batch that trains on none.

    Raises:
        ValueError: a token is beyond the vocabulary, a sample is longer than the model
            was made for, or no token has a label. The message names the sample.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return  # Said when the loss is traced.
    for name in ("input_ids", "labels"):
        if name not in batch:
            continue
        values = np.asarray(batch[name])
        rows = values.reshape(-1, values.shape[-1])
        is_known = (rows >= 0) & (rows < model.vocab_size)
        if name == "labels":
            is_known |= rows == IGNORED
        if not is_known.all():
            row, place = map(int, np.argwhere(~is_known)[0])
            raise ValueError(
                f"{name} of sample {row} of the batch has {rows[row, place]} at token "
                f"{place}, and {model.name} has {model.vocab_size:,} words. Use the "
                f"tokenizer of this model{LABELS if name == 'labels' else ''}."
            )
    length = np.shape(batch["input_ids"])[-1]
    if model.max_length is not None and length > model.max_length:
        raise ValueError(
            f"The samples of the batch have {length:,} tokens, and {model.name} was "
            f"made for {model.max_length:,} (max_position_embeddings). Cut them."
        )
    labels = batch.get("labels")
    if labels is not None and np.all(np.asarray(labels)[..., 1:] == IGNORED):
        raise ValueError(
            f"No token of the batch is trained on: all labels are {IGNORED}, or only "
            "first tokens have others, which nothing predicts. Leave such samples out."
        )
