"""`zinf evaluate` of a reward model, on lines with chosen and rejected answers."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

from zinf import hf
from zinf.core.config import Config
from zinf.core.text.complaint import tell
from zinf.hf.model import in_stored_precision
from zinf.hf.objectives.reward import RatedTokenizing
from zinf.hf.prefill import Prefill
from zinf.hf.rating import pair_scores
from zinf.hf.reader import Limit


def print_rating(
    name: str,
    data: Sequence[Path],
    config: Config,
    *,
    sequence_length: int,
    too_long: Literal["error", "truncate", "drop"],
) -> None:
    """Prints how often chosen answers have the higher score, and by how much.

    The loss is that of `zinf finetune --objective reward` without centring.
    """
    model = in_stored_precision(hf.load_head(name))
    most = Limit.of(model, None, "drop").max_length
    how = RatedTokenizing(
        model.tokenizer,
        sequence_length=sequence_length if most is None else min(sequence_length, most),
        too_long=too_long,
        completion_only=True,
        vocab_size=model.vocab_size,
    )
    read = [how.read(*line) for path in data for line in hf.records(path)]
    samples = [sample for reading in read for sample in reading.samples]
    num_cut = sum(reading.is_cut for reading in read)
    num_dropped = sum(not reading.samples for reading in read)
    if not samples:
        raise ValueError(hf.no_samples(data, how, num_dropped))
    if num_cut or num_dropped:
        tell(f"{hf.treated(how, num_cut, num_dropped)}.")
    start, fill = perf_counter(), {"input_ids": model.padding}
    with Prefill(model, model.logits, config, padding=fill) as prefill:
        scores, margins = pair_scores(model, prefill, samples)
    seconds = perf_counter() - start
    chosen, rejected = scores.T
    losses = np.logaddexp(0, rejected - chosen + margins)
    tell(
        f"loss {losses.mean():.6g}, accuracy {(chosen > rejected).mean():.6g}, margin "
        f"{(chosen - rejected).mean():.6g}, mean reward {scores.mean():.6g}, "
        f"{len(scores):,} pairs, {len(scores) / seconds:,.1f} pairs/s"
    )
