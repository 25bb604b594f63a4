"""Batches of a dataset, of which each process reads only its own rows."""

from typing import Any

import grain
import jax
import numpy as np


def own_rows(rows: Any, process: tuple[int, int], num_microbatches: int = 1) -> Any:
    """The part of this process in rows of all processes, in process order.

    Args:
        rows: a pytree of arrays with equal numbers of rows for each process, such as
            what `Engine.apply` returns.
        process: (index, count).
        num_microbatches: the rows of each of them are divided, as `Share` does.
    """
    index, count = process

    def own(whole: Any) -> Any:
        parts = whole.reshape(num_microbatches, count, -1, *whole.shape[1:])
        return parts[:, index].reshape(-1, *whole.shape[1:])

    return jax.tree.map(own, rows)


class Share(grain.IterDataset):
    """Batches of `batch_size` samples, reduced to the rows of this process.

    Batch i begins at sample `i * batch_size`. Each microbatch of it is divided among
    the processes, in process order. A process's rows are those of the first microbatch,
    then those of the second, and so on, as a step cuts its rows into microbatches in
    this order. A microbatch therefore has the same samples on any number of processes.
    This matters if its loss is no plain mean over samples (for example a mean over
    unmasked tokens).

    Samples at the end that do not fill a batch are left out. Only the rows of this
    process are read, in the calling thread.

    Args:
        samples: Pytrees of arrays, the same on every process.
        process: (index, count): index of this process, and number of processes.
        num_microbatches: `gradient_accumulation_steps`.

    Raises:
        ValueError: `batch_size` is no multiple of `num_microbatches` times the number
            of processes.
    """

    def __init__(
        self,
        samples: grain.MapDataset,
        batch_size: int,
        *,
        process: tuple[int, int] = (0, 1),
        num_microbatches: int = 1,
    ) -> None:
        super().__init__()
        index, count = process
        if batch_size % (num_microbatches * count):
            raise ValueError(
                f"A batch of {batch_size} samples does not divide into "
                f"{num_microbatches} microbatches, and each of them among {count} "
                f"processes. Make train_batch_size a multiple of "
                f"{num_microbatches * count}."
            )
        self.samples, self.batch_size = samples, batch_size
        self.count = count
        parts = np.arange(batch_size).reshape(num_microbatches, count, -1)
        self.rows = parts[:, index].ravel().tolist()

    def __iter__(self) -> "ShareIterator":
        return ShareIterator(self)


class ShareIterator(grain.DatasetIterator):
    """Iterates over a `Share`.

    Its state is the number of samples that all processes together have taken, so it can
    be restored with another number of processes or another batch size.
    """

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._share = share
        self._next_index = 0

    def __next__(self) -> Any:
        share, first = self._share, self._next_index
        if first + share.batch_size > len(share.samples):
            raise StopIteration
        self._next_index += share.batch_size
        taken = [share.samples[first + row] for row in share.rows]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *taken)

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, int]) -> None:
        self._next_index = state["next_index"]
