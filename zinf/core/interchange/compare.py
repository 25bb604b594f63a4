"""Finds the differences between two checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zinf.checkpoint.manifest import shown
from zinf.checkpoint.saved import Saved
from zinf.core.interchange.sources import SavedTensors
from zinf.core.interchange.tensors import AbstractTensors, boxes, first_element, stream
from zinf.core.sharding import Box

MAX_SCALAR_CHARACTERS = 60


@dataclass(frozen=True)
class Difference:
    """An array that differs between two checkpoints.

    Attributes:
        found: both shapes and dtypes if these differ or one checkpoint lacks the array;
            None if only values differ.
        num_different: number of elements whose bits differ.
        largest: largest absolute difference of two elements, in float64; nan if an
            element is nan.
        first: index of the first element that differs.
    """

    name: str
    found: str | None = None
    num_different: int = 0
    largest: float = 0.0
    first: tuple[int, ...] = ()


def differences(first: Saved, second: Saved) -> Iterator[Difference]:
    """The arrays that differ in at least one bit, in order. Arrays are read in parts.

    Raises:
        StorageError: a file is missing, damaged or cannot be read.
    """
    here, there = _all_arrays(first), _all_arrays(second)
    for name in (*here.specs, *(n for n in there.specs if n not in here.specs)):
        specs = here.specs.get(name), there.specs.get(name)
        if specs[0] != specs[1]:
            yield Difference(name, " / ".join(map(shown, specs)))
            continue
        found = _Comparison(here, there, name).run()
        if found.num_different:
            yield found


def scalar_differences(first: Saved, second: Saved) -> Iterator[str]:
    """One line for each scalar that differs between the two checkpoints."""
    for key in dict.fromkeys((*first.scalars, *second.scalars)):
        values = [saved.scalars.get(key) for saved in (first, second)]
        if values[0] != values[1]:
            yield f"{key}: {' / '.join(map(_shortened, values))}"


class _Comparison:
    """Compares one array of two checkpoints part by part."""

    def __init__(self, here: AbstractTensors, there: AbstractTensors, name: str):
        self.here, self.there, self.name = here, there, name
        self.spec = here.specs[name]
        self.num_different, self.largest = 0, 0.0
        self.first: int | None = None

    def run(self) -> Difference:
        parts = boxes(self.spec.shape, self.here.block(self.name))
        stream(self.here, ((self.name, box) for box in parts), self.add)
        shape = self.spec.shape
        first = (
            np.unravel_index(self.first or 0, shape) if self.first else [0] * len(shape)
        )
        index = tuple(int(place) for place in first)
        return Difference(self.name, None, self.num_different, self.largest, index)

    def add(self, name: str, box: Box, content: np.ndarray) -> None:
        other = self.there.read(name, box)
        a_bytes, b_bytes = (x.reshape(-1).view(np.uint8) for x in (content, other))
        if np.array_equal(a_bytes, b_bytes):
            return
        a_NB, b_NB = (x.reshape(-1, self.spec.itemsize) for x in (a_bytes, b_bytes))
        places = np.flatnonzero((a_NB != b_NB).any(axis=1))
        self.num_different += len(places)
        if self.first is None:
            self.first = first_element(box, self.spec.shape) + int(places[0])
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = (_wide(x.reshape(-1)[places]) for x in (content, other))
            largest = float(np.max(np.abs(a - b)))
        self.largest = float(np.maximum(self.largest, largest))


def _all_arrays(saved: Saved) -> SavedTensors:
    return SavedTensors(saved, {str(array): array for array in saved.arrays})


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _shortened(value: Any) -> str:
    text = repr(value)
    if len(text) <= MAX_SCALAR_CHARACTERS:
        return text
    return f"{text[:MAX_SCALAR_CHARACTERS]}..."
