"""What a family of models needs of images: arrays of a row, and how a module runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
import transformers

Arrays = Mapping[str, np.ndarray]
Specs = dict[str, jax.ShapeDtypeStruct]


def sizes(room: int, unit: int = 1) -> list[int]:
    """Buckets: multiples of `unit` up to `room`, each at most twice the one before.

    They are 1, 2, 3, 4, 6, 8, 12, ... units, and `room`, the last one.
    """
    found, power = [], unit
    while power < room:
        found += [power, power + power // 2] if power > unit else [power]
        power *= 2
    return [size for size in found if size < room and size % unit == 0] + [room]


def bucket_of(count: int, room: int, unit: int = 1) -> int:
    """The smallest bucket with room for `count`, which is at most `room`."""
    return next(size for size in sizes(room, unit) if size >= count)


@dataclass(frozen=True)
class AbstractKind(ABC):
    """How the models of a family read images.

    A row of a batch has room for some number of pieces: tiles, which are images of one
    size, or patches, as small as those of the tower. Rows with fewer are filled up with
    pieces that no token sees.

    Attributes:
        config: of the model.
        tower: name of the module of images, in the model below the output head.
    """

    config: transformers.PretrainedConfig
    tower: str

    # What a piece is called, in the plural.
    pieces = "tiles"

    @property
    @abstractmethod
    def leaves(self) -> tuple[str, ...]:
        """Names of the leaves of a batch that images add to those of text."""

    @abstractmethod
    def specs(self, rows: int, room: int, length: int) -> Specs:
        """Shapes and dtypes of those leaves, for so many pieces and tokens a row."""

    @abstractmethod
    def num_made(self, images: Mapping[str, Any]) -> int:
        """Number of pieces that the image processor of `transformers` gave.

        Args:
            images: as for `read`.

        Raises:
            ValueError: they are not what the model takes; begins with "the processor".
        """

    @abstractmethod
    def read(self, images: Mapping[str, Any], ids: np.ndarray, module: Any) -> Arrays:
        """The leaves of one row, without a dim of rows and without filling.

        Args:
            images: what the image processor of `transformers` gave for the images of
                the row; empty if there are none.
            ids: tokens of the row, int32 (tokens,).
            module: of the model, whose functions of numbers alone may be called.

        Raises:
            ValueError: they are not what the model takes; begins with "the processor".
        """

    @abstractmethod
    def filled(self, leaves: Arrays, room: int, length: int) -> dict[str, np.ndarray]:
        """The leaves of one row, filled up to so many pieces and tokens."""

    @abstractmethod
    def cut(self, batch: Arrays, room: int) -> dict[str, np.ndarray]:
        """A batch without the pieces behind the first `room` of each row."""

    @abstractmethod
    def num_given(self, leaves: Arrays) -> np.ndarray:
        """Number of pieces of each row that are no filling, (rows,)."""

    @property
    @abstractmethod
    def tokens_of(self) -> tuple[int, int]:
        """Image tokens, and the number of pieces that have so many together."""

    @property
    def sees_ahead(self) -> bool:
        """Whether image tokens see later ones of their image."""
        return False

    @property
    def unit(self) -> int:
        """Buckets of pieces are multiples of this."""
        return 1

    @abstractmethod
    def inputs(
        self, leaves: Mapping[str, jax.Array], dtype: Any
    ) -> dict[str, jax.Array]:
        """What the module gets in the place of the leaves, by names of arguments."""

    def types(self, is_image_BT: jax.Array) -> dict[str, jax.Array]:
        """What the module gets besides, by names of arguments."""
        del is_image_BT
        return {}

    @abstractmethod
    def within(
        self, inner: torch.nn.Module, leaves: Mapping[str, jax.Array]
    ) -> AbstractContextManager[Any]:
        """A context in which the module reads images of static shapes.

        Args:
            inner: the model below the output head.
        """

    def room(self, leaves: Mapping[str, Any]) -> int:
        """The number of pieces that rows of a batch have room for."""
        return leaves["pixel_values"].shape[1]

    def num_pieces(self, num_tokens: np.ndarray) -> np.ndarray:
        """Number of pieces that so many image tokens of a row need."""
        tokens, pieces = self.tokens_of
        return -(-num_tokens // tokens) * pieces
