"""Records with images as samples, and those as rows of batches."""

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import grain
import numpy as np

from zinf.data.array_file import read_array
from zinf.hf.batch import IGNORED
from zinf.hf.dataset import Samples
from zinf.hf.images.model import ImageModel
from zinf.hf.images.reader import ImageReader
from zinf.hf.images.sources import content_of, in_parts, path_of
from zinf.hf.model import Model
from zinf.hf.records import records
from zinf.hf.samples import Reading, Tokenizing

# Bytes of image files, one after the other; where each ends; and for each sample its
# numbers of images and of pieces.
IMAGES, ENDS, COUNTS = "images.bin", "image_ends.npy", "image_counts.npy"
NO_READER: Any = None


@dataclass(frozen=True)
class SeenReading(Reading):
    """A sample with images.

    Attributes:
        images: the bytes of their files.
        num_pieces: tiles or patches of all of them.
    """

    images: tuple[bytes, ...] = ()
    num_pieces: int = 0


@dataclass(frozen=True)
class ImageTokenizing(Tokenizing):
    """How records with images become samples.

    Attributes:
        reader: of the model.
    """

    reader: ImageReader = field(default=NO_READER, compare=False, kw_only=True)
    takes_images: ClassVar[bool] = True

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
        for line, where, folder in (x for path in paths for x in cls.records(path)):
            for source in in_parts(line, where)[1]:
                file = path_of(source, folder)
                if file is not None:
                    about = file.stat()
                    found.append((str(source), about.st_size, about.st_mtime_ns))
        return found

    def read(self, line: Any, where: str, folder: Path | None = None) -> SeenReading:
        """The sample of a record: tokens, labels and images.

        Args:
            folder: from which paths of images begin.

        Raises:
            ValueError: an image is missing or cannot be read, or has no place in the
                text; the processor is of another model; or see `Tokenizing.read`.
        """
        line, sources = in_parts(line, where)
        images = tuple(
            content_of(x, folder, f"{where}, image {n}")
            for n, x in enumerate(sources, 1)
        )
        seen = self.reader.see(images, where)
        plain = replace(self, tokenizer=self.reader.layout(seen))
        reading = Tokenizing.read(plain, line, where)
        if not reading.samples:
            return SeenReading(())
        ids, labels = reading.samples[0]
        token = self.reader.model.image_token
        labels = [
            IGNORED if word == token else label
            for word, label in zip(ids, labels, strict=True)
        ]
        leaves = self.reader.row(seen, np.array(ids, np.int32), where)
        count = len(leaves["pixel_values"])
        return SeenReading(((ids, labels),), images=images, num_pieces=count)

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
        with (folder / IMAGES).open("wb") as file:

            def keep(reading: SeenReading) -> None:
                for image in reading.images:
                    file.write(image)
                    ends.append(file.tell())
                for _ in reading.samples:
                    counts.extend((len(reading.images), reading.num_pieces))

            yield keep
        np.save(folder / ENDS, np.array(ends, np.int64))
        np.save(folder / COUNTS, np.array(counts, np.int64).reshape(-1, 2))


def most_pieces(folder: Path) -> int:
    """The most tiles or patches that a sample of a folder has."""
    return int(read_array(folder / COUNTS)[:, 1].max(initial=0))


class ImageRows(grain.sources.RandomAccessDataSource):
    """Samples with their images, which are read and resized each time.

    Args:
        samples: of `ImageTokenizing`.
        room: tiles or patches that a row has room for.

    Raises:
        ValueError: a sample has more.
    """

    def __init__(self, samples: Samples, model: ImageModel, room: int) -> None:
        self._samples, self._model, self._room = samples, model, room
        self._reader = ImageReader(model)
        counts = read_array(samples.folder / COUNTS)
        firsts = np.concatenate([[0], np.cumsum(counts[:, 0])])
        self._firsts = firsts[samples.first : samples.first + len(samples) + 1]
        self._ends = np.concatenate([[0], read_array(samples.folder / ENDS)])
        pieces = counts[samples.first : samples.first + len(samples), 1]
        over = np.flatnonzero(pieces > room)
        if len(over):
            number = int(over[0])
            raise ValueError(
                f"Sample {samples.first + number + 1} of the files has "
                f"{pieces[number]:,} {model.kind.pieces} of images, and data.images is "
                f"{room:,}. Raise it, leave it out so that the files decide, or make "
                "images smaller (the settings of the processor)."
            )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, int32 (length,), and `kind.leaves`."""
        row, where = self._samples[index], f"sample {index + 1}"
        seen = self._reader.see(self._images(index), where)
        ids = self._samples.tokens(index)[0]
        leaves = self._reader.row(seen, ids, where)
        return row | self._model.kind.filled(leaves, self._room, self._samples.length)

    def _images(self, index: int) -> list[bytes]:
        first, last = int(self._firsts[index]), int(self._firsts[index + 1])
        found = []
        with (self._samples.folder / IMAGES).open("rb") as file:
            file.seek(self._ends[first])
            for number in range(first, last):
                size = int(self._ends[number + 1] - self._ends[number])
                found.append(file.read(size))
                if len(found[-1]) != size:
                    raise OSError(
                        f"{file.name} was cut short. Delete {self._samples.folder}."
                    )
        return found
