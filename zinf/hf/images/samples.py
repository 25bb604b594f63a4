"""Records with images as samples, and those as rows of batches."""

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from zinf.data.array_file import read_array
from zinf.hf.batch import IGNORED
from zinf.hf.dataset import Samples
from zinf.hf.images.model import ImageModel, check_pieces
from zinf.hf.images.reader import ImageReader
from zinf.hf.images.sources import path_of, sources_of
from zinf.hf.model import Model
from zinf.hf.objectives.kto import LabelledTokenizing
from zinf.hf.objectives.reward import RatedTokenizing
from zinf.hf.pairs import PairTokenizing
from zinf.hf.records import records
from zinf.hf.samples import Reading, Tokenizing

# Bytes of image files, one after the other; where each ends; and for each sample the
# number of its first image, and its numbers of images and of pieces.
IMAGES, ENDS, COUNTS = "images.bin", "image_ends.npy", "image_counts.npy"
NO_READER: Any = None


@dataclass(frozen=True)
class Pictures:
    """The images of a sample.

    Attributes:
        contents: the bytes of their files.
        num_pieces: tiles or patches of all of them.
    """

    contents: tuple[bytes, ...]
    num_pieces: int


@dataclass(frozen=True)
class ImageTokenizing(Tokenizing):
    """How records with images become samples.

    Attributes:
        reader: of the model.
    """

    reader: ImageReader = field(default=NO_READER, compare=False, kw_only=True)

    @classmethod
    def of(cls, model: Model, **settings: Any) -> Self:
        assert isinstance(model, ImageModel)
        return super().of(model, reader=ImageReader(model), **settings)

    @property
    def settings(self) -> list[Any]:
        return [x for x in super().settings if x[0] != "reader"]

    @classmethod
    def records(cls, path: Path) -> Iterator[tuple[Any, ...]]:
        """As `records`, with the folder from which paths of images begin."""
        yield from ((*record, path.parent) for record in records(path))

    @classmethod
    def others(cls, paths: Sequence[Path]) -> list[tuple[str, int, int]]:
        """See `Tokenizing.others`: the image files."""
        found = []
        for line, _, folder in (x for path in paths for x in cls.records(path)):
            for source in sources_of(line):
                file = path_of(source, folder)
                if file is not None:
                    about = file.stat()
                    found.append((str(source), about.st_size, about.st_mtime_ns))
        return found

    def check_kind(self, line: Any, where: str) -> None:
        """See `Tokenizing.check_kind`: images are read."""

    def read(self, line: Any, where: str, folder: Path | None = None) -> Reading:
        """The sample of a record, with its `Pictures` beside it.

        Args:
            folder: from which paths of images begin.

        Raises:
            ValueError: an image is missing or cannot be read, or has no place in the
                text; the processor is of another model; or see `Tokenizing.read`.
        """
        line, images, seen = self.reader.read(line, where, folder)
        plain = replace(self, tokenizer=self.reader.layout(seen))
        reading = super(ImageTokenizing, plain).read(line, where)
        if not reading.samples:
            return reading
        ids, labels = reading.samples[0]
        token = self.reader.model.image_token
        labels = [
            IGNORED if word == token else label
            for word, label in zip(ids, labels, strict=True)
        ]
        leaves = self.reader.row(seen, np.array(ids, np.int32), where)
        pictures = Pictures(images, len(leaves["pixel_values"]))
        return replace(reading, samples=((ids, labels),), beside=(pictures,))

    def is_cut(self, length: int, where: str) -> bool:
        """See `Tokenizing.is_cut`; samples with images are not cut."""
        if super().is_cut(length, where):
            raise ValueError(
                f"{where}: the sample has {length:,} tokens, and data.sequence_length "
                f"is {self.sequence_length:,}. Where samples have images none is cut, "
                "as an image would lose tokens: raise it, or set data.too_long to drop."
            )
        return False

    @contextmanager
    def beside(self, folder: Path) -> Generator[Callable[[Any], None], None, None]:
        """See `Tokenizing.beside`: writes the images."""
        ends, counts = array("q"), array("q")
        before: tuple[bytes, ...] = ()
        with (folder / IMAGES).open("wb") as file:

            def keep(reading: Reading) -> None:
                nonlocal before
                for pictures in reading.beside:
                    images = pictures.contents
                    # Both answers of a pair have the same ones, which are kept once.
                    if images != before:
                        for image in images:
                            file.write(image)
                            ends.append(file.tell())
                    first = len(ends) - len(images)
                    counts.extend((first, len(images), pictures.num_pieces))
                    before = images

            yield keep
        np.save(folder / ENDS, np.array(ends, np.int64))
        np.save(folder / COUNTS, np.array(counts, np.int64).reshape(-1, 3))


def most_pieces(folder: Path) -> int:
    """The most tiles or patches that a sample of a folder has."""
    return int(read_array(folder / COUNTS)[:, 2].max(initial=0))


@dataclass(frozen=True)
class ImagePairTokenizing(PairTokenizing, ImageTokenizing):
    """How records with images, `chosen` and `rejected` become two samples each."""


@dataclass(frozen=True)
class ImageRatedTokenizing(RatedTokenizing, ImageTokenizing):
    """As `ImagePairTokenizing`, with a margin."""


@dataclass(frozen=True)
class ImageLabelledTokenizing(LabelledTokenizing, ImageTokenizing):
    """How records with images, a completion and its label become two samples each."""

    def is_cut(self, length: int, where: str) -> bool:
        """See `Tokenizing.is_cut`.

        Only completions of other lines are cut here. The images are in the prompt, for
        which there is room beside its own completion.
        """
        return Tokenizing.is_cut(self, length, where)


class ImageSamples(Samples):
    """Samples with their images, which are read and resized each time.

    Args:
        folder: made by `tokenized`, with an `ImageTokenizing`.
        room: tiles or patches that a row has room for.
        where: see `Samples`.

    Raises:
        ValueError: a sample has more.
    """

    def __init__(self, folder: Path, model: Model, *, room: int, **where: Any) -> None:
        super().__init__(folder, **where)
        assert isinstance(model, ImageModel)
        self._model, self._room = model, room
        self._reader = ImageReader(model)
        self._counts = read_array(folder / COUNTS)[self.first :][: len(self)]
        self._image_ends = np.concatenate([[0], read_array(folder / ENDS)])
        pieces = self._counts[:, 2]
        for over in np.flatnonzero(pieces > room).tolist():
            sample = f"Sample {self.first + over + 1} of the files"
            check_pieces(model, int(pieces[over]), room, sample)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, int32 (length,), and `kind.leaves`."""
        where = f"sample {index + 1}"
        seen = self._reader.see(self._images(index), where)
        leaves = self._reader.row(seen, self.tokens(index)[0], where)
        filled = self._model.kind.filled(leaves, self._room, self.length)
        return super().__getitem__(index) | filled

    def _images(self, index: int) -> list[bytes]:
        first, count, _ = map(int, self._counts[index])
        found = []
        with (self.folder / IMAGES).open("rb") as file:
            file.seek(self._image_ends[first])
            for number in range(first, first + count):
                size = int(self._image_ends[number + 1] - self._image_ends[number])
                found.append(file.read(size))
                if len(found[-1]) != size:
                    raise OSError(f"{file.name} was cut short. Delete {self.folder}.")
        return found
