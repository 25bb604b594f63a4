"""Datasets for language models from files of text, or of tokens made by other tools.

Each byte of a text is a token below 256. Every machine has the source of Python's
standard library, so a model can be trained on real text without a download.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from zinf.data.curriculum import CurriculumSamples, Metric
from zinf.data.extract import extracted
from zinf.data.files import Kind, find_files
from zinf.data.filled import Filled
from zinf.data.share import Share
from zinf.data.tokens import Tokens, array_part, text_part

Split = Literal["train", "validation"]

NO_TOKEN = -1  # in the samples that fill a batch of validation

# `tokens_hash` reads this many windows of this many tokens.
COMPARED_WINDOWS, COMPARED_TOKENS = 64, 4096


def read_tokens(
    paths: Sequence[str],
    *,
    glob: str | None = None,
    field: str = "text",
    bin_dtype: str = "uint16",
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tokens:
    """The tokens of all files. They stay on the drive until they are read.

    Args:
        paths, glob: See `find_files`.
        field: Name of the text in JSON lines and parquet.
        bin_dtype: Dtype of the tokens in `.bin` files.
        cache: Folder for the text of JSON lines and parquet; see `extracted`.
        say: Called with lines on which files are read and which are skipped.

    Raises:
        FileNotFoundError, ValueError: See `find_files`, `extracted`, `array_part`.
    """
    found = find_files(paths, glob)
    say(found.summary())
    parts = []
    for path, kind in found.files:
        if kind is Kind.TOKENS:
            parts.append(array_part(path, dtype=bin_dtype))
        elif kind is Kind.TEXT:
            parts.append(text_part(path))
        elif cache is None:
            raise ValueError(
                f"The text of {path} is taken out of it once. Say where it may be "
                "written: `cache`, a folder."
            )
        else:
            path = extracted(path, kind, field=field, cache=cache, say=say)
            parts.append(text_part(path))
    return Tokens(parts)


def tokens_hash(tokens: Tokens) -> str:
    """A hash by which processes check that they read the same data.

    It covers the number of tokens and 64 windows of 4096 tokens, spread evenly. For
    longer data it does not see changes between the windows.
    """
    total = sha256(str(len(tokens)).encode())
    last = max(0, len(tokens) - COMPARED_TOKENS)
    for start in np.linspace(0, last, COMPARED_WINDOWS, dtype=np.int64).tolist():
        stop = min(start + COMPARED_TOKENS, len(tokens))
        total.update(tokens.read(start, stop).tobytes())
    return total.hexdigest()[:12]


class TokenWindows(grain.sources.RandomAccessDataSource):
    """Windows of `sequence_length + 1` tokens, one every `sequence_length`.

    Neighbouring windows share one token: the last target of one window is the first
    input of the next. So each token but the first is predicted once per epoch. Tokens
    at the end that do not fill a window are left out.

    Args:
        first, last: The windows cover the tokens from `first` up to `last`.
        vocab_size: Size of the model's vocabulary; a token outside it is an error.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        first: int = 0,
        last: int | None = None,
        vocab_size: int | None = None,
    ):
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._first = first
        self.num_tokens = (len(tokens) if last is None else last) - first
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return max(0, self.num_tokens - 1) // self._sequence_length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"tokens": int32 (sequence_length + 1,)}."""
        start = self._first + index * self._sequence_length
        window = self._tokens.read(start, start + self._sequence_length + 1)
        if self._vocab_size is not None:
            # Without this check an embedding would silently use its last row for a
            # token that is too large.
            low, high = int(window.min()), int(window.max())
            if low < 0 or high >= self._vocab_size:
                raise ValueError(
                    f"The data has the token {low if low < 0 else high}, near token "
                    f"{start:,}, but model.vocab_size is {self._vocab_size}. Set it to "
                    "that of the tokenizer; or data.bin_dtype is not the dtype that a "
                    ".bin file was written with."
                )
        return {"tokens": window}

    def about(self, validation_fraction: float) -> dict[str, Any]:
        """What tells these samples from others, as JSON; see `Analysis`."""
        return {
            "tokens": tokens_hash(self._tokens),
            "content": self._tokens.digest(),
            "sequence_length": self._sequence_length,
            "validation_fraction": validation_fraction,
        }


