"""What a tier can do: the three verbs of every store, with one meaning on all."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from zinf.core.memory.hold import Holds
from zinf.core.memory.ledger import Ledger
from zinf.core.program import ArrayId, ArraySpec, Tier


class AbstractStore(ABC):
    """The arrays that rest on one tier.

    An array is kept under exactly the `ArrayId` it was written with. Its bytes are
    counted in `ledger` from its first write (on the NVMe tier, from its `create`) to
    its `free`. An id with `rows` that is not kept itself stands for those rows of its
    `whole`, if the whole is kept: reads and writes of the id then use those rows in
    place.

    Several threads may call at once, on different arrays or on different rows of one
    array. Callers must order their uses of the same rows. A value that was read is
    valid until that array (or its rows, or its whole) is next written or freed. `close`
    waits for reads and writes in flight.

    A write, update or free of an array that is in `holds` waits until it is not.

    A value given to `write` belongs to the store from then on: the caller must neither
    change nor donate it, nor give it to `write` again.
    """

    tier: Tier
    ledger: Ledger
    holds: Holds

    def check_space(self, needed_bytes: int) -> None:  # noqa: B027
        """Raise StorageError unless `needed_bytes` more can be written.

        Call this before the first array is written: a full drive is found in a second,
        not after an hour. Memory needs no check besides its budget.
        """

    def create(  # noqa: B027
        self,
        array: ArrayId,
        spec: ArraySpec,
        rows_per_chunk: int | None = None,
        *,
        cut_dims: Collection[int] = (),
    ) -> None:
        """Make the files of `array` before it is written, if the tier has files.

        Args:
            rows_per_chunk: how many rows of the leading dim will be read or written
                together. Rows that start and stop at multiples of it have files of
                their own. Other rows work too: files that they share with their
                neighbours are read and rewritten.
            cut_dims: dims along which `array` is one of several equal shares, whose
                chunks are to lie on one grid.

        Raises:
            BudgetExceeded: `array` does not fit in the tier.
            ValueError: `array` was created before.
            StorageError: the drives are full, or the files cannot be made.
        """

    def rows_per_chunk(self, array: ArrayId) -> int:
        """Rows of the leading dim of `array` that have a file of their own, at most.

        Rows that start or stop elsewhere than at a multiple share a file with others,
        which a write has to read first. 1 if no file has several rows.
        """
        return 1

    @abstractmethod
    def read(self, array: ArrayId) -> Future[Any]:
        """The content of `array`, as the kind of value that this tier keeps.

        Raises:
            KeyError: neither `array` nor its whole is kept here.
        """

    @abstractmethod
    def write(self, array: ArrayId, value: Any) -> Future[None]:
        """Keep `value` as `array`, replacing its content.

        The future is done when another thread may read the new content.

        Raises:
            BudgetExceeded: `array` is new and does not fit in the tier.
            ValueError: `array` has another shape or dtype here already.
        """

    @abstractmethod
    def free(self, array: ArrayId) -> None:
        """Drop `array` and give its bytes back.

        Raises:
            KeyError: `array` is not kept under exactly this id.
        """

    @abstractmethod
    def contains(self, array: ArrayId) -> bool:
        """Whether `read(array)` would find it, as itself or as rows of its whole."""

    @abstractmethod
    def close(self) -> None: ...


def completed(value: Any) -> Future[Any]:
    """A future that is done already, for the tiers that answer at once."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# One for all writes, since a future that is done does not change.
DONE = completed(None)


def unknown_array(array: ArrayId, tier: Tier, known: Iterable[ArrayId]) -> KeyError:
    """The error for an id that a store does not keep, with the nearest that it does."""
    names = [str(other) for other in known]
    near = difflib.get_close_matches(str(array), names, n=1, cutoff=0.0)
    hint = f" The most similar name is {near[0]}." if near else ""
    return KeyError(
        f"Tier {tier} keeps no array {array}. It keeps {len(names)} arrays.{hint} "
        f"Write {array} first, or read it from another tier."
    )


def check_kind(array: ArrayId, value: Any, tier: Tier, *kinds: type) -> None:
    """Raise TypeError unless `value` is of one of the `kinds` that the tier takes."""
    if not isinstance(value, kinds):
        names = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise TypeError(
            f"Tier {tier} takes {names}; {array} is a {type(value).__name__}. Convert "
            "it with np.asarray, or with zinf.core.memory.to_host if it is a jax.Array."
        )


def check_replaces(
    array: ArrayId,
    value: np.ndarray | jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: Any,
) -> None:
    """Raise ValueError unless `value` has the shape and dtype that `array` has."""
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(
            f"Cannot write {value.dtype}{list(value.shape)} to {array}, which is "
            f"{dtype}{list(shape)}. Free it first to give it another shape or dtype."
        )


def check_rows(array: ArrayId, shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows that `array` selects from its whole; ValueError if out of `shape`."""
    assert array.rows is not None
    start, stop = array.rows
    if not shape or not 0 <= start < stop <= shape[0]:
        raise ValueError(
            f"{array} selects rows {start}:{stop}, but the whole array has shape "
            f"{list(shape)}. Select rows within its first dim."
        )
    return start, stop
