"""Batches of about as many tokens each, from samples of several lengths.

Samples of similar length share a batch ("Attention Is All You Need", section 5.1), so
few tokens are padding. Lengths are rounded up to those of a few buckets, because each
shape has its own plan. DeepSpeed calls it dynamic batching; there a batch has any
number of rows of any length.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import grain
import jax
import numpy as np

from zinf.data.foreseen import AbstractForeseen

# Lengths of buckets are multiples of this share of the longest sample.
GRID = 64
Scaling = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class Bucket:
    """Samples that share batches.

    Attributes:
        length: tokens of each row, with padding.
        rows: rows of a microbatch.
    """

    length: int
    rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.rows * self.length


def make_buckets(
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    max_buckets: int,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
) -> tuple[Bucket, ...]:
    """The buckets for samples of some lengths, the shortest first.

    Their lengths are those with the least padding, of all multiples of 1/64 of the
    longest sample.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: most tokens of a microbatch, with padding.
        min_batch_size: the rows of each microbatch are a multiple of it.
        max_batch_size: most rows of a microbatch.

    Raises:
        ValueError: there is no sample, or a microbatch has no room for the longest
            ones.
    """
    found = np.asarray(lengths, np.int64)
    if not len(found) or found.min() < 1:
        raise ValueError(
            "There are no samples to make batches of, or one has no token. Leave "
            "samples without tokens out."
        )
    buckets = []
    for length in _bucket_lengths(found, max_buckets):
        room = max_tokens // length
        rows = room if max_batch_size is None else min(room, max_batch_size)
        rows -= rows % min_batch_size
        if not rows:
            limit = "" if max_batch_size is None else f" and at most {max_batch_size}"
            raise ValueError(
                f"A sample has {length:,} tokens, of which max_tokens {max_tokens:,} "
                f"has room for {room} rows{limit}, but min_batch_size asks for "
                f"{min_batch_size}. Raise max_tokens, lower min_batch_size, or leave "
                "long samples out."
            )
        buckets.append(Bucket(length, rows))
    return tuple(buckets)


def _bucket_lengths(lengths: np.ndarray, max_buckets: int) -> list[int]:
    """At most so many lengths, ascending, that pad the samples least."""
    longest = int(lengths.max())
    step = -(-longest // GRID)
    ends = sorted({min(longest, -(-int(n) // step) * step) for n in np.unique(lengths)})
    # The samples up to each end. least[k][j] is the least number of tokens of those up
    # to end j in k + 1 buckets, of which the last begins after cut[k][j].
    counts = np.searchsorted(np.sort(lengths), ends, side="right")
    least = [[int(n) * end for n, end in zip(counts, ends, strict=True)]]
    cuts: list[list[int]] = []
    for _ in range(min(max_buckets, len(ends)) - 1):
        before, row, cut = least[-1], [], []
        for j, end in enumerate(ends):
            costs = [
                before[i] + int(counts[j] - counts[i]) * end for i in range(j)
            ] or [before[j]]
            place = min(range(len(costs)), key=costs.__getitem__)
            row.append(costs[place])
            cut.append(place)
        least.append(row)
        cuts.append(cut)
    j, chosen = len(ends) - 1, [ends[-1]]
    for cut in reversed(cuts):
        if j == 0:
            break
        j = cut[j]
        chosen.append(ends[j])
    return sorted(chosen)


def rate_scale(num_rows: int, base: int, method: Scaling) -> float:
    """The factor of a step's learning rate, by its number of rows.

    Args:
        num_rows: rows of the step's batch.
        base: rows of a batch for which the learning rate is meant.
        method: linear (https://arxiv.org/abs/1706.02677), sqrt
            (https://arxiv.org/abs/1404.5997), or none.
    """
    share = num_rows / base
    return {"linear": share, "sqrt": share**0.5, "none": 1.0}[method]


class BatchOrder:
    """Which samples each batch has, as a function of its number.

    Each epoch has its own order of samples. A batch comes when its bucket has enough of
    them; those at the end of an epoch wait for the next one. So each sample is used
    once an epoch, none is left out, and any batch is found without those before it.

    Args:
        bucket_of: the bucket of each sample, int (samples,).
        rows: rows of a batch of each bucket.
        order: "random": shuffled anew in each epoch. "seqlen": the shortest first.
        seed: of the shuffling.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        bucket_of: np.ndarray,
        rows: Sequence[int],
        *,
        order: Literal["random", "seqlen"],
        seed: int,
    ) -> None:
        self._bucket_of, self._rows, self._seed = bucket_of, tuple(rows), seed
        self._counts = np.bincount(bucket_of, minlength=len(rows)).tolist()
        self._fixed = np.argsort(lengths, kind="stable") if order == "seqlen" else None
        # Two epochs, as a batch may have samples of the epoch before.
        self._epoch = lru_cache(2)(self._make_epoch)
        self._samples = lru_cache(2)(self._make_samples)

    def num_batches(self, epochs: float) -> int:
        """Number of batches that are complete after so many epochs."""
        pairs = zip(self._counts, self._rows, strict=True)
        return sum(int(epochs * count // rows) for count, rows in pairs)

    def bucket(self, number: int) -> int:
        """The bucket of a batch."""
        return self._place(number)[0]

    def buckets(self, num_batches: int) -> np.ndarray:
        """The bucket of each of the first batches, int (num_batches,)."""
        epochs = range(self._epoch_of(num_batches - 1) + 1)
        found = [self._epoch(epoch)[0] for epoch in epochs]
        return np.concatenate(found)[:num_batches]

    def samples(self, number: int) -> np.ndarray:
        """Numbers of the samples of a batch, int (rows,)."""
        bucket, place = self._place(number)
        rows, count = self._rows[bucket], self._counts[bucket]
        drawn = [divmod(place * rows + i, count) for i in range(rows)]
        return np.array([self._samples(e)[bucket][i] for e, i in drawn])

    def _place(self, number: int) -> tuple[int, int]:
        """The bucket of batch `number`, and its number among those of the bucket."""
        epoch = self._epoch_of(number)
        buckets, places = self._epoch(epoch)
        i = number - self.num_batches(epoch)
        return int(buckets[i]), int(places[i])

    def _epoch_of(self, number: int) -> int:
        """The epoch in which batch `number` is complete."""
        pairs = zip(self._counts, self._rows, strict=True)
        each = sum(count / rows for count, rows in pairs)
        # Each bucket has less than one batch fewer than its share.
        limit = int((number + len(self._rows) + 1) / each) + 2
        return bisect_right(range(limit), number, key=self.num_batches) - 1

    def _make_samples(self, epoch: int) -> list[np.ndarray]:
        """The samples of each bucket in the order of an epoch."""
        order = self._order(epoch)
        found = self._bucket_of[order]
        return [order[found == bucket] for bucket in range(len(self._rows))]

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The bucket of each batch of an epoch, and its number among the bucket's."""
        found = self._bucket_of[self._order(epoch)]
        buckets, places, filled_at = [], [], []
        for bucket, rows in enumerate(self._rows):
            begun, waiting = divmod(epoch * self._counts[bucket], rows)
            filled = np.flatnonzero(found == bucket)[rows - waiting - 1 :: rows]
            filled_at.append(filled)
            buckets.append(np.full(len(filled), bucket))
            places.append(begun + np.arange(len(filled)))
        order = np.argsort(np.concatenate(filled_at))
        return np.concatenate(buckets)[order], np.concatenate(places)[order]

    def _order(self, epoch: int) -> np.ndarray:
        if self._fixed is not None:
            return self._fixed
        generator = np.random.default_rng((self._seed, epoch))
        return generator.permutation(len(self._bucket_of))


class TokenBatches(grain.IterDataset):
    """Batches of at most `max_tokens` tokens, from samples of several lengths.

    A batch has samples of one bucket, each cut to the length of the bucket, which is as
    long as the longest of them. It has `num_microbatches` times as many rows as a
    microbatch of the bucket. Batches depend on their number alone: they resume
    anywhere, and are the same on any number of processes (see `Share`).

    Args:
        samples: dicts of arrays (tokens,), all padded to one length at the end. The
            same on every process.
        lengths: number of tokens of each, without padding.
        buckets: see `make_buckets`.
        order: see `BatchOrder`.
        process: (index, count): index of this process, and number of processes.

    Raises:
        ValueError: the rows of a microbatch do not divide among the processes.
    """

    def __init__(
        self,
        samples: grain.sources.RandomAccessDataSource,
        lengths: Sequence[int] | np.ndarray,
        buckets: Sequence[Bucket],
        *,
        order: Literal["random", "seqlen"] = "random",
        seed: int = 1234,
        process: tuple[int, int] = (0, 1),
        num_microbatches: int = 1,
    ) -> None:
        super().__init__()
        self.samples, self.buckets = samples, tuple(buckets)
        self.num_microbatches = num_microbatches
        index, count = process
        self._parts = []
        for bucket in self.buckets:
            if bucket.rows % count:
                raise ValueError(
                    f"A microbatch of {bucket.rows} samples of {bucket.length} tokens "
                    f"does not divide among {count} processes. Set min_batch_size to a "
                    f"multiple of {count}."
                )
            parts = np.arange(self.num_rows(bucket))
            parts = parts.reshape(num_microbatches, count, -1)
            self._parts.append(parts[:, index].ravel())
        found = np.asarray(lengths, np.int64)
        ends = [bucket.length for bucket in self.buckets]
        self.order = BatchOrder(
            found,
            np.searchsorted(ends, found),
            [self.num_rows(bucket) for bucket in self.buckets],
            order=order,
            seed=seed,
        )

    def __iter__(self) -> "TokenBatchesIterator":
        return TokenBatchesIterator(self)

    def num_rows(self, bucket: Bucket) -> int:
        """Rows of a batch of a bucket, of all processes."""
        return self.num_microbatches * bucket.rows

    def read(self, number: int) -> dict[str, np.ndarray]:
        """This process's rows of a batch."""
        bucket = self.order.bucket(number)
        rows = self.order.samples(number)[self._parts[bucket]]
        taken = [self.samples[int(row)] for row in rows]
        length = self.buckets[bucket].length
        return jax.tree.map(lambda *leaves: np.stack(leaves)[:, :length], *taken)


class TokenBatchesIterator(AbstractForeseen):
    """Iterates over a `TokenBatches`; its state is the number of the next batch."""

    def __init__(self, data: TokenBatches) -> None:
        super().__init__()
        self._data, self._next = data, 0

    def __next__(self) -> dict[str, np.ndarray]:
        self._next += 1
        return self._data.read(self._next - 1)

    def get_state(self) -> dict[str, int]:
        """The position, as JSON."""
        return {"next_batch": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue at a position that `get_state` returned."""
        self._next = state["next_batch"]

    def whole(self) -> Any:
        """Shapes and dtypes of the batch of the most tokens, of these the longest."""
        buckets = self._data.buckets
        most = max(buckets, key=lambda bucket: (bucket.num_tokens, bucket.length))
        return self._shapes(buckets.index(most))

    def coming(self, num_steps: int) -> list[Any]:
        """Shapes and dtypes of the next batches, each once, in order of first use."""
        found: dict[int, None] = {}
        for number in range(self._next, self._next + num_steps):
            found[self._data.order.bucket(number)] = None
            if len(found) == len(self._data.buckets):
                break
        return [self._shapes(bucket) for bucket in found]

    def _shapes(self, bucket: int) -> dict[str, jax.ShapeDtypeStruct]:
        data = self._data
        length, rows = data.buckets[bucket].length, len(data._parts[bucket])

        def shape(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, length, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(shape, data.samples[0])
