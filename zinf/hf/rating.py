"""How well a reward model tells chosen answers from rejected ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from zinf.hf.adapter import read_adapter
from zinf.hf.folder import find_folder
from zinf.hf.heads import HeadModel
from zinf.hf.module import read_config
from zinf.hf.pairs import SIDES
from zinf.hf.prefill import Prefill
from zinf.hf.samples import Sample
from zinf.hf.scoring import as_row


def is_reward_model(name: str | Path) -> bool:
    """Whether a folder or name is of a classifier of texts with one label.

    Raises:
        FileNotFoundError, OSError: there is no such model.
    """
    folder = find_folder(name)
    if read_adapter(folder) is not None:
        return False
    config = read_config(folder)
    heads = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
    return bool(heads.intersection(config.architectures or ())) and (
        config.num_labels == 1
    )


def pair_scores(
    model: HeadModel, prefill: Prefill, samples: Sequence[Sample]
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of pairs, float64 (pairs, 2), chosen first, and their margins.

    Args:
        samples: of `RatedTokenizing`, chosen and rejected in turn.
    """
    rows = [as_row(model, {"input_ids": ids}) for ids, _ in samples]
    found = np.array([logits[0] for logits in prefill.run(rows)], np.float64)
    bits = np.array([labels[-1] for _, labels in samples[:: len(SIDES)]], np.int32)
    return found.reshape(-1, len(SIDES)), bits.view(np.float32).astype(np.float64)
