"""`zinf score` and `zinf embed`: a pass over each line of a file, and what it says."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from xxhash import xxh3_128

from zinf import hf
from zinf.cli.generate import is_of_training
from zinf.cli.outputs import AbstractForm, JsonLines, Vectors, check_output, resumed
from zinf.core.config import Config
from zinf.core.config.deciding import deciding
from zinf.core.text.complaint import complain

# Lines that are sorted by length and written together: at first so many, and more as
# long as they take less than a minute. A kill loses no more.
FIRST_WINDOW, LAST_WINDOW, WINDOW_SECONDS = 512, 65_536, 60.0
# Digits that tell all numbers of float32 apart.
DIGITS = ".9g"
Answers = Sequence[Mapping[str, Any]]


def write_scores(
    name: str,
    data: Path,
    output: Path,
    config: Config,
    *,
    allow_changed: Sequence[str] = (),
    **asked: Any,
) -> None:
    """Writes each line of a file with its scores to another file.

    Args:
        asked: see `zinf.hf.open_scorer`.

    Raises:
        ValueError: a line is wrong, or the output; nothing of it is changed.
        StorageError: another command writes to the output.
    """
    check_output(output, data, "the file of --data")
    if any(hf.has_images(line) for line, _ in hf.records(data)):
        asked["images_from"] = data.parent
    with hf.open_scorer(name, config, **asked) as reader:
        lines, read = _read(reader, data)
        columns = [reader.columns(each) for each in read]
        form = JsonLines(lines, columns, "score")
        form.check()
        how = {key: asked[key] for key in ("choices", "chat")}
        settings = _settings(reader, config, how)
        _write(reader, read, output, form, settings, allow_changed)


def write_vectors(
    name: str,
    data: Path,
    output: Path,
    config: Config,
    *,
    allow_changed: Sequence[str] = (),
    **asked: Any,
) -> None:
    """Writes the vector of each line of a file to a .npy file, or beside the lines.

    Args:
        asked: see `zinf.hf.open_embedder`.

    Raises:
        ValueError: a line is wrong, or the output; nothing of it is changed.
        StorageError: another command writes to the output.
    """
    check_output(output, data, "the file of --data")
    is_array = output.suffix == ".npy"
    if not is_array and output.suffix not in (".jsonl", ".json"):
        raise ValueError(
            f"--output must end with .npy or .jsonl; found {output}. An array has the "
            "vectors alone, and JSON lines those of --data with them."
        )
    if is_array and asked["too_long"] == "drop":
        raise ValueError(
            "In a .npy file each line has a vector, so --too-long drop needs .jsonl."
        )
    with hf.open_embedder(name, config, **asked) as reader:
        lines, read = _read(reader, data)
        settings = _settings(reader, config, reader.settings)
        if is_array:
            form: AbstractForm = Vectors(len(lines))
            content = json.dumps(lines, ensure_ascii=False).encode()
            settings["data.content"] = xxh3_128(content).hexdigest()
            _write(reader, read, output, form, settings, allow_changed)
            return
        columns = [reader.columns(each) for each in read]
        form = JsonLines(lines, columns, "vector")
        form.check()
        rest = settings, allow_changed
        _write(reader, read, output, form, *rest, shown=_with_lists)


def _read(reader: "hf.AbstractReader", data: Path) -> tuple[list[Any], list[Any]]:
    """The lines of a file, and what is asked of the model for each.

    All lines are read first: what is wrong with the last is known before the first.
    """
    found = [(line, reader.read(line, where)) for line, where in hf.records(data)]
    if not found:
        raise ValueError(f"{data}: there is no line to read.")
    reader.limit.check()
    if reader.limit.note:
        complain(reader.limit.note)
    return [line for line, _ in found], [asked for _, asked in found]


def _settings(
    reader: "hf.AbstractReader", config: Config, how: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings that the answers depend on, beside the lines."""
    return {
        "model.weights": reader.prefill.model.digest,
        "max_length": reader.limit.max_length,
        "too_long": reader.limit.too_long,
        **how,
        **{k: v for k, v in deciding(config).items() if not is_of_training(k)},
    }


def _write(
    reader: "hf.AbstractReader",
    read: Sequence[Any],
    output: Path,
    form: AbstractForm,
    settings: Mapping[str, Any],
    allow_changed: Sequence[str],
    *,
    shown: Callable[[Answers], Answers] = lambda answers: answers,
) -> None:
    """Append the answers to all lines that the output has not yet, a window at a time.

    Args:
        shown: answers as they are written.
    """
    with resumed(output, form, settings, allow_changed, complain) as begun:
        first, window = begun.done, FIRST_WINDOW
        if first == len(read):
            return
        # The weights are read now, with room for the longest; then the output changes.
        reader.prefill.engine(max(1, *map(reader.length, read[first:])))
        start = perf_counter()
        with begun.appending() as append:
            while first < len(read):
                began = perf_counter()
                some = read[first : first + window]
                append(shown(reader.answers(some)))
                first += len(some)
                now = perf_counter()
                if now - began < WINDOW_SECONDS:
                    window = min(2 * window, LAST_WINDOW)
                rate = (first - begun.done) / (now - start)
                speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
                complain(f"{first:,} of {len(read):,} lines, {speed} a second")


def _with_lists(answers: Answers) -> Answers:
    """Vectors as lists of numbers with as many digits as float32 has."""
    return [
        {name: None if x is None else _numbers(x) for name, x in answer.items()}
        for answer in answers
    ]


def _numbers(vector: np.ndarray) -> list[float]:
    return [float(format(x, DIGITS)) for x in vector]
