"""Samples for fine-tuning from files of JSON lines or parquet, as a grain dataset.

All lines are turned into tokens once, when a run begins, and kept in a folder: so what
is wrong with a line is found before training, and no step waits for a tokenizer.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import grain
import numpy as np

from zinf.core.config import Config
from zinf.data.array_file import read_array
from zinf.data.curriculum import CurriculumSamples, Metric
from zinf.data.digest import file_digest
from zinf.data.share import Share
from zinf.data.tokens import Part, Tokens
from zinf.data.unfinished import unfinished
from zinf.hf.batch import IGNORED
from zinf.hf.folder import SMALL_FILES
from zinf.hf.model import Model
from zinf.hf.samples import Tokenizing

IDS, LABELS, ENDS = "ids.int32", "labels.int32", "ends.npy"


class Samples(grain.sources.RandomAccessDataSource):
    """Tokenized samples of a folder, each padded to one length.

    Padding comes last and has no label, so in a causal model no trained token sees it,
    and any number may stand for it.

    Args:
        folder: made by `tokenized`.
        first, last: the samples to have.
        padding: the token of the padding.
    """

    ignored = IGNORED

    def __init__(
        self, folder: Path, *, length: int, padding: int, first: int, last: int
    ) -> None:
        self.folder, self.first = folder, first
        self.length, self._padding = length, padding
        ends = read_array(folder / ENDS)
        self._starts = np.concatenate([[0], ends[:-1]])[first:last]
        self._ends = ends[first:last]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample."""
        return self._ends - self._starts

    def num_tokens(self, index: int) -> int:
        """Number of tokens of a sample; they come before its padding."""
        return int(self._ends[index] - self._starts[index])

    def all_tokens(self) -> Tokens:
        """The tokens of all samples, one sample after another."""
        if not len(self):
            return Tokens([])
        start, end = int(self._starts[0]), int(self._ends[-1])
        dtype = np.dtype(np.int32)
        path, offset_bytes = self.folder / IDS, start * dtype.itemsize
        return Tokens([Part(path, end - start, dtype, offset_bytes)])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, int32 (length,)."""
        row = self.empty()
        ids, labels = self.tokens(index)
        row["input_ids"][: len(ids)], row["labels"][: len(ids)] = ids, labels
        return row

    def empty(self) -> dict[str, np.ndarray]:
        """A row of padding alone."""
        padding = {"input_ids": self._padding, "labels": IGNORED}
        return {n: np.full(self.length, x, np.int32) for n, x in padding.items()}

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a sample and their labels, without padding."""
        start, end = int(self._starts[index]), int(self._ends[index])
        ids, labels = (self._read(file, start, end) for file in (IDS, LABELS))
        return ids, labels

    def _read(self, file: str, start: int, end: int) -> np.ndarray:
        path = self.folder / file
        found = np.fromfile(path, np.int32, count=end - start, offset=4 * start)
        if len(found) != end - start:
            raise OSError(f"{path} was cut short. Delete {self.folder}.")
        return found


