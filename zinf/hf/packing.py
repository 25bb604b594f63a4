"""Puts several samples into one row, so that fewer tokens are padding.

Which samples share a row depends on their lengths alone, so it is the same in each run
and each epoch.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import grain
import numpy as np

from zinf.hf.dataset import Samples


class Packed(grain.sources.RandomAccessDataSource):
    """Rows of whole samples, with the number of each token's sample and its position.

    Samples are numbered from 1 in a row; padding is 0. The first token of a sample has
    no label: no token of the same sample is before it.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self._length = samples, samples.length
        self._rows = rows_of(samples.lengths, samples.length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids`, `labels`, `segment_ids`, `position_ids`, int32 (length,)."""
        row = self.samples.empty()
        segments, positions = np.zeros((2, self._length), np.int32)
        start = 0
        for number, sample in enumerate(self._rows[index], 1):
            ids, labels = self.samples.tokens(sample)
            part = slice(start, start + len(ids))
            row["input_ids"][part], row["labels"][part] = ids, labels
            row["labels"][start] = self.samples.ignored
            segments[part], positions[part] = number, np.arange(len(ids))
            start += len(ids)
        return row | {"segment_ids": segments, "position_ids": positions}

    def num_tokens(self, index: int) -> int:
        """Number of tokens of a row that are no padding; they come first."""
        return int(self.samples.lengths[self._rows[index]].sum())


def rows_of(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """The samples of each row: longest first, each into the fullest row with room.

    This is best fit decreasing, which fills rows well
    (https://arxiv.org/abs/2404.10830, section 3).

    Args:
        lengths: tokens of each sample, at most `room`.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # Numbers of rows, by the tokens left in them.
    rooms: list[int] = []
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    for sample in order.tolist():
        length = int(lengths[sample])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows.append([])
            row, left = len(rows) - 1, room
        else:
            left = rooms[place]
            row = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        rows[row].append(sample)
        left -= length
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(row)
    return rows
