"""Samples of an evaluation, all of which count once in batches of any size."""

from collections.abc import Callable
from typing import Any

import grain


class Filled(grain.sources.RandomAccessDataSource):
    """Samples, and some without weight after them, to fill the last batch.

    The mean of an evaluation is then that of `samples`, whatever the batch size.

    Args:
        samples: one or more, as a source or a dataset.
        multiple: the number of samples becomes a multiple of this, a batch size.
        without_weight: makes, of any sample, one that has no weight in the loss.
    """

    def __init__(
        self,
        samples: grain.sources.RandomAccessDataSource | grain.MapDataset,
        multiple: int,
        without_weight: Callable[[Any], Any],
    ) -> None:
        self._samples, self._multiple = samples, multiple
        self._without_weight = without_weight

    def __len__(self) -> int:
        return -(-len(self._samples) // self._multiple) * self._multiple

    def __getitem__(self, index: int) -> Any:
        if index < len(self._samples):
            return self._samples[index]
        return self._without_weight(self._samples[0])
