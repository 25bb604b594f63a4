"""Sequences that get longer while training (arXiv 2108.06084), as a grain dataset.

Lengths come from a few buckets, because each length has its own plan. The lengths that
come are known ahead, so that their plans can be made while training goes on.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grain
import jax
import numpy as np

from zinf.config.pacing import Pacing, buckets, round_down

TOKENS = "tokens"
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Pace:
    """A number of tokens that grows while training, in a few buckets.

    Attributes:
        grow: from a count to the number of tokens.
        buckets: the numbers that are used, ascending; others are rounded down to these,
            and numbers below the first are the first.
        first: the count of the first step.
        counts_tokens: the count is the tokens of all steps before, not the step.
    """

    grow: Callable[[int], int]
    buckets: tuple[int, ...]
    first: int = 1
    counts_tokens: bool = False

    def __post_init__(self) -> None:
        if not self.buckets or list(self.buckets) != sorted({*self.buckets}):
            raise ValueError(
                f"buckets is {list(self.buckets)}; it must be ascending, and not empty."
            )
        if self.buckets[0] < 1:
            raise ValueError(
                f"The shortest of buckets is {self.buckets[0]} tokens; it must be at "
                "least 1."
            )

    @classmethod
    def of(cls, pacing: Pacing, max_buckets: int) -> "Pace":
        """The pace of a section of a config."""
        kept = buckets(pacing.levels(), max_buckets)
        return cls(pacing, kept, pacing.first_count, pacing.counts_tokens)

    def at(self, step: int, tokens: int) -> int:
        """The number for a step.

        Args:
            step: the number of steps before.
            tokens: the number of tokens before.
        """
        count = tokens if self.counts_tokens else step + self.first
        return round_down(self.grow(count), self.buckets)


class Paced(grain.IterDataset):
    """Batches of a dataset, with sequences that are shortened in the first steps.

    A batch of `data` is {"tokens": (rows, T + 1)}, and may have other arrays, whose dim
    1 is T + 1 or T. A step of length t trains on the first t + 1 (or t) of these.
    With `reshapes` it trains on all T // t pieces of a row instead, each a row of its
    own; then a step has the same number of tokens at every length, up to the remainder.

    Args:
        length: the number of tokens that a row predicts in each step.
        reshapes: cut rows into pieces, instead of truncating them.
        count: number of processes; each has its own rows of every batch (see `Share`).

    Raises:
        ValueError: in the first step, if a batch has no "tokens" with a sequence dim,
            or rows that are shorter than the longest of `length`.
    """

    def __init__(
        self,
        data: grain.IterDataset,
        *,
        length: Pace,
        reshapes: bool = False,
        count: int = 1,
    ) -> None:
        super().__init__()
        self.data, self.length = data, length
        self.reshapes, self.count = reshapes, count

    def __iter__(self) -> "PacedIterator":
        return PacedIterator(self)


class PacedIterator(grain.DatasetIterator):
    """Iterates over a `Paced`.

    Its state is that of the data, with the steps taken and the tokens of all processes,
    so that it can be restored with another number of processes.
    """

    def __init__(self, paced: Paced) -> None:
        super().__init__()
        self._paced = paced
        self._batches = iter(paced.data)
        self._step = self._tokens = 0
        self._like: Batch | None = None

    def __next__(self) -> Any:
        whole = next(self._batches)
        if self._like is None:
            check_sequences(whole, self._paced.length.buckets[-1])
            self._like = abstract(whole)
        batch = self._cut(whole, self._length(self._step, self._tokens))
        self._step += 1
        self._tokens += self._num_tokens(batch)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON."""
        steps = {"step": self._step, "tokens": self._tokens}
        return {"data": self._batches.get_state(), **steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position that `get_state` returned."""
        self._batches.set_state(state["data"])
        self._step, self._tokens = state["step"], state["tokens"]

    def whole(self) -> Any:
        """Shapes and dtypes of a batch of full length. One batch must be taken."""
        assert self._like is not None, "shapes are known when one batch was taken"
        return self._like

    def coming(self, num_steps: int) -> list[Any]:
        """Shapes and dtypes of the next `num_steps` batches, each of them once.

        In the order in which they come. One batch must have been taken.
        """
        found: dict[int, Any] = {}
        for length in islice(self._lengths(), num_steps):
            if length not in found:
                found[length] = self._cut(self.whole(), length)
            if length == self._paced.length.buckets[-1]:
                break
        return list(found.values())

    def _lengths(self) -> Iterator[int]:
        step, tokens, sizes = self._step, self._tokens, dict[int, int]()
        while True:
            length = self._length(step, tokens)
            if length not in sizes:
                sizes[length] = self._num_tokens(self._cut(self.whole(), length))
            yield length
            step, tokens = step + 1, tokens + sizes[length]

    def _length(self, step: int, tokens: int) -> int:
        return self._paced.length.at(step, tokens)

    def _num_tokens(self, batch: Batch) -> int:
        """Number of tokens that all processes predict in a batch."""
        rows, length = batch[TOKENS].shape
        return self._paced.count * rows * (length - 1)

    def _cut(self, batch: Batch, length: int) -> Batch:
        """A batch, or its shapes, with rows of `length` tokens."""
        longest = batch[TOKENS].shape[1] - 1
        if length == longest:
            return batch
        pieces = longest // length if self._paced.reshapes else 1

        def cut(leaf: Any) -> Any:
            if leaf.ndim < 2 or leaf.shape[1] not in (longest, longest + 1):
                return cut_rows(leaf, pieces)
            return cut_columns(leaf, length, leaf.shape[1] - longest, pieces)

        return jax.tree.map(cut, batch)


def cut_columns(leaf: Any, length: int, extra: int, pieces: int) -> Any:
    """The first pieces of `length + extra` columns of an array, as rows.

    Neighbouring pieces share `extra` columns, as windows of tokens do: the last target
    of a piece is the first input of the next.
    """
    width = length + extra
    if isinstance(leaf, jax.ShapeDtypeStruct):
        rest = leaf.shape[2:]
        shape = (leaf.shape[0] * pieces, width, *rest)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    parts = [leaf[:, i * length : i * length + width] for i in range(pieces)]
    # The pieces of a row follow each other, so they stay in its microbatch.
    return np.stack(parts, axis=1).reshape(-1, width, *leaf.shape[2:])


def cut_rows(leaf: Any, pieces: int) -> Any:
    """An array without a sequence dim: each piece of a row has the row's value."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = (leaf.shape[0] * pieces, *leaf.shape[1:]) if leaf.shape else ()
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    return leaf if pieces == 1 or not leaf.ndim else np.repeat(leaf, pieces, axis=0)


def abstract(batch: Batch) -> Batch:
    """Shapes and dtypes of a batch."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def check_sequences(batch: Any, longest: int) -> None:
    """Raise if batches cannot be shortened.

    Raises:
        ValueError: there are no tokens with a sequence dim, or too few.
    """
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    shape = None if tokens is None else np.shape(tokens)
    if shape is None or len(shape) != 2:
        found = "no such leaf" if shape is None else f"shape {list(shape)}"
        raise ValueError(
            f"Sequences cannot be shortened: batch leaf {TOKENS!r} must have the shape "
            f"(rows, tokens), and the batch has {found}. Name the tokens {TOKENS!r}, "
            "or turn curriculum_learning off."
        )
    if shape[1] - 1 < longest:
        raise ValueError(
            f"The longest sequences are to predict {longest} tokens, but the batch has "
            f"the shape {list(shape)}, which predicts {shape[1] - 1}. Lower "
            "max_difficulty, or raise data.sequence_length."
        )


def describe(batch: Any) -> dict[str, int]:
    """For the metrics: the tokens that a row of a batch predicts, and all its rows do.

    Args:
        batch: {"tokens": (rows, length + 1)}, as `text_dataset` makes them.
    """
    rows, length = np.shape(batch[TOKENS])
    return {"sequence_length": length - 1, "tokens": rows * (length - 1)}