def tokenized(
    paths: Sequence[Path],
    how: Tokenizing,
    *,
    tokenizer_files: Sequence[Path],
    cache: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """A folder with the tokens of all lines, made once for content and settings.

    Args:
        tokenizer_files: what the tokenizer was read from: if it changes, so do tokens.
        cache: where the folder is made.
        say: called with a line of text when the folder is made.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a line is wrong, or none is left; see `Tokenizing.read`.
    """
    state: list[Any] = [how.settings, *map(content_of, [*paths, *tokenizer_files])]
    state += how.others(paths)
    digest = sha256(json.dumps(state).encode()).hexdigest()[:16]
    folder = cache / f"samples-{digest}"
    if folder.is_dir():
        return folder
    with unfinished(folder) as partial:
        ends = array("q")
        total = trained = num_cut = num_dropped = 0
        with (
            (partial / IDS).open("wb") as ids,
            (partial / LABELS).open("wb") as labels,
            how.beside(partial) as keep,
        ):
            lines = chain.from_iterable(map(how.records, paths))
            for reading in (how.read(*line) for line in lines):
                keep(reading)
                num_cut += reading.is_cut
                num_dropped += not reading.samples
                for sample in reading.samples:
                    found = [np.array(x, np.int32) for x in sample]
                    ids.write(found[0].tobytes())
                    labels.write(found[1].tobytes())
                    total += len(found[0])
                    trained += int(np.count_nonzero(found[1][1:] != IGNORED))
                    ends.append(total)
        if not ends:
            raise ValueError(no_samples(paths, how, num_dropped))
        np.save(partial / ENDS, np.array(ends, np.int64))
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    how.begun_inside.warn()
    say(
        f"data: {len(ends):,} samples, {total:,} tokens, {trained:,} of them trained on"
    )
    if num_cut or num_dropped:
        say(f"data: {treated(how, num_cut, num_dropped)}.")
    return folder


def length_of(model: Model, config: Config) -> int:
    """Tokens of a sample.

    Raises:
        ValueError: they are more than the model was made for.
    """
    length, longest = config.sequence_length, model.max_length
    if longest is None or length <= longest:
        return length
    if config.data.sequence_length is not None:
        raise ValueError(
            f"data.sequence_length is {length:,}, and {model.name} was made "
            f"for {longest:,} tokens (max_position_embeddings). Lower it."
        )
    return longest


def samples_of(
    model: Model,
    config: Config,
    kind: type[Tokenizing],
    say: Callable[[str], None] = lambda text: None,
    *,
    for_evaluation: bool = False,
) -> Path:
    """The folder of the tokenized samples of a config; made now if it is not there.

    Args:
        kind: how lines become samples.
        for_evaluation: those of `data.evaluation_paths`, if there are any.

    Raises:
        FileNotFoundError, ValueError: no file is named, or see `tokenized`.
    """
    data = config.data
    paths = data.paths
    if for_evaluation and data.evaluation_paths is not None:
        paths = data.evaluation_paths
    if isinstance(paths, str):
        raise ValueError(
            "data.paths names no file. To fine-tune, name files of JSON lines "
            "there, with text, prompt and completion, messages, or text and label."
        )
    how = tokenizing_of(model, config, kind)
    files = [p for name in SMALL_FILES for p in sorted(model.folder.glob(name))]
    cache = data.cache or config.run.output / "data"
    return tokenized(paths, how, tokenizer_files=files, cache=cache, say=say)


def tokenizing_of(model: Model, config: Config, kind: type[Tokenizing]) -> Tokenizing:
    """How lines become samples of a config, of a kind that its objective has."""
    data = config.data
    return kind.of(
        model,
        sequence_length=length_of(model, config),
        too_long=data.treatment_of_long,
        completion_only=data.completion_only,
        assistant_only=data.assistant_only,
    )


def treated(how: Tokenizing, num_cut: int, num_dropped: int) -> str:
    """A phrase on lines that were too long: how many were cut, and left out."""
    lines = f"of the lines with more than {how.sequence_length:,} tokens"
    if how.too_long == "drop":
        return f"{lines} {num_dropped:,} left out"
    return (
        f"{lines} {num_cut:,} cut and {num_dropped:,} left out, as nothing to train on "
        "remains of them"
    )


def no_samples(paths: Sequence[Path], how: Tokenizing, num_dropped: int) -> str:
    """Why files have no sample, for an error."""
    names = ", ".join(map(str, paths))
    if not num_dropped:
        return f"{names}: there is no line to read."
    return (
        f"{names}: no line is left; {treated(how, 0, num_dropped)}. Raise "
        "data.sequence_length."
    )


def split_of(
    count: int, validation_fraction: float, *, is_training: bool
) -> tuple[int, int]:
    """The samples of a split of `count`: those of validation are the last ones."""
    cut = count - round(count * validation_fraction)
    return (0, cut) if is_training else (cut, count)


def without_labels(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row that has no weight in the loss; see `Filled`."""
    return row | {"labels": np.full_like(row["labels"], IGNORED)}


def batches(
    rows: grain.sources.RandomAccessDataSource,
    *,
    batch_size: int,
    seed: int,
    split: str = "train",
    num_epochs: int | None = None,
    metrics: Sequence[Metric] | None = None,
    process: tuple[int, int] = (0, 1),
    num_microbatches: int = 1,
) -> grain.IterDataset:
    """Shuffled batches of rows such as those of `Samples`.

    The iterator's state is JSON; after `set_state` the same batches follow.

    Args:
        num_epochs: number of passes over the rows; None never ends.
        metrics: difficulties of the rows: each step draws those that are easy enough;
            see `CurriculumSamples`.

    Raises:
        ValueError: there are fewer rows than a batch has, or a batch does not divide
            (see `Share`).
    """
    if len(rows) < batch_size:
        raise ValueError(
            f"The {split} split has {len(rows)} rows of samples, and train_batch_size "
            f"is {batch_size}. Give more samples, lower the batch size, or change "
            "data.validation_fraction or data.evaluation_paths."
        )
    source = grain.MapDataset.source(rows)
    if metrics is None:
        drawn = source.shuffle(seed).repeat(num_epochs)
    else:
        named = {"batch_size": batch_size, "seed": seed, "num_epochs": num_epochs}
        drawn = CurriculumSamples(source, metrics, **named)
    return Share(drawn, batch_size, process=process, num_microbatches=num_microbatches)


def check_labels(batch: Mapping[str, np.ndarray]) -> None:
    """Raise unless a batch of shortened rows has a token to train on."""
    if not (batch["labels"][:, 1:] != IGNORED).any():
        raise ValueError(
            f"Of the first {batch['labels'].shape[1]} tokens of the samples of a "
            "batch, none is trained on, as prompts are not. Raise the shortest "
            "sequence length of the curriculum (min_difficulty), give batches "
            "more samples, use seqlen_reshape, or set data.completion_only to false."
        )


def num_samples(folder: Path) -> int:
    """Number of samples in a folder of `tokenized`."""
    return len(read_array(folder / ENDS))


def content_of(path: Path) -> tuple[str, str]:
    """The suffix and the digest of a file: what it is, and how it is read."""
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path} (relative paths start at {Path.cwd()}). Name "
            "files of JSON lines in data.paths."
        )
    return path.suffix, file_digest(path)
