"""Reads safetensors files in parts; checks headers, which anybody may have written."""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np

from zinf.core.interchange.header import Stored, read_header
from zinf.core.interchange.names import listed
from zinf.core.interchange.tensors import AbstractTensors, first_element
from zinf.core.memory import aligned_empty
from zinf.core.memory.chunk import chunk_shape
from zinf.core.memory.nvme import Drive
from zinf.core.memory.nvme.file import as_bytes
from zinf.core.memory.nvme.open_file import Bytes, Mover
from zinf.core.memory.nvme.request import Request
from zinf.core.memory.storage_error import INTERCHANGE
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.sharding import Box
from zinf.core.text.json_text import from_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
# Threads of the drive read this much of a part each, so that several are in flight.
SPAN_BYTES = 4 * 2**20


@dataclass(frozen=True)
class OpenedFile:
    """A file whose header was read, and how to know that it is the same file still.

    Attributes:
        folder: where the content is: files in Hugging Face's cache are links.
        identity: its device and its number there.
    """

    path: Path
    folder: Path
    identity: tuple[int, int]

    def read(self, start: int, memory: Bytes, mover: Mover) -> None:
        """Fill `memory` from byte `start` on, from the page cache if all is there.

        Other bytes go past it: copying them into it and out took most of the processor
        time of loading a model.
        """
        cached = Mover(
            mover.system, mover.block_bytes, is_direct=False, only_cached=True
        )
        try:
            self._read(start, memory, cached)
        except OSError:  # Whatever it was, the drive is asked again.
            self._read(start, memory, mover)

    def _read(self, start: int, memory: Bytes, mover: Mover) -> None:
        with mover.open(self.path, os.O_RDONLY, memory.size) as file:
            found = file.stat()
            if (found.st_dev, found.st_ino) != self.identity:
                text = "another file has taken its place since it was opened"
                raise INTERCHANGE.error(mover.what, errno.EIO, self.path, text)
            if found.st_size < start + memory.size:
                text = f"the file ends at byte {found.st_size:,}, within the tensor"
                raise INTERCHANGE.error(mover.what, errno.EIO, self.path, text)
            file.read(start, memory)


class SafetensorsFiles(AbstractTensors):
    """The tensors of one file, or of all files of a folder.

    If the folder has an index (`*.safetensors.index.json`), the index must name exactly
    the tensors of the files. Opening reads and checks the headers, and no tensor. Use
    `with`, or call `close`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not a safetensors file, or it contradicts itself or the
            index.
        StorageError: a file cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self._files: dict[str, OpenedFile] = {}
        self._stored: dict[str, Stored] = {}
        self._drives: dict[Path, Drive] = {}
        self._open = ExitStack()
        self._opening = Lock()
        path = Path(path)
        try:
            if path.is_dir():
                self._add_folder(path)
            else:
                self._add(path)
        except BaseException:
            self.close()
            raise
        self.specs = {name: stored.spec for name, stored in self._stored.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def block(self, name: str) -> tuple[int, ...]:
        return chunk_shape(self.specs[name])

    def read(self, name: str, box: Box) -> np.ndarray:
        file, stored = self._files[name], self._stored[name]
        value = aligned_empty(
            tuple(high - low for low, high in box), numpy_dtype(stored.spec.dtype)
        )
        _check_is_run(box, stored.spec.shape)
        first = first_element(box, stored.spec.shape)
        start = stored.start + first * stored.spec.itemsize
        memory = as_bytes(value)
        tasks = [
            partial(file.read, start + low, memory[low : low + SPAN_BYTES])
            for low in range(0, memory.size, SPAN_BYTES)
        ]
        request = Request(f"Cannot read {name!r}", len(tasks), lambda: value)
        self._drive(file).submit("read", request, tasks)
        return request.future.result()

    def _drive(self, file: OpenedFile) -> Drive:
        with self._opening:
            drive = self._drives.get(file.folder)
            if drive is None:
                drive = Drive(file.folder, probe=file.path, advice=INTERCHANGE)
                self._drives[file.folder] = self._open.enter_context(drive)
            return drive

    def _add_folder(self, folder: Path) -> None:
        found = sorted(p.name for p in folder.iterdir() if p.name.endswith(SUFFIX))
        indices = [p for p in folder.iterdir() if p.name.endswith(INDEX_SUFFIX)]
        if len(indices) > 1:
            names = listed(sorted(path.name for path in indices))
            raise ValueError(f"{folder} has several indices: {names}. Name one file.")
        weights = read_index(indices[0]) if indices else None
        files = found if weights is None else sorted(set(weights.values()))
        if not files:
            raise FileNotFoundError(f"{folder} has no {SUFFIX} file.")
        absent = [file for file in files if not os.path.lexists(folder / file)]
        if absent:
            raise FileNotFoundError(
                f"{folder} lacks {listed(absent)}, which {indices[0].name} names. Copy "
                "it there, or get the model again: files that are complete are kept."
            )
        for file in files:
            self._add(folder / file)
        if weights is not None:
            self._check_index(indices[0], weights)

    def _add(self, path: Path) -> None:
        with INTERCHANGE.explained("Cannot read the header", path):
            # Follow links: the files in Hugging Face's cache are links. Refuse anything
            # but a file: opening a pipe would wait.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ValueError(f"{path} is no file.")
            with FileIO(path) as file:
                found, status = read_header(file, path), os.fstat(file.fileno())
        twice = [name for name in found if name in self._stored]
        if twice:
            other = self._files[twice[0]].path
            raise ValueError(f"{listed(twice)} is in {path} and in {other}.")
        self._stored.update(found)
        identity = status.st_dev, status.st_ino
        opened = OpenedFile(path, path.resolve().parent, identity)
        self._files.update(dict.fromkeys(found, opened))

    def _check_index(self, index: Path, weights: Mapping[str, str]) -> None:
        found = {name: file.path.name for name, file in self._files.items()}
        wrong = {n for n, _ in found.items() ^ weights.items()}
        if wrong:
            raise ValueError(
                f"{index} and the files beside it disagree about "
                f"{listed(sorted(wrong))}. Get them again from where they came from."
            )


def read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor; all files are in the folder of the index."""
    with INTERCHANGE.explained("Cannot read the index", path):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_INDEX_BYTES:
            raise ValueError(
                f"{path} is no index: {status.st_size:,} bytes, or no file."
            )
        try:
            weights = from_json(path.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} has no weight_map: it is no index.") from error
    if not isinstance(weights, dict):
        raise ValueError(f"The weight_map of {path} is no JSON object.")
    for file in weights.values():
        is_plain = isinstance(file, str) and "\0" not in file and file not in ("", "..")
        if not is_plain or Path(file).name != file or not file.endswith(SUFFIX):
            raise ValueError(f"The weight_map of {path} names {file!r:.80}, no file.")
    return weights


def _check_is_run(box: Box, shape: tuple[int, ...]) -> None:
    sizes = [high - low for low, high in box]
    cut = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    assert sizes[cut + 1 :] == list(shape[cut + 1 :]), "a part has gaps"
