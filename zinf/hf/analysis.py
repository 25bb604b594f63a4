"""Rows of samples as the metrics of their difficulty read them."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import grain
import numpy as np

from zinf.data.analyze import PADDING, Analysis
from zinf.data.text import tokens_hash
from zinf.hf.dataset import Samples
from zinf.hf.packing import Packed


class Analyzed(grain.sources.RandomAccessDataSource):
    """The tokens of each row, with `PADDING` where the row has none."""

    def __init__(self, rows: Samples | Packed) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"tokens": int32 (length,)}."""
        row, count = self._rows[index], self._rows.num_tokens(index)
        is_token = np.arange(len(row["input_ids"])) < count
        return {"tokens": np.where(is_token, row["input_ids"], PADDING)}


def analysis_of(
    rows: grain.sources.RandomAccessDataSource,
    validation_fraction: float,
    output: Path,
    processes: int,
) -> Analysis:
    """An analysis of rows of samples of objective sft."""
    assert isinstance(rows, Samples | Packed), "others have no single text a row"
    about = about_rows(rows, validation_fraction)
    return Analysis(Analyzed(rows), about, output, processes, PADDING)


def about_rows(rows: Samples | Packed, validation_fraction: float) -> dict[str, Any]:
    """What tells these rows from others, as JSON; see `Analysis`."""
    samples = rows.samples if isinstance(rows, Packed) else rows
    digest = sha256(samples.lengths.astype(np.int64).tobytes()).hexdigest()[:12]
    return {
        "tokens": tokens_hash(samples.all_tokens()),
        "content": samples.all_tokens().digest(),
        "lengths": digest,
        "sequence_length": samples.length,
        "validation_fraction": validation_fraction,
        "packing": isinstance(rows, Packed),
    }
