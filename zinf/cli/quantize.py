"""`zinf quantize`: writes a model of transformers in 4 or 8 bits."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

from zinf import hf
from zinf.core.config import Config
from zinf.core.text.complaint import complain, tell

# Most tokens of a row, if the command says nothing.
LENGTH = 2048


def write_quantized(
    name: str,
    data: Sequence[Path],
    output: Path,
    config: Config,
    *,
    bits: int,
    method: Literal["gptq", "awq", "lkd", "rtn"],
    group_size: int,
    lkd_steps: int | None,
    lkd_learning_rate: float | None,
    samples: int,
    sequence_length: int | None,
) -> None:
    """Writes the model, and what was rounded and how long it took.

    Raises:
        ValueError, FileExistsError: see `zinf.hf.quantize`.
    """
    start = perf_counter()
    distilling = _distilling(lkd_steps, lkd_learning_rate)
    model = hf.load_as_stored(name)
    hf.check_quantizing(
        model, bits, method, output, has_rows=bool(data), distilling=distilling
    )
    rows = rows_of(model, data, samples, sequence_length) if data else None
    hf.quantize(
        model,
        output,
        rows,
        config,
        bits=bits,
        method=method,
        group_size=group_size,
        distilling=distilling,
        say=complain,
    )
    tell(f"wrote {output} in {perf_counter() - start:,.1f} s")


def rows_of(
    model: "hf.Model", data: Sequence[Path], samples: int, sequence_length: int | None
) -> np.ndarray:
    """The rows of tokens that the options of a command ask for.

    Raises:
        ValueError: see `zinf.hf.calibration_rows`.
    """
    length = sequence_length or min(LENGTH, model.max_length or LENGTH)
    lines = chain.from_iterable(map(hf.records, data))
    rows = hf.calibration_rows(model, lines, samples=samples, length=length)
    if len(rows) < samples:
        complain(
            f"--data has {len(rows):,} rows of {length:,} tokens, fewer than "
            f"--samples {samples:,}."
        )
    return rows


def _distilling(
    steps: int | None, learning_rate: float | None
) -> "hf.Distilling | None":
    """What the options of lkd ask for; None if none is given."""
    if steps is None and learning_rate is None:
        return None
    default = hf.Distilling()
    return hf.Distilling(
        steps=default.steps if steps is None else steps,
        learning_rate=default.learning_rate if learning_rate is None else learning_rate,
    )
