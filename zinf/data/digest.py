"""Digests of the content of files, by which caches and resumed runs know them.

Size and time do not tell files apart: `cp -p`, `rsync -t` and archives give a new file
the time that the old one had.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from xxhash import xxh3_128

BLOCK_BYTES = 2**20
# `sampled_digest` reads files up to this size whole, and of others as many bytes.
SAMPLED_BYTES = 2**30


def file_digest(path: Path) -> str:
    """A digest of the whole content of a file, in hexadecimal."""
    return _digest(path, None, _identity(path))


def sampled_digest(path: Path) -> str:
    """A digest of the size of a file and of its content, up to 1 GiB of it.

    Of a larger file 1024 blocks of 1 MiB are read, evenly spread, with the first and
    the last. That is enough for weights: training changes all of a tensor, and every
    tensor longer than the distance of two blocks is in one. It misses an edit of less,
    so caches of data have `file_digest`, but a check at each start cannot read
    terabytes.
    """
    return _digest(path, SAMPLED_BYTES, _identity(path))


def _identity(path: Path) -> tuple[int, ...]:
    """Numbers of a file that change when its content does, while this process runs.

    The time of the change (ctime) is set by the system alone, so a digest need not be
    computed twice for it. It says nothing from one run to the next: it also changes
    when a file is moved or linked.
    """
    about = path.stat()
    return (
        about.st_dev,
        about.st_ino,
        about.st_size,
        about.st_mtime_ns,
        about.st_ctime_ns,
    )


@lru_cache(maxsize=4096)
def _digest(path: Path, most_bytes: int | None, identity: tuple[int, ...]) -> str:
    total = xxh3_128()
    with path.open("rb", buffering=0) as stream:
        size = path.stat().st_size
        total.update(f"{size}:".encode())
        for start in _starts(size, most_bytes):
            stream.seek(start)
            total.update(stream.read(BLOCK_BYTES))
    return total.hexdigest()


def _starts(size: int, most_bytes: int | None) -> Iterator[int]:
    """The positions in a file at which the blocks that are read begin."""
    if most_bytes is None or size <= most_bytes:
        yield from range(0, size, BLOCK_BYTES)
        return
    count = most_bytes // BLOCK_BYTES
    for number in range(count):
        yield number * (size - BLOCK_BYTES) // (count - 1)
