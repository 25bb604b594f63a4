"""One process's rows of every batch of a dataset."""

from typing import Any

import grain
import jax
import numpy as np


class Share(grain.IterDataset):
    """Batches of `batch_size` samples, of which this process gets its rows.

    Batch i is samples `i * batch_size` and on. A step cuts it, and each process's share
    of it, into microbatches one after another; so each process has its rows of the
    first microbatch, in process order, then of the second, and so on. A microbatch then
    has the same samples on any number of processes, which counts where its loss is no
    plain mean over samples (a mean over unmasked tokens, say).

    Samples that fill no batch at the end are left out. Reads in the calling thread, and
    only its own rows.

    Args:
        samples: Pytrees of arrays, the same on every process.
        process: (index, count) of the processes.
        num_microbatches: `gradient_accumulation_steps`.

    Raises:
        ValueError: `batch_size` does not divide into microbatches, and each among the
            processes.
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
        parts = np.arange(batch_size).reshape(num_microbatches, count, -1)
        self.rows = parts[:, index].ravel().tolist()

    def __iter__(self) -> "ShareIterator":
        return ShareIterator(self)


class ShareIterator(grain.DatasetIterator):
    """Its state is the number of samples taken by all processes together.

    So it means the same to any number of processes, and to batches of any size.
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
