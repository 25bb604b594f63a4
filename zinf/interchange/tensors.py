"""Named arrays that are read a part at a time: what is exported, imported, compared."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from math import prod

import numpy as np

from zinf.checkpoint.grid import whole_box
from zinf.program import ArraySpec
from zinf.sharding import Box


class AbstractTensors(ABC):
    """Arrays that rest somewhere, by name.

    Attributes:
        specs: shape and dtype of each, in the order they are best read in.
        copies: of a part that are in memory while it is read.
    """

    specs: Mapping[str, ArraySpec]
    copies = 1

    @abstractmethod
    def block(self, name: str) -> tuple[int, ...]:
        """The shape of the parts that an array is best read in.

        A part is one run of the array's memory: one index of the leading dims, some of
        one dim, and all of those behind it.
        """

    @abstractmethod
    def read(self, name: str, box: Box) -> np.ndarray:
        """A part of an array, contiguous, which the caller must not change.

        Raises:
            StorageError: a file is missing, damaged or cannot be read; it names it.
        """

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Counts what a reader holds against the budget of these arrays, if any.

        Raises:
            BudgetExceeded: there is no room for that many bytes.
        """
        return nullcontext()


def boxes(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Box]:
    """An array in parts of one shape, those at the end of a dim smaller, in C order.

    One without elements is a part too: reading it shows that it is what it should be.
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
    """Calls `use` with every part in order, and reads the next one meanwhile.

    So two parts are in memory (`read_bytes`). A generator would not do: its caller's
    loop still holds a part when the one after the next is begun.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="zinf-interchange") as reader:
        ahead: tuple[str, Box, Future[np.ndarray]] | None = None
        for name, box in wanted:
            begun = name, box, reader.submit(tensors.read, name, box)
            if ahead is not None:
                use(ahead[0], ahead[1], ahead[2].result())
            ahead = begun
        if ahead is not None:
            use(ahead[0], ahead[1], ahead[2].result())


def first_element(box: Box, shape: tuple[int, ...]) -> int:
    """The number of the first element of a part, counted in C order."""
    number = 0
    for (low, _), size in zip(box, shape, strict=True):
        number = number * size + low
    return number


def block_bytes(tensors: AbstractTensors, name: str) -> int:
    """Bytes of the largest part of an array."""
    spec = tensors.specs[name]
    return prod(map(min, tensors.block(name), spec.shape)) * spec.itemsize


def read_bytes(tensors: AbstractTensors, nbytes: int) -> int:
    """What `stream` holds of parts of that many bytes: one read, one used."""
    return nbytes * (tensors.copies + 1)


def block_of_chunks(spec: ArraySpec, chunk: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest part of an array, as `block` has them, that is of whole chunks."""
    cut = next((dim for dim, size in enumerate(chunk) if size > 1), len(chunk) - 1)
    return (*chunk[: cut + 1], *(max(1, size) for size in spec.shape[cut + 1 :]))
