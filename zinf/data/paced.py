"""Steps that get longer, as a grain dataset: longer sequences, and more kept tokens.

Sequence-length warm-up (arXiv 2108.06084) shortens the sequences of the first steps;
random-LTD (arXiv 2211.11586) has some layers run on some tokens, which a batch names.
Both numbers come from a few buckets, because each shape has its own plan. The shapes
that come are known ahead, so that plans can be made while training goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grain
import jax
import numpy as np

from zinf.core.config.pace import Pace
from zinf.data.foreseen import AbstractForeseen
from zinf.data.share import Share

TOKENS, KEPT = "tokens", "kept"
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Dropping:
    """Which tokens some layers keep.

    Attributes:
        kept: number of kept tokens; its first step has the count 0 in DeepSpeed. A step
            whose sequences are not longer drops none.
        num_layers: number of layers that drop tokens, each other ones.
        seed: of the choice.
    """

    kept: Pace
    num_layers: int
    seed: int = 1234

    def draw(self, step: int, rows: Iterable[int], length: int, kept: int) -> Any:
        """Ascending positions, int32 (rows, num_layers, kept), each choice as likely.

        Args:
            step: the number of steps before.
            rows: numbers of the rows among those of all processes.
        """
        drawn = [self._row(step, row, length)[:, :kept] for row in rows]
        return np.sort(np.stack(drawn), axis=2).astype(np.int32)

    def _row(self, step: int, row: int, length: int) -> Any:
        # From its own seed, so that a row's choice does not depend on which other rows
        # a process has.
        generator = np.random.default_rng((self.seed, step, row))
        return generator.random((self.num_layers, length), np.float32).argsort(axis=1)


class Paced(grain.IterDataset):
    """Batches of a dataset whose first steps have fewer tokens.

    A batch of `data` is {"tokens": (rows, T + 1)}, and may have other arrays, whose dim
    1 is T + 1 or T. A step of length t trains on the first t + 1 (or t) of these.
    With `reshapes` it trains on all T // t pieces of a row instead, each a row of its
    own; then a step has the same number of tokens at every length, up to the remainder.

    With `dropping`, a batch has "kept" too, int32 (rows, layers, kept), the positions
    of the tokens on which each of these layers runs; see `zinf.random_ltd`. It is
    absent where no token is dropped, as in evaluation.

    Args:
        data: If it is a `Share`, the numbers of its rows and processes are known.
        length: the number of tokens that a row predicts in each step; None: all.
        reshapes: cut rows into pieces, instead of truncating them.
        leaf: the leaf of the tokens.
        extra: how many more tokens a row of it has than T: 1, as the last token is only
            predicted, or 0 if a batch has labels beside its tokens.
        check: called with each batch that is shortened; it raises if the step cannot
            use what is left.

    Raises:
        ValueError: in the first step, if a batch has no such leaf with a sequence dim,
            or rows that are shorter than the longest of `length`, or fewer tokens than
            are to be kept.
    """

    def __init__(
        self,
        data: grain.IterDataset,
        *,
        length: Pace | None = None,
        reshapes: bool = False,
        dropping: Dropping | None = None,
        leaf: str = TOKENS,
        extra: int = 1,
        check: Callable[[Batch], None] | None = None,
    ) -> None:
        super().__init__()
        self.data, self.length, self.check = data, length, check
        self.reshapes, self.dropping = reshapes, dropping
        self.leaf, self.extra = leaf, extra
        self.count = data.count if isinstance(data, Share) else 1

    def __iter__(self) -> "PacedIterator":
        return PacedIterator(self)

    def paces(self) -> dict[str, Pace | None]:
        """The schedules in use, by the first words of their error messages."""
        return {
            "The longest sequences are to predict": self.length,
            "Layers are to keep": None if self.dropping is None else self.dropping.kept,
        }

    def longest(self, batch: Batch) -> int:
        """Number of tokens that a row of a batch predicts, T."""
        return batch[self.leaf].shape[1] - self.extra

    def rows(self, num_rows: int, pieces: int) -> Iterator[int]:
        """Numbers of this process's rows among those of all, by piece."""
        whole = self.data.rows if isinstance(self.data, Share) else range(num_rows)
        return (row * pieces + piece for row in whole for piece in range(pieces))


