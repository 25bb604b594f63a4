"""Named arrays that are read in parts, to be exported, imported or compared."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from math import prod
from typing import TypeVar

import numpy as np

from zinf.checkpoint.grid import whole_box
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box

X = TypeVar("X")
Y = TypeVar("Y")


class AbstractTensors(ABC):
    """Named arrays of an engine, a checkpoint or files.

    Attributes:
        specs: shape and dtype of each array, in the order in which to read them.
        copies: number of copies of a part that are in memory while it is read.
    """

    specs: Mapping[str, ArraySpec]
    copies = 1

    @abstractmethod
    def block(self, name: str) -> tuple[int, ...]:
        """The shape of the parts in which to read an array.

        A part is contiguous in the array: it has one index of each leading dim, a range
        of the next dim, and all of the dims after that.
        """

    @abstractmethod
    def read(self, name: str, box: Box) -> np.ndarray:
        """A part of an array, in contiguous memory that the caller must not change.

        Raises:
            StorageError: a file is missing, damaged or cannot be read; the error names
                the file.
        """

    def copies_of(self, name: str) -> int:
        """`copies` of one array, whose parts may take more memory than others."""
        return self.copies

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Reserve `nbytes` in the host budget of these arrays, if they have one.

        Raises:
            BudgetExceeded: the budget has fewer bytes left.
        """
        return nullcontext()


def boxes(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Box]:
    """The parts of an array in C order. The last parts of a dim may be smaller.

    An array without elements is one part, so that its metadata is read and checked.
    """
    if 0 in shape:
        return iter([whole_box(shape)])
    ranges = [
        [(low, min(low + length, size)) for low in range(0, size, length)]
        for size, length in zip(shape, block, strict=True)
    ]
    return product(*ranges)


def stream(
    tensors: AbstractTensors,
    wanted: Iterable[tuple[str, Box]],
    use: Callable[[str, Box, np.ndarray], None],
) -> None:
    """Calls `use` with every part in order, while the next part is read.

    So two parts are in memory (`read_bytes`). A generator would need three: the loop
    variable of its caller still refers to a part when the read after the next begins.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="zinf-interchange") as reader:
        last: tuple[str, Box, Future[np.ndarray]] | None = None
        for name, box in wanted:
            begun = name, box, reader.submit(tensors.read, name, box)
            if last is not None:
                use(last[0], last[1], last[2].result())
            last = begun
        if last is not None:
            use(last[0], last[1], last[2].result())


def ahead(function: Callable[[X], Y], items: Iterable[X], count: int) -> Iterator[Y]:
    """`function` of each item in order; `count` at most are begun and not yet used."""
    with ThreadPoolExecutor(count, thread_name_prefix="zinf-ahead") as pool:
        begun: deque[Future[Y]] = deque()
        for item in items:
            if len(begun) == count:
                yield begun.popleft().result()
            begun.append(pool.submit(function, item))
        while begun:
            yield begun.popleft().result()


def first_element(box: Box, shape: tuple[int, ...]) -> int:
    """The position in C order of the first element of a part."""
    number = 0
    for (low, _), size in zip(box, shape, strict=True):
        number = number * size + low
    return number


def block_bytes(tensors: AbstractTensors, name: str) -> int:
    """Bytes of the largest part of an array."""
    spec = tensors.specs[name]
    return prod(map(min, tensors.block(name), spec.shape)) * spec.itemsize


def read_bytes(tensors: AbstractTensors, name: str, nbytes: int) -> int:
    """Bytes that `stream` holds if parts have `nbytes`: one is read, one is used."""
    return nbytes * (tensors.copies_of(name) + 1)


def block_of_chunks(spec: ArraySpec, chunk: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the smallest contiguous part that consists of whole chunks."""
    cut = next((dim for dim, size in enumerate(chunk) if size > 1), len(chunk) - 1)
    return (*chunk[: cut + 1], *(max(1, size) for size in spec.shape[cut + 1 :]))
