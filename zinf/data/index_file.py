"""Files of rows of integers, as DeepSpeed's data analyzer writes them (MMIDIDX).

`PATH.idx` has a header, the number of entries of each row, and the rows' positions in
`PATH.bin`, which has the entries. Format of DeepSpeed 0.19.6,
`deepspeed/runtime/data_pipeline/data_sampling/indexed_dataset.py`.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, dtype, number of rows, number of documents
DTYPES = ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8")  # code 1 and up


@dataclass(frozen=True)
class Rows:
    """Rows of integers, which stay on the drive until they are read.

    Attributes:
        flat: the entries of all rows, one after another; a memory map.
        ends: number of entries up to the end of each row, int64.
    """

    flat: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> np.ndarray:
        end = int(self.ends[row])
        start = int(self.ends[row - 1]) if row else 0
        return self.flat[start:end]


def read_rows(path: Path) -> Rows:
    """The rows of the files `path`.idx and `path`.bin.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: they are no such files, or damaged.
    """
    index, data = _with(path, ".idx"), _with(path, ".bin")
    content = np.fromfile(index, np.uint8)
    start = len(MAGIC) + HEADER.size
    if content[: len(MAGIC)].tobytes() != MAGIC or len(content) < start:
        raise ValueError(f"{index} is no index file: it does not begin with {MAGIC!r}.")
    version, code, count, _ = HEADER.unpack(content[len(MAGIC) : start].tobytes())
    if version != 1 or not 1 <= code <= len(DTYPES):
        raise ValueError(
            f"{index} has version {version} and dtype code {code}; version 1 and codes "
            f"1 to {len(DTYPES)} can be read."
        )
    if len(content) < start + 4 * count:
        found = (len(content) - start) // 4
        raise ValueError(
            f"{index} is cut off: it has the sizes of {found:,} of {count:,} rows."
        )
    sizes = content[start : start + 4 * count].view(np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    dtype, total = np.dtype(DTYPES[code - 1]), int(ends[-1]) if count else 0
    nbytes = data.stat().st_size
    if nbytes != total * dtype.itemsize:
        raise ValueError(
            f"{data} has {nbytes:,} bytes, but {index} is about {total:,} entries of "
            f"{dtype.itemsize} bytes. Write both anew: zinf data analyze."
        )
    flat = np.memmap(data, dtype, "r") if total else np.zeros(0, dtype)
    return Rows(flat, ends)


def write_rows(path: Path, flat: np.ndarray, sizes: np.ndarray) -> None:
    """Writes `path`.idx and `path`.bin, with the smallest dtype that holds the entries.

    Args:
        sizes: the number of entries of each row.
    """
    dtype = fitting(int(flat.min(initial=0)), int(flat.max(initial=0)))
    flat.astype(dtype).tofile(_with(path, ".bin"))
    sizes = np.asarray(sizes, np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = (ends - sizes) * dtype.itemsize
    code = DTYPES.index(dtype.str[1:]) + 1
    with _with(path, ".idx").open("wb") as stream:
        stream.write(MAGIC + HEADER.pack(1, code, len(sizes), 2))
        stream.write(sizes.tobytes() + starts.tobytes())
        stream.write(np.array([0, len(sizes)], np.int64).tobytes())


def fitting(low: int, high: int) -> np.dtype:
    """The smallest integer dtype that holds both, as DeepSpeed chooses it."""
    kinds = ("u1", "u2", "u4", "u8") if low >= 0 else ("i1", "i2", "i4", "i8")
    for kind in kinds:
        info = np.iinfo(kind)
        if info.min <= low and high <= info.max:
            return np.dtype(kind)
    raise AssertionError(f"no dtype holds {low} to {high}")


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
