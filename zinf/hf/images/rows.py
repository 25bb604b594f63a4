"""Images beside the tokens of a row that a model reads once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zinf.hf.images.kind import bucket_of
from zinf.hf.images.reader import ImageReader
from zinf.hf.prefill import AbstractRowBeside


@dataclass(frozen=True, eq=False)
class ImagesBeside(AbstractRowBeside):
    """The images of a line, which are read and resized when its rows run.

    Attributes:
        contents: the bytes of their files.
        num_pieces: tiles or patches of all of them.
    """

    reader: ImageReader
    contents: tuple[bytes, ...]
    num_pieces: int
    where: str

    @property
    def shape(self) -> tuple[int]:
        unit = self.reader.model.kind.unit
        return (bucket_of(self.num_pieces, 2 * self.num_pieces, unit),)

    def arrays(self, tokens: Sequence[int], length: int) -> dict[str, np.ndarray]:
        seen = self.reader.see(self.contents, self.where)
        leaves = self.reader.row(seen, np.array(tokens, np.int32), self.where)
        (room,) = self.shape
        return self.reader.model.kind.filled(leaves, room, length)
