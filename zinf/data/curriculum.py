"""Samples by difficulty: the easy ones first (arXiv 2212.03597), as a grain dataset.

The samples that a step may draw are those of DeepSpeed's sampler. Their order is not:
DeepSpeed shuffles clusters on the drive as they are used up, which cannot be resumed.
Here the sample at each place is a function of the place.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from zinf.data.index_file import read_rows


@dataclass(frozen=True)
class DifficultyIndex:
    """All samples of a dataset by one difficulty.

    Attributes:
        path: where it was read, for messages.
        samples: numbers of the samples, the easiest first.
        values: the difficulties that occur, ascending; None if they are not known.
        ends: number of samples up to the end of each of `values`.
    """

    path: Path
    samples: np.ndarray
    values: np.ndarray | None
    ends: np.ndarray

    @classmethod
    def read(
        cls, samples: Path, values: Path | None, *, num_samples: int
    ) -> "DifficultyIndex":
        """The index in the files of `zinf data analyze` or of DeepSpeed's analyzer.

        Args:
            samples: path without suffix of NAME_index_to_sample, or of
                NAME_index_to_sample_percentile_merged.
            values: path of NAME_index_to_metric; only percentiles do without.
            num_samples: number of samples of the dataset.

        Raises:
            FileNotFoundError, ValueError: the files are missing or damaged, or about
                another dataset.
        """
        rows = read_rows(samples)
        if len(rows.flat) != num_samples or (
            num_samples and int(rows.flat.max()) != num_samples - 1
        ):
            raise ValueError(
                f"{samples} is an index of {len(rows.flat):,} samples, and the data "
                f"has {num_samples:,}. Analyze this data: zinf data analyze, with the "
                "same paths, sequence length and validation fraction."
            )
        found = None
        if values is not None:
            found = np.asarray(read_rows(values).flat)
            if len(found) != len(rows):
                raise ValueError(
                    f"{values} has {len(found):,} difficulties, and {samples} has "
                    f"{len(rows):,} rows. They are of different analyses."
                )
            if (found[1:] <= found[:-1]).any():
                raise ValueError(f"{values} is damaged: difficulties must ascend.")
        return cls(samples, rows.flat, found, rows.ends)

    def num_up_to(self, value: int) -> int:
        """Number of samples with at most a difficulty."""
        assert self.values is not None
        place = int(np.searchsorted(self.values, value, side="right"))
        return int(self.ends[place - 1]) if place else 0

    def num_of_share(self, percentile: int, highest: int) -> int:
        """Number of samples up to a percentile of `highest`, rounded as DeepSpeed's."""
        total = len(self.samples)
        # DeepSpeed multiplies whole samples per percentile, so the rest comes last.
        return total if percentile >= highest else total // highest * percentile


@dataclass(frozen=True)
class Metric:
    """One difficulty of samples, and how it grows.

    Attributes:
        name: for messages.
        grow: from the step (the first is 1) to the largest difficulty.
        index: the samples by this difficulty.
        kind: what `grow` returns: a value of the difficulty, or a percentile.
        highest: the last percentile.
    """

    name: str
    grow: Callable[[int], int]
    index: DifficultyIndex
    kind: Literal["value", "percentile"] = "value"
    highest: int = 100

    def num_eligible(self, difficulty: int) -> int:
        """Number of the samples, easiest first, with at most a difficulty."""
        if self.kind == "value":
            return self.index.num_up_to(difficulty)
        return self.index.num_of_share(difficulty, self.highest)


class CurriculumSamples(grain.MapDataset):
    """Samples of a dataset, of which each step draws those that are easy enough.

    Place i is of step `i // batch_size`. It has one of the samples whose every
    difficulty is at most that of the step, the n eligible ones. They are shuffled
    anew for every n places, so no sample is drawn twice among these; when all samples
    are eligible, that is an epoch. As place i depends on nothing but i and the seed,
    batches resume anywhere, and are the same on any number of processes.

    Args:
        samples: the dataset, the same on every process.
        metrics: its difficulties, at least one.
        num_epochs: as many places as so many passes have; None never ends.
    """

    def __init__(
        self,
        samples: grain.MapDataset,
        metrics: Sequence[Metric],
        *,
        batch_size: int,
        seed: int,
        num_epochs: int | None = None,
    ) -> None:
        super().__init__(samples)
        self.metrics, self.batch_size = tuple(metrics), batch_size
        self._seed = seed
        size = len(samples)
        self._length = sys.maxsize if num_epochs is None else size * num_epochs
        # Two, because a batch may be read again after the next one was begun.
        self._drawn = lru_cache(2)(self._draw)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        eligible, order = self._drawn(self.difficulties(index // self.batch_size))
        return self._parent[int(eligible[order[index]])]

    def difficulties(self, step: int) -> tuple[int, ...]:
        """The largest difficulty of each metric in a step, the first of which is 0."""
        return tuple(int(metric.grow(step + 1)) for metric in self.metrics)

    def eligible(self, step: int) -> np.ndarray:
        """Numbers of the samples that a step may draw."""
        return self._drawn(self.difficulties(step))[0]

    def _draw(self, limits: tuple[int, ...]) -> tuple[np.ndarray, grain.MapDataset]:
        found: np.ndarray | None = None
        for metric, limit in zip(self.metrics, limits, strict=True):
            easiest = metric.index.samples[: metric.num_eligible(limit)]
            if found is None:
                found = easiest
            elif len(easiest) < len(self._parent):
                found = np.intersect1d(found, easiest, assume_unique=True)
        assert found is not None, "a curriculum has a metric"
        if not len(found):
            asked = ", ".join(
                f"{metric.name} of at most {limit}"
                for metric, limit in zip(self.metrics, limits, strict=True)
            )
            raise ValueError(
                f"No sample is easy enough: none has {asked}. Raise min_difficulty."
            )
        return found, grain.MapDataset.range(len(found)).shuffle(self._seed)
