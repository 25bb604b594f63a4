"""What `zinf data analyze` analyzes: windows of texts, or the samples of a model."""

from collections.abc import Sequence
from pathlib import Path

from zinf import hf
from zinf.core.config import Config
from zinf.core.text.complaint import tell
from zinf.data import Analysis, read_tokens
from zinf.data.text import split_windows


def windows(
    paths: Sequence[str],
    output: Path,
    *,
    glob: str | None,
    field: str,
    bin_dtype: str,
    sequence_length: int,
    validation_fraction: float,
    processes: int,
) -> Analysis:
    """The windows on which zinf's own model is trained."""
    tokens = read_tokens(
        paths,
        glob=glob,
        field=field,
        bin_dtype=bin_dtype,
        cache=output / "data",
        say=tell,
    )
    found = split_windows(
        tokens,
        sequence_length=sequence_length,
        split="train",
        validation_fraction=validation_fraction,
    )
    return Analysis(found, found.about(validation_fraction), output, processes)


def samples(
    model: str,
    paths: Sequence[str],
    output: Path,
    *,
    sequence_length: int,
    validation_fraction: float,
    packing: bool,
    too_long: str | None,
    processes: int,
) -> Analysis:
    """The rows on which a model of transformers is trained, as its tokenizer reads."""
    raw = {
        "model": {"huggingface": model},
        "data": {
            "paths": list(paths),
            "sequence_length": sequence_length,
            "validation_fraction": validation_fraction,
            "packing": packing,
            "too_long": too_long,
            "cache": str(output / "data"),
        },
    }
    rows = hf.Task(Config.load(raw)).rows(tell)
    return hf.analysis_of(rows, validation_fraction, output, processes)
