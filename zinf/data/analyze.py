"""Computes the difficulty of each sample of a dataset, once, for a curriculum.

A metric is a function from samples, int32 (samples, tokens), to an integer for each.
Samples are analyzed in chunks, by several processes if asked. After each chunk the
results are on the drive: an analysis that was stopped goes on where it was.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from zinf.core.config.pacing import load_function
from zinf.core.text.complaint import naming
from zinf.core.text.json_text import from_json
from zinf.data.array_file import read_array
from zinf.data.index_file import write_rows
from zinf.data.tokens import SEPARATOR

CHUNK_SAMPLES = 1024
# Rarities are integers, as DeepSpeed's index files hold nothing else.
RARITY_SCALE = 100
# Where a sample of data with padding has no token.
PADDING = -1
ABOUT = "about.json"
# Endings of the names of a metric's files.
INDEXES = ("_sample_to_metric", "_index_to_sample", "_index_to_metric")
SUFFIXES = (
    *(f"{name}{end}" for name in INDEXES for end in (".bin", ".idx")),
    *(".values", ".npy", ".partial.npz", ".partial.new"),
)
Say = Callable[[str], None]


def sequence_length(tokens: np.ndarray, blank: int = SEPARATOR) -> np.ndarray:
    """Number of tokens of each sample that are no separators or padding (`blank`)."""
    return np.count_nonzero(tokens != blank, axis=1)


def token_counts(tokens: np.ndarray) -> np.ndarray:
    """How often each token occurs, summed over samples."""
    return np.bincount(tokens[tokens != PADDING])


def vocabulary_rarity(tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of -log(share of the token in the data), times 100, of each sample.

    Vocabulary rarity of https://arxiv.org/abs/2212.03597, section 3.1, by token, so
    that samples of other lengths compare.
    """
    shares = counts / counts.sum()
    rarity = -np.log(np.where(shares > 0, shares, 1.0))
    is_token = tokens != PADDING
    total = np.where(is_token, rarity[tokens], 0.0).sum(axis=1)
    mean = total / is_token.sum(axis=1)
    return np.rint(RARITY_SCALE * mean).astype(np.int64)


LENGTH, RARITY = "sequence_length", "vocabulary_rarity"


@dataclass(frozen=True)
class Analysis:
    """What is analyzed, and where the results go.

    Attributes:
        samples: a dataset whose samples are {"tokens": (tokens,)}, all as long; padding
            is `PADDING`.
        about: what tells this data from other data, as JSON. Results about other data
            are not continued.
        output: folder of the results.
        processes: number of processes that compute.
        blank: the token that does not count in the length of a sample.
    """

    samples: Any
    about: dict[str, Any]
    output: Path
    processes: int = 1
    blank: int = SEPARATOR


def analyze(
    analysis: Analysis, names: Sequence[str], say: Say = lambda text: None
) -> None:
    """Writes the index files of each metric to the folder of the analysis.

    They are NAME_sample_to_metric, NAME_index_to_sample and NAME_index_to_metric, in
    DeepSpeed's format. Metrics that are there already are not computed anew.

    Args:
        names: "sequence_length", "vocabulary_rarity", or "module:function" of a metric.
        say: called with a line of text after each chunk.

    Raises:
        ValueError: a metric is unknown, or has no integer for a sample; or the folder
            has an analysis of other data.
    """
    if not len(analysis.samples):
        raise ValueError("There is no sample to analyze: give more data.")
    functions = {
        short(name): _metric(name, analysis) for name in names if name != RARITY
    }
    _begin(analysis, [*map(short, names), "token_counts"])
    for name in map(short, names):
        if (analysis.output / f"{name}_index_to_metric.idx").exists():
            say(f"{name}: done before")
            continue
        function = functions.get(name)
        if function is None:
            function = partial(vocabulary_rarity, counts=_counts(analysis, say))
        write_index(analysis.output, name, _values(analysis, name, function, say))
        (analysis.output / f"{name}.values").unlink()


