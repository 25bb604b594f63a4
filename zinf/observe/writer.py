"""The interface of everything that receives the metrics of each step."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import jax
import numpy as np

Metrics = Mapping[str, Any]
# Longer arrays would make lines that are slow to read.
MAX_LISTED = 1024
Number = bool | int | float | None


class AbstractWriter(ABC):
    """Receives the metrics of each step, in the order of the steps.

    Attributes:
        target: what is written and where, as the subject of an error message.
    """

    target: str

    @abstractmethod
    def write(self, metrics: Metrics) -> None:
        """Write the metrics of one step; `metrics["step"]` is its number, from 1.

        Raises:
            OSError: they cannot be written. The writer is then of no use any more.
        """

    @abstractmethod
    def close(self) -> None: ...


def new_run_folder(directory: Path) -> Path:
    """Make `run.1` in a folder, or the first free number, for files of an earlier run.

    Raises:
        OSError: it cannot be made.
    """
    numbered = (directory / f"run.{n}" for n in count(1))
    folder = next(each for each in numbered if not each.exists())
    folder.mkdir()
    return folder


def numbers(metrics: Metrics) -> dict[str, Number]:
    """The numbers in `metrics`; those in a pytree have names such as `aux/accuracy`.

    Unknown numbers, and those that JSON cannot express (an overflowed gradient norm),
    are None. Arrays of more than one entry are left out.
    """
    return {name: value for key in metrics for name, value in _flat(key, metrics[key])}


def lists(metrics: Metrics) -> dict[str, list]:
    """The short arrays in `metrics`, as lists under the names of `numbers`.

    Such as the tokens of each expert. Numbers that JSON cannot express are None.
    """
    leaves = jax.tree_util.tree_leaves_with_path(dict(metrics))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jax.tree.map(
            _number, np.asarray(leaf).tolist()
        )
        for path, leaf in leaves
        if 1 < np.size(leaf) <= MAX_LISTED
    }


def _flat(key: str, value: Any) -> Iterator[tuple[str, Number]]:
    leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: x is None)
    for path, leaf in leaves:
        below = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf is None or np.size(leaf) == 1:
            yield (f"{key}/{below}" if below else key), _number(leaf)


def _number(leaf: Any) -> Number:
    number = leaf if leaf is None else np.asarray(leaf).item()
    return None if isinstance(number, float) and not isfinite(number) else number
