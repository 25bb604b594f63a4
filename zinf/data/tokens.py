"""Many files as one sequence of tokens, which can be read at any position."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from zinf.data.digest import sampled_digest

SEPARATOR = 0  # the byte after each text; text does not contain it


@dataclass(frozen=True)
class Part:
    """The tokens of one file.

    Attributes:
        dtype: dtype of the tokens in the file; uint8 for text.
        offset_bytes: position of the first token in the file.
        is_closed: whether a separator follows the tokens. It is not in the file.
    """

    path: Path
    num_tokens: int
    dtype: np.dtype
    offset_bytes: int = 0
    is_closed: bool = False

    def __len__(self) -> int:
        return self.num_tokens + self.is_closed

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` up to `stop`, int32 (stop - start,), read from the drive.

        Raises:
            OSError: The file cannot be read, or is shorter than it was.
            ValueError: A token does not fit int32; as int32 it would be another one.
        """
        end = min(stop, self.num_tokens)
        size = self.dtype.itemsize
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(self.offset_bytes + start * size)
            content = stream.read((end - start) * size)
        if len(content) != (end - start) * size:
            raise OSError(
                f"{self.path} had {self.num_tokens:,} tokens when the run started and "
                f"now ends before token {end:,}. Leave data as it is during a run."
            )
        raw = np.frombuffer(content, self.dtype)
        found = raw.astype(np.int32)
        if not np.can_cast(self.dtype, np.int32) and (found != raw).any():
            first = int(np.argmax(found != raw))
            raise ValueError(
                f"{self.path} has the token {raw[first]} of dtype {self.dtype} at "
                f"position {start + first:,}, and tokens are at most "
                f"{np.iinfo(np.int32).max:,}. Write the file anew; or data.bin_dtype "
                "is not the dtype that a .bin file was written with."
            )
        return np.append(found, np.int32(SEPARATOR)) if stop > end else found


class Tokens:
    """The tokens of several files, one file after another; none is kept in memory."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(part for part in parts if len(part))
        # Number of tokens up to the end of each part.
        self._ends = list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def digest(self) -> str:
        """A digest of the files and of how they are read; see `sampled_digest`."""
        total = xxh3_128()
        for part in self.parts:
            about = part.num_tokens, str(part.dtype), part.offset_bytes, part.is_closed
            total.update(f"{about}{sampled_digest(part.path)}".encode())
        return total.hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` up to `stop`, int32 (stop - start,)."""
        found = []
        number = bisect_right(self._ends, start)
        while start < stop:
            part, end = self.parts[number], self._ends[number]
            begin = end - len(part)
            found.append(part.read(start - begin, min(stop, end) - begin))
            start, number = end, number + 1
        return np.concatenate(found) if found else np.zeros(0, np.int32)


def text_part(path: Path) -> Part:
    """The bytes of a text file, with a separator after them."""
    return Part(path, path.stat().st_size, np.dtype(np.uint8), is_closed=True)


def array_part(path: Path, *, dtype: str) -> Part:
    """The tokens of a NumPy file, or of a raw array of `dtype` as nanoGPT writes it.

    Raises:
        ValueError: A NumPy file is damaged, has no integers or is stored by columns; or
            the size of a raw file is no multiple of the item size.
    """
    if path.suffix.lower() == ".npy":
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            # Such as of an array of Python objects: it is pickled, which runs code.
            raise ValueError(
                f"{path} is no NumPy file of integers: {error} Write it with np.save "
                "of an array of integers."
            ) from error
        if array.dtype.kind not in "iu":
            raise ValueError(
                f"{path} has numbers of dtype {array.dtype}, and tokens are integers."
            )
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{path} is stored by columns. Save np.ascontiguousarray of it."
            )
        return Part(path, array.size, array.dtype, array.offset)
    raw, nbytes = np.dtype(dtype), path.stat().st_size
    if nbytes % raw.itemsize:
        raise ValueError(
            f"{path} has {nbytes:,} bytes, which is no whole number of {dtype}. Set "
            "data.bin_dtype to the dtype that it was written with."
        )
    return Part(path, nbytes // raw.itemsize, raw)
