"""The batches of a training run, with a position that can be saved."""

from collections.abc import Iterable
from typing import Any

import grain

from zinf.data import AbstractForeseen


class Batches:
    """The batches of a training run, with a position that can be saved."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._iterator = iter(source)
        self._ahead: list[Any] = []

    def peek(self) -> Any:
        """The next batch, which `next` still returns afterwards, or its shapes."""
        if isinstance(self._iterator, AbstractForeseen):
            shapes = self._iterator.first()
            if shapes is not None:
                return shapes
        try:
            self._ahead = [next(self)]
        except StopIteration:
            raise ValueError(
                "train_data has no batch. Give more data, or a smaller batch."
            ) from None
        return self._ahead[0]

    def largest(self) -> Any:
        """The next batch, or the shapes of the largest one that comes; peek before."""
        if isinstance(self._iterator, AbstractForeseen):
            return self._iterator.whole()
        return self._ahead[0]

    def coming(self, num_steps: int) -> list[Any]:
        """Shapes of the batches of the next steps, if they change."""
        if isinstance(self._iterator, AbstractForeseen):
            return self._iterator.coming(num_steps)
        return []

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._iterator)

    def state(self) -> Any:
        """The position for `resume`, as JSON or bytes. No peeked batch may be left."""
        if isinstance(self._iterator, grain.DatasetIterator | grain.DataLoaderIterator):
            return self._iterator.get_state()
        return None

    def resume(self, state: Any, num_steps: int) -> None:
        """Continue at the position `state`, or after `num_steps` batches."""
        if isinstance(self._iterator, grain.DatasetIterator | grain.DataLoaderIterator):
            self._ahead.clear()
            self._iterator.set_state(state)
            return
        for _ in range(num_steps):
            next(self)