class PacedIterator(AbstractForeseen):
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
            check_sequences(whole, self._paced)
            self._like = abstract(whole)
        length, kept = self._shape(self._step, self._tokens)
        batch = self._cut(whole, length)
        if batch is not whole and self._paced.check is not None:
            self._paced.check(batch)
        self._tokens += self._num_tokens(batch)
        if kept < length:
            batch = {**batch, KEPT: self._draw(whole, length, kept)}
        self._step += 1
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
        """Shapes and dtypes of a batch of full length."""
        assert self._like is not None, "shapes are known when one batch was taken"
        return self._like

    def coming(self, num_steps: int) -> list[Any]:
        """Shapes and dtypes of the next batches, each once, in order of first use."""
        shapes = dict.fromkeys(islice(self._shapes(), num_steps))
        return [self._abstract(length, kept) for length, kept in shapes]

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """Length and kept tokens of each step from now on, until they stay."""
        step, tokens, sizes = self._step, self._tokens, dict[int, int]()
        paces = [pace for pace in self._paced.paces().values() if pace is not None]
        last = [pace.buckets[-1] for pace in paces]
        while True:
            length, kept = self._shape(step, tokens)
            yield length, min(length, kept)
            if [pace.at(step, tokens) for pace in paces] == last:
                return
            if length not in sizes:
                sizes[length] = self._num_tokens(self._cut(self.whole(), length))
            step, tokens = step + 1, tokens + sizes[length]

    def _shape(self, step: int, tokens: int) -> tuple[int, int]:
        """Length and kept tokens of a step."""
        length, dropping = self._paced.longest(self.whole()), self._paced.dropping
        if self._paced.length is not None:
            length = self._paced.length.at(step, tokens)
        kept = length if dropping is None else dropping.kept.at(step, tokens)
        return length, min(kept, length)

    def _num_tokens(self, batch: Batch) -> int:
        """Number of tokens that all processes predict in a batch."""
        paced = self._paced
        rows = batch[paced.leaf].shape[0]
        return paced.count * rows * paced.longest(batch)

    def _draw(self, whole: Batch, length: int, kept: int) -> Any:
        dropping, num_rows = self._paced.dropping, len(whole[self._paced.leaf])
        assert dropping is not None
        rows = self._paced.rows(num_rows, self._pieces(length))
        return dropping.draw(self._step, rows, length, kept)

    def _abstract(self, length: int, kept: int) -> Batch:
        batch, dropping = self._cut(self.whole(), length), self._paced.dropping
        if dropping is None or kept == length:
            return batch
        shape = (batch[self._paced.leaf].shape[0], dropping.num_layers, kept)
        return {**batch, KEPT: jax.ShapeDtypeStruct(shape, np.int32)}

    def _pieces(self, length: int) -> int:
        longest = self._paced.longest(self.whole())
        return longest // length if self._paced.reshapes else 1

    def _cut(self, batch: Batch, length: int) -> Batch:
        """A batch, or its shapes, with rows of `length` tokens."""
        longest = self._paced.longest(batch)
        if length == longest:
            return batch
        pieces = self._pieces(length)

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


def check_sequences(batch: Any, paced: Paced) -> None:
    """Raise if batches cannot be shortened.

    Raises:
        ValueError: there are no tokens with a sequence dim, or too few.
    """
    leaf = paced.leaf
    tokens = batch.get(leaf) if isinstance(batch, Mapping) else None
    shape = None if tokens is None else np.shape(tokens)
    if shape is None or len(shape) != 2:
        found = "no such leaf" if shape is None else f"shape {list(shape)}"
        raise ValueError(
            f"Sequences cannot be shortened: batch leaf {leaf!r} must have the shape "
            f"(rows, tokens), and the batch has {found}. Name the tokens {leaf!r}, "
            "or turn curriculum_learning and data_efficiency off."
        )
    for what, pace in paced.paces().items():
        if pace is not None and pace.buckets[-1] > shape[1] - paced.extra:
            raise ValueError(
                f"{what} {pace.buckets[-1]} tokens, but the batch has the shape "
                f"{list(shape)}, which predicts {shape[1] - paced.extra}. Lower the "
                "maximum, or raise data.sequence_length."
            )


def describe(batch: Any) -> dict[str, int]:
    """For the metrics: the tokens of a row that a batch predicts, and of all its rows.

    Also those of a row that layers keep which drop tokens.

    Args:
        batch: {"tokens": (rows, length + 1)}, as `text_dataset` makes them. Rows that
            only fill it are not counted.
    """
    _, length = np.shape(batch[TOKENS])
    rows = int(np.count_nonzero(np.asarray(batch[TOKENS])[:, 0] >= 0))
    kept = np.shape(batch[KEPT])[2] if KEPT in batch else length - 1
    return {
        "sequence_length": length - 1,
        "kept_tokens": kept,
        "tokens": rows * (length - 1),
    }