def total(analysis: Analysis, name: str, say: Say = lambda text: None) -> np.ndarray:
    """An accumulating metric: the sum over all samples, also in the file NAME.npy.

    Args:
        name: "token_counts", or "module:function" of a function from samples to an
            array, of any length, for which shorter ones are as if they ended in zeros.
    """
    _begin(analysis, [short(name)])
    function = token_counts if name == "token_counts" else load_function(name)
    return _total(analysis, short(name), function, say)


def check_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse the analysis in a folder if it is of other data than `about` tells.

    DeepSpeed's analyzer writes nothing to compare, so its index files pass.

    Raises:
        ValueError: the analysis is of other data.
    """
    path = folder / ABOUT
    found = _about(path) if path.exists() else {}
    other = [key for key in about if key in found and found[key] != about[key]]
    if other:
        raise ValueError(
            f"{folder} has an analysis of other data: {other[0]} is "
            f"{found[other[0]]!r} there, and {about[other[0]]!r} here. Analyze this "
            "data: zinf data analyze, with the same paths, sequence length and "
            "validation fraction."
        )


def short(name: str) -> str:
    """The name of the files of a metric: "module:function" is "function"."""
    return name.rpartition(":")[2]


def write_index(output: Path, name: str, values: np.ndarray) -> None:
    """The index files of one metric, from the difficulty of each sample."""
    order = np.argsort(values, kind="stable")
    distinct, counts = np.unique(values, return_counts=True)
    ones = np.ones(len(values), np.int32)
    write_rows(output / f"{name}_sample_to_metric", values, ones)
    write_rows(output / f"{name}_index_to_sample", order, counts)
    # Last, because `analyze` takes a metric for done that has it.
    ones = np.ones(len(distinct), np.int32)
    write_rows(output / f"{name}_index_to_metric", distinct, ones)


def _metric(name: str, analysis: Analysis) -> Callable[[np.ndarray], np.ndarray]:
    if name == LENGTH:
        return partial(sequence_length, blank=analysis.blank)
    if ":" not in name:
        raise ValueError(
            f"There is no metric {name!r}. Name {LENGTH}, {RARITY}, or a function of "
            "your own as module:function."
        )
    return load_function(name)


def _begin(analysis: Analysis, names: Sequence[str]) -> None:
    """Write into the folder what is analyzed there.

    Raises:
        ValueError: it has an analysis of other data, or files that are none of an
            analysis and have the names of those that will be written.
    """
    analysis.output.mkdir(parents=True, exist_ok=True)
    path = analysis.output / ABOUT
    about = {**analysis.about, "num_samples": len(analysis.samples)}
    foreign = [path] if path.exists() and not _is_about(path) else []
    if not path.exists():
        files = [analysis.output / f"{n}{s}" for n in names for s in SUFFIXES]
        foreign = [file for file in files if file.exists()]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is of no analysis by zinf, and has the name of a file that "
            "would be written. It is left as it is. Name another folder (--output)."
        )
    if path.exists() and (found := _about(path)) != about:
        raise ValueError(
            f"{analysis.output} has an analysis of other data: {found}, and this is "
            f"{about}. Name another folder."
        )
    path.write_text(json.dumps(about))


def _about(path: Path) -> dict[str, Any]:
    try:
        found = from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} says of no analysis what it is of: {error}. Name another folder."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} says of no analysis what it is of: it has {found!r:.40}. Name "
            "another folder."
        )
    return found


def _is_about(path: Path) -> bool:
    try:
        return "num_samples" in _about(path)
    except (OSError, ValueError):
        return False


def _values(
    analysis: Analysis,
    name: str,
    function: Callable[[np.ndarray], np.ndarray],
    say: Say,
) -> np.ndarray:
    """The difficulty of each sample; a memory map of the file NAME.values."""
    path, count = analysis.output / f"{name}.values", len(analysis.samples)
    written = path.stat().st_size // 8 if path.exists() else 0
    # A chunk that a stopped analysis wrote in part is computed anew. The last chunk is
    # shorter.
    is_done, done = written >= count, written // CHUNK_SAMPLES
    done, whole = (done + 1, count) if is_done else (done, done * CHUNK_SAMPLES)
    with naming(path), path.open("r+b" if done else "wb") as stream:
        stream.truncate(whole * 8)
        stream.seek(0, 2)
        one = partial(_of_chunk, analysis.samples, name, function)
        for number, values in enumerate(_mapped(analysis, one, done), done):
            stream.write(values.tobytes())
            stream.flush()
            most = min((number + 1) * CHUNK_SAMPLES, count)
            say(f"{name}: {most:,} of {count:,} samples")
    return np.memmap(path, np.int64, "r")


def _counts(analysis: Analysis, say: Say) -> np.ndarray:
    path = analysis.output / "token_counts.npy"
    if path.exists():
        return read_array(path)
    return _total(analysis, "token_counts", token_counts, say)


def _total(
    analysis: Analysis,
    name: str,
    function: Callable[[np.ndarray], np.ndarray],
    say: Say,
) -> np.ndarray:
    path, count = analysis.output / f"{name}.npy", len(analysis.samples)
    partial_path = analysis.output / f"{name}.partial.npz"
    done, summed = 0, np.zeros(0, np.int64)
    if partial_path.exists():
        with read_array(partial_path) as found:
            done, summed = int(found["done"]), found["summed"]
    one = partial(_part, analysis.samples, function)
    for number, part in enumerate(_mapped(analysis, one, done), done):
        size = max(len(part), len(summed))
        padded = [np.pad(x, (0, size - len(x))) for x in (part, summed)]
        summed = padded[0] + padded[1]
        written = partial_path.with_suffix(".new")
        with naming(written), written.open("wb") as stream:
            np.savez(stream, done=number + 1, summed=summed)
        written.replace(partial_path)
        most = min((number + 1) * CHUNK_SAMPLES, count)
        say(f"{name}: {most:,} of {count:,} samples")
    with naming(path):
        np.save(path, summed)
    partial_path.unlink(missing_ok=True)
    return summed


def _mapped(
    analysis: Analysis, one: Callable[[int], np.ndarray], done: int
) -> Iterator[np.ndarray]:
    """Results of the chunks after the first `done`, in order."""
    chunks = range(done, math.ceil(len(analysis.samples) / CHUNK_SAMPLES))
    if analysis.processes == 1:
        yield from map(one, chunks)
        return
    # Not forked: the threads of jax do not survive it.
    context = get_context("spawn")
    with ProcessPoolExecutor(analysis.processes, mp_context=context) as pool:
        yield from pool.map(one, chunks)


def _tokens(samples: Any, chunk: int) -> np.ndarray:
    first = chunk * CHUNK_SAMPLES
    last = min(first + CHUNK_SAMPLES, len(samples))
    return np.stack([samples[i]["tokens"] for i in range(first, last)])


def _part(
    samples: Any, function: Callable[[np.ndarray], np.ndarray], chunk: int
) -> np.ndarray:
    return np.asarray(function(_tokens(samples, chunk)))


def _of_chunk(
    samples: Any,
    name: str,
    function: Callable[[np.ndarray], np.ndarray],
    chunk: int,
) -> np.ndarray:
    tokens = _tokens(samples, chunk)
    values = np.asarray(function(tokens))
    first = chunk * CHUNK_SAMPLES
    if values.shape != (len(tokens),) or values.dtype.kind not in "iuf":
        raise ValueError(
            f"Metric {name!r} returned {values.dtype}{list(values.shape)} for "
            f"{len(tokens)} samples; it must return a number for each."
        )
    whole = np.isfinite(values) & (values == np.rint(values))
    if not whole.all():
        worst = int(np.argmin(whole))
        raise ValueError(
            f"Metric {name!r} is {values[worst]} for sample {first + worst:,}. "
            "Difficulties are integers: scale and round them, and give NaN a value."
        )
    return values.astype(np.int64)
