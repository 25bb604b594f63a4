"""Runs a model once over many rows of tokens, in batches of equal shapes.

That is all that scores, classes and vectors need: the model writes nothing. A row runs
in a shape that its own length chooses, so its numbers do not depend on the other rows.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from zinf.core.config import Config
from zinf.core.engine.initialize import ConfigSource
from zinf.core.plan import InfeasibleError
from zinf.core.sharding import Dim
from zinf.data.share import own_rows
from zinf.distributed import AbstractGroup
from zinf.hf.engine import ModelEngine, open_model
from zinf.hf.model import Model
from zinf.inference import ROWS, bucket

# A microbatch has at least `ROWS` rows, and as many tokens as this: with fewer, an
# accelerator waits for its memory.
TOKENS = 512
# Microbatches that pass a layer before the next one is fetched: at least so many, and
# doubled while that is predicted to save at least a tenth of the time of a row.
FEWEST, MOST = 8, 256
WORTHWHILE = 1.1


class AbstractRowBeside(ABC):
    """What a function reads beside the tokens of a row, made when the row runs."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Rows run in one batch if this is equal, and their numbers of tokens."""

    @abstractmethod
    def arrays(self, tokens: Sequence[int], length: int) -> Mapping[str, np.ndarray]:
        """Arrays of a row by name.

        Args:
            tokens: `input_ids` of the row.
            length: the number of tokens that the row is filled up to.
        """


@dataclass(frozen=True)
class Row:
    """The input of a function for one text: tokens, and other arrays.

    Attributes:
        tokens: whole numbers, one a token, by name; all are as long.
        more: other arrays by name, which become a dim of the batch smaller.
        beside: makes further ones.
    """

    tokens: Mapping[str, Sequence[int]]
    more: Mapping[str, np.ndarray] = field(default_factory=dict)
    beside: AbstractRowBeside | None = None

    @property
    def length(self) -> int:
        return max(map(len, self.tokens.values()))

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes of the arrays beside tokens."""
        beside = () if self.beside is None else self.beside.shape
        return beside, *sorted((name, x.shape) for name, x in self.more.items())

    def arrays(self, length: int) -> dict[str, np.ndarray]:
        """The arrays beside tokens, of a row of so many tokens."""
        found = dict(self.more)
        if self.beside is not None:
            found |= self.beside.arrays(self.tokens["input_ids"], length)
        return found


class Prefill:
    """A function of a model's parameters and of rows, for rows of any lengths.

    The weights are read when the first rows come, and again if later ones are longer.

    Args:
        function: `(params, batch) -> arrays`, a pytree with a row for each row of the
            batch. The batch has what is in the rows, int32 (rows, tokens) and so on.
        config: as for `open_model`.
        padding: what fills rows behind their tokens, by name; 0 for others.
        longest: no batch has more tokens a row; None: any number.
        batch_size: rows that pass a layer before the next one is fetched; None: as many
            as saturate the machine, by the engine's plans.
    """

    def __init__(
        self,
        model: Model,
        function: Callable[[Any, Mapping[str, jax.Array]], Any],
        config: ConfigSource = None,
        *,
        padding: Mapping[str, int] | None = None,
        longest: int | None = None,
        batch_size: int | None = None,
        group: AbstractGroup | None = None,
    ) -> None:
        self.model, self._function, self._config = model, function, Config.load(config)
        self._padding, self._longest = dict(padding or {}), longest
        self._batch_size, self._group = batch_size, group
        self._engine: ModelEngine | None = None
        self._applied: Callable = function
        self._length = 0
        self._saturating: dict[tuple, int] = {}

    def __enter__(self) -> "Prefill":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights; the next rows read them again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def rows(self, length: int) -> int:
        """Rows of a microbatch whose rows have so many tokens."""
        rows = max(ROWS, TOKENS // length)
        return rows if self._batch_size is None else min(self._batch_size, ROWS)

    def _whole_rows(self, length: int) -> int:
        """At least so many rows, which devices that divide examples divide evenly."""
        count = self.engine(length).planner.rule.size(Dim.BATCH)
        return -(-self.rows(length) // count) * count

    def bucket(self, length: int) -> int:
        """The number of tokens that rows of a length are filled up to."""
        filled = bucket(length)
        return filled if self._longest is None else min(filled, self._longest)

    def engine(self, length: int) -> ModelEngine:
        """An engine with room for rows of this length beside the weights."""
        length = self.bucket(length)
        if self._engine is None or length > self._length:
            self.close()
            shape = {"rows": self.rows(length), "length": length}
            self._engine = open_model(
                self.model, self._config, **shape, group=self._group
            )
            self._length = length
            self._saturating = {}
            self._applied = self._engine.applied(self._function)
        return self._engine

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """The function's outputs for each row, in the order of the rows."""
        groups: dict[tuple, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            groups[self.bucket(row.length), *row.shapes].append(number)
        found: list[Any] = [None] * len(rows)
        # The longest first, as the engine is opened for them.
        for shape in sorted(groups, reverse=True):
            numbers, engine = groups[shape], self.engine(shape[0])
            size, share = self._whole_rows(shape[0]), engine.planner.batch_share
            most = self._most(shape, [rows[i] for i in numbers[:size]], len(numbers))
            for first in range(0, len(numbers), most * size):
                some = numbers[first : first + most * size]
                count = -(-len(some) // size)
                batch = self._batch([rows[i] for i in some], count * size, shape[0])
                own = own_rows(batch, share)
                outputs = engine.apply(self._applied, own, num_microbatches=count)
                for place, number in enumerate(some):
                    found[number] = jax.tree.map(lambda x, i=place: x[i], outputs)
        return found

    def _most(self, shape: tuple, some: Sequence[Row], num_rows: int) -> int:
        """Number of microbatches that pass a layer together, of `num_rows` rows.

        Args:
            some: rows of the shape, at most a microbatch.
        """
        size = self._whole_rows(shape[0])
        if self._batch_size is not None:
            return -(-self._batch_size // size)
        engine, most = self.engine(shape[0]), self._saturating.get(shape, FEWEST)

        def seconds(count: int) -> float:
            batch = self._batch(some, count * size, shape[0])
            batch = own_rows(batch, engine.planner.batch_share)
            spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
            return engine.pass_seconds(self._applied, spec, num_microbatches=count)

        while most < MOST and 2 * most * size <= num_rows:
            try:
                if seconds(2 * most) * WORTHWHILE > 2 * seconds(most):
                    break
            except InfeasibleError:
                break
            most *= 2
        self._saturating[shape] = most
        return most

    def _batch(
        self, rows: Sequence[Row], count: int, length: int
    ) -> dict[str, np.ndarray]:
        """A batch of so many rows; the first one is repeated where there are fewer."""
        whole = [*rows, *[rows[0]] * (count - len(rows))]
        batch: dict[str, np.ndarray] = {}
        for name in rows[0].tokens:
            fill = self._padding.get(name, 0)
            batch[name] = np.full((count, length), fill, np.int32)
            for place, row in enumerate(whole):
                batch[name][place, : len(row.tokens[name])] = row.tokens[name]
        made = [row.arrays(length) for row in rows]
        made += made[:1] * (count - len(rows))
        return batch | {name: np.stack([x[name] for x in made]) for name in made[0]}
