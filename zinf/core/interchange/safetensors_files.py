"""Reads safetensors files in parts; checks headers, which anybody may have written."""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
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
from zinf.core.memory.storage_error import INTERCHANGE
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.sharding import Box
from zinf.core.text.json_text import from_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000


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
        self._files: dict[str, tuple[Path, FileIO]] = {}
        self._stored: dict[str, Stored] = {}
        self._open = ExitStack()
        self._reading = Lock()
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
        path, file = self._files[name]
        stored = self._stored[name]
        value = aligned_empty(
            tuple(high - low for low, high in box), numpy_dtype(stored.spec.dtype)
        )
        _check_is_run(box, stored.spec.shape)
        first = first_element(box, stored.spec.shape)
        start = stored.start + first * stored.spec.itemsize
        left = value.reshape(-1).view(np.uint8).data
        what = f"Cannot read {name!r}"
        # The lock keeps `seek` and `readinto` together: Windows has no `os.pread`.
        with self._reading:
            while left:
                with INTERCHANGE.explained(what, path):
                    file.seek(start)
                    count = file.readinto(left)
                if not count:
                    found = f"the file ends at byte {start:,}, within the tensor"
                    raise INTERCHANGE.error(what, errno.EIO, path, found)
                left, start = left[count:], start + count
        return value

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
            file = self._open.enter_context(FileIO(path))
            found = read_header(file, path)
        twice = [name for name in found if name in self._stored]
        if twice:
            other = self._files[twice[0]][0]
            raise ValueError(f"{listed(twice)} is in {path} and in {other}.")
        self._stored.update(found)
        self._files.update(dict.fromkeys(found, (path, file)))

    def _check_index(self, index: Path, weights: Mapping[str, str]) -> None:
        found = {name: path.name for name, (path, _) in self._files.items()}
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
