"""Byte-level language modelling over text files: every byte is a token below 256.

Real text that every machine has is the source of Python's own standard library, so a
model can be trained on something with structure and nothing downloaded.
"""

import sysconfig
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

import grain
import numpy as np

from zinf.data.share import Share

Split = Literal["train", "validation"]

STDLIB = "stdlib"
# Installed packages differ between machines; tests hold tables and broken encodings.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests"})
SEPARATOR = 0  # the byte after each file; text has no other use for it
MAX_BYTES = 64 * 2**20


def find_files(paths: Sequence[str], glob: str) -> list[Path]:
    """The files that `paths` stand for, in an order that is the same on every run.

    Args:
        paths: Each a file, taken whatever its name; a folder, searched to any depth;
            or "stdlib", Python's standard library without installed packages or tests
            (a folder of that name is "./stdlib").
        glob: Names to take from folders, such as "*.py".

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: Nothing in a folder matches, or no paths were given.
    """
    if not paths:
        raise ValueError(
            f"No paths to read text from. Name files, folders or {STDLIB!r}."
        )
    found = [file for path in paths for file in _files_of(path, glob)]
    return list(dict.fromkeys(found))  # a file named twice is read once


def _files_of(path: str, glob: str) -> list[Path]:
    is_stdlib = path == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"] if is_stdlib else path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(
            f"There is no file or folder {str(root)!r} to read text from (relative "
            f"paths start at {str(Path.cwd())!r})."
        )
    files = [file for file in sorted(root.rglob(glob)) if file.is_file()]
    if is_stdlib:
        files = [f for f in files if NOT_STDLIB.isdisjoint(f.relative_to(root).parts)]
    if not files:
        raise ValueError(
            f"No file in folder {str(root)!r} matches {glob!r}. Name another folder "
            f"or another glob ('*' takes every file)."
        )
    return files


def read_bytes(files: Sequence[Path], *, max_bytes: int = MAX_BYTES) -> np.ndarray:
    """The files one after another, each closed by a zero byte: uint8 (num_bytes,).

    Stops at `max_bytes` of host memory, within a file if need be.
    """
    text = bytearray()
    for file in files:
        room_bytes = max_bytes - len(text)
        if room_bytes <= 0:
            break
        with file.open("rb") as stream:
            text += stream.read(room_bytes)
        text.append(SEPARATOR)
    return np.frombuffer(text, np.uint8)[:max_bytes]


def text_hash(paths: Sequence[str], *, glob: str, max_bytes: int = MAX_BYTES) -> str:
    """The same where `text_dataset` reads the same text."""
    text = read_bytes(find_files(paths, glob), max_bytes=max_bytes)
    return sha256(text.tobytes()).hexdigest()[:12]


class TokenWindows(grain.sources.RandomAccessDataSource):
    """Windows of `sequence_length + 1` tokens, one every `sequence_length`.

    Neighbours share one token: the last that one window predicts is the first that the
    next one reads. So each token but the first is predicted once per epoch; the rest
    that fills no window is left out.
    """

    def __init__(self, tokens: np.ndarray, *, sequence_length: int):
        self._tokens = tokens
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence_length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"tokens": int32 (sequence_length + 1,)}."""
        start = index * self._sequence_length
        window = self._tokens[start : start + self._sequence_length + 1]
        return {"tokens": window.astype(np.int32)}


def text_dataset(
    paths: Sequence[str],
    *,
    glob: str,
    sequence_length: int,
    batch_size: int,
    seed: int,
    split: Split,
    validation_fraction: float,
    num_epochs: int | None = None,
    max_bytes: int = MAX_BYTES,
    process: tuple[int, int] = (0, 1),
    num_microbatches: int = 1,
) -> grain.IterDataset:
    """Shuffled batches {"tokens": int32 (rows, sequence_length + 1)} of text.

    Reads in the calling process and thread: the text is in memory, and cutting a window
    out of it is cheaper than handing it over. The iterator's `get_state()` is JSON, and
    after `set_state()` of it the same batches follow while the files are the same.

    Args:
        paths: See `find_files`; with `glob`.
        sequence_length: Tokens that a window predicts.
        batch_size: Windows per optimizer step, over all microbatches and devices.
        seed: Of the shuffling, which differs from epoch to epoch.
        split: "validation" is the last `validation_fraction` of the text, "train" what
            comes before it. They share no byte.
        num_epochs: Passes over the split; `None` goes on for ever. Windows that fill no
            batch at the end are left out.
        max_bytes: Most text to read, in bytes of host memory.
        process: (index, count) of several processes, which read equal files: this one
            gets its rows, `batch_size / count`, of every batch (see `Share`).
        num_microbatches: `gradient_accumulation_steps`, by which several processes
            divide a batch.

    Raises:
        FileNotFoundError, ValueError: See `find_files`; or the split has too little
            text for one batch, or a batch does not divide (see `Share`).
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}; it must be train or validation.")
    if not 0.0 <= validation_fraction < 1.0:
        raise ValueError(
            f"validation_fraction is {validation_fraction}; it must be in [0, 1)."
        )
    tokens = read_bytes(find_files(paths, glob), max_bytes=max_bytes)
    cut = len(tokens) - round(len(tokens) * validation_fraction)
    tokens = tokens[:cut] if split == "train" else tokens[cut:]
    windows = TokenWindows(tokens, sequence_length=sequence_length)
    if len(windows) < batch_size:
        raise ValueError(
            f"The {split} split has {len(tokens):,} bytes, which is {len(windows)} "
            f"windows of sequence_length {sequence_length}, but batch_size is "
            f"{batch_size}. Give more text, or lower sequence_length or batch_size"
            f"{' or raise validation_fraction' if split == 'validation' else ''}."
        )
    samples = grain.MapDataset.source(windows).shuffle(seed).repeat(num_epochs)
    return Share(
        samples, batch_size, process=process, num_microbatches=num_microbatches
    )