def split_windows(
    tokens: Tokens,
    *,
    sequence_length: int,
    split: Split,
    validation_fraction: float,
    vocab_size: int | None = None,
) -> TokenWindows:
    """The windows of one split of the tokens; see `text_dataset`."""
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}; it must be train or validation.")
    if not 0.0 <= validation_fraction < 1.0:
        raise ValueError(
            f"validation_fraction is {validation_fraction}; it must be in [0, 1)."
        )
    cut = len(tokens) - round(len(tokens) * validation_fraction)
    first, last = (0, cut) if split == "train" else (cut, len(tokens))
    return TokenWindows(
        tokens,
        sequence_length=sequence_length,
        first=first,
        last=last,
        vocab_size=vocab_size,
    )


def text_dataset(
    paths: Sequence[str],
    *,
    glob: str | None = None,
    field: str = "text",
    bin_dtype: str = "uint16",
    cache: Path | None = None,
    sequence_length: int,
    batch_size: int,
    seed: int,
    split: Split,
    validation_fraction: float,
    vocab_size: int | None = None,
    num_epochs: int | None = None,
    fills: bool = False,
    process: tuple[int, int] = (0, 1),
    num_microbatches: int = 1,
    metrics: Callable[[int, dict[str, Any]], Sequence[Metric]] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> grain.IterDataset:
    """Shuffled batches {"tokens": int32 (rows, sequence_length + 1)} from files.

    Each window is read from the drive when it is needed, in the calling thread, so the
    data may be larger than memory. The iterator's `get_state()` is JSON. After
    `set_state()` the same batches follow, if the files have not changed.

    Args:
        paths, glob: See `find_files`.
        field, bin_dtype, cache: See `read_tokens`.
        sequence_length: Number of tokens that a window predicts.
        batch_size: Windows per optimizer step, over all microbatches and devices.
        seed: Seed of the shuffling. Each epoch has another order.
        split: "validation" is the last `validation_fraction` of the tokens, "train" is
            the part before it. The splits share no token.
        vocab_size: Size of the model's vocabulary; a token outside it is an error.
        num_epochs: Number of passes over the split; None never ends. Windows at the end
            that do not fill a batch are left out.
        fills: the last batch is filled with rows of -1 instead, to which the loss must
            give no weight, as `zinf.models.held_out_sums` does.
        process: (index, count): index of this process, and number of processes, which
            must read equal files. This process gets `batch_size / count` rows of every
            batch (see `Share`).
        num_microbatches: `gradient_accumulation_steps`; determines which rows a process
            gets.
        metrics: from the number of samples, and what `TokenWindows.about` tells of
            them, to their difficulties: each step draws samples that are easy enough;
            see `CurriculumSamples`.
        say: See `read_tokens`.

    Raises:
        FileNotFoundError, ValueError: See `read_tokens`. ValueError also if the split
            has too few tokens for one batch (for a window, if batches are filled), or a
            batch does not divide (see `Share`).
    """
    windows = split_windows(
        read_tokens(
            paths, glob=glob, field=field, bin_dtype=bin_dtype, cache=cache, say=say
        ),
        sequence_length=sequence_length,
        split=split,
        validation_fraction=validation_fraction,
        vocab_size=vocab_size,
    )
    if len(windows) < (1 if fills else batch_size):
        raise ValueError(
            f"The {split} split has {windows.num_tokens:,} tokens, which is "
            f"{len(windows)} "
            f"windows of data.sequence_length {sequence_length}, but train_batch_size "
            f"is {batch_size}. Give more text, or lower sequence_length or batch size"
            f"{' or raise validation_fraction' if split == 'validation' else ''}."
        )
    source = grain.MapDataset.source(windows)
    if metrics is None:
        samples = source.shuffle(seed).repeat(num_epochs)
    else:
        named = {"batch_size": batch_size, "seed": seed, "num_epochs": num_epochs}
        found = metrics(len(windows), windows.about(validation_fraction))
        samples = CurriculumSamples(source, found, **named)
    if fills:
        samples = grain.MapDataset.source(Filled(samples, batch_size, _without_tokens))
    return Share(
        samples, batch_size, process=process, num_microbatches=num_microbatches
    )


def _without_tokens(sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": np.full_like(sample["tokens"], NO_TOKEN)}
