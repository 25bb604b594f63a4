"""How well a reward model tells chosen answers from rejected ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from zinf.core.engine.initialize import ConfigSource
from zinf.hf.adapter import read_adapter
from zinf.hf.dataset import no_samples, treated
from zinf.hf.folder import find_folder
from zinf.hf.heads import load_head
from zinf.hf.model import in_stored_precision
from zinf.hf.module import read_config
from zinf.hf.objectives.reward import RatedTokenizing
from zinf.hf.pairs import SIDES
from zinf.hf.prefill import Prefill
from zinf.hf.reader import Limit
from zinf.hf.records import records
from zinf.hf.samples import TooLong
from zinf.hf.scoring import as_row


@dataclass(frozen=True)
class Rating:
    """What a reward model says of N pairs.

    Attributes:
        scores: float64 (N, 2), chosen first.
        margins: by which scores should differ, float64 (N,).
    """

    scores: np.ndarray
    margins: np.ndarray

    @property
    def loss(self) -> float:
        """That of `zinf finetune --objective reward` without centring."""
        chosen, rejected = self.scores.T
        return float(np.logaddexp(0, rejected - chosen + self.margins).mean())

    @property
    def accuracy(self) -> float:
        """The share of pairs whose chosen answer has the higher score."""
        return float((self.scores[:, 0] > self.scores[:, 1]).mean())

    @property
    def margin(self) -> float:
        """The mean difference of chosen and rejected."""
        return float((self.scores[:, 0] - self.scores[:, 1]).mean())


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
    is_classifier = bool(heads.intersection(config.architectures or ()))
    return is_classifier and config.num_labels == 1


def rate(
    name: str | Path,
    data: Sequence[Path],
    config: ConfigSource = None,
    *,
    sequence_length: int,
    too_long: TooLong,
    say: Callable[[str], None],
) -> Rating:
    """Scores the pairs in files by a reward model.

    Args:
        data: lines as `zinf finetune --objective reward` takes them.
        say: told of lines that are cut or left out.

    Raises:
        ValueError: a line is wrong, or there is none; see `load_head` for more.
        InfeasibleError: the model does not fit the budgets.
    """
    model = in_stored_precision(load_head(name))
    most = Limit.of(model, None, "drop").max_length
    how = RatedTokenizing(
        model.tokenizer,
        sequence_length=sequence_length if most is None else min(sequence_length, most),
        too_long=too_long,
        completion_only=True,
        vocab_size=model.vocab_size,
    )
    read = [how.read(*line) for path in data for line in records(path)]
    samples = [sample for reading in read for sample in reading.samples]
    num_cut = sum(reading.is_cut for reading in read)
    num_dropped = sum(not reading.samples for reading in read)
    if not samples:
        raise ValueError(no_samples(data, how, num_dropped))
    if num_cut or num_dropped:
        say(f"{treated(how, num_cut, num_dropped)}.")
    fill = {"input_ids": model.padding}
    with Prefill(model, model.logits, config, padding=fill) as prefill:
        rows = [as_row(model, {"input_ids": ids}) for ids, _ in samples]
        found = np.array([logits[0] for logits in prefill.run(rows)], np.float64)
    bits = np.array([labels[-1] for _, labels in samples[:: len(SIDES)]], np.int32)
    margins = bits.view(np.float32).astype(np.float64)
    return Rating(found.reshape(-1, len(SIDES)), margins)
