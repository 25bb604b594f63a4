"""Reads a manifest and checks every entry: anybody may have written the file."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from zinf.checkpoint.grid import Grid
from zinf.checkpoint.manifest import (
    FILE,
    FORMAT_VERSION,
    Manifest,
    StoredArray,
    checksum_of,
    damaged,
    not_found,
)
from zinf.checkpoint.place import Place
from zinf.core.memory import StorageError
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArrayId, ArraySpec
from zinf.core.text.json_text import from_json

# A manifest of 256 MiB has the checksums of about 200 TB of arrays.
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_ARRAY_BYTES = 2**60
MAX_CHUNK_BYTES = 2**30
MAX_DIMS = 32
CHECKSUM = re.compile("[0-9a-f]{16}")
# Numbers only. NumPy accepts other names too: of pointers, and strings of any length.
DTYPES = frozenset(
    "bool int2 uint2 int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
    "float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 "
    "float32 float64 complex64 complex128".split()
)


class _Wrong(Exception):
    """A manifest has an impossible value; the message says which."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`, with its checksum verified and every entry checked.

    Raises:
        FileNotFoundError: there is no manifest: `directory` is not a checkpoint, or the
            save was cut short.
        StorageError: the manifest cannot be read, is damaged or has impossible values.
        ValueError: the manifest has another format.
    """
    path = directory / FILE
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise damaged(path, "it is a link, or larger than any manifest")
        encoded = path.read_bytes()
    except FileNotFoundError as error:
        raise not_found(directory) from error
    except StorageError:
        raise
    except OSError as error:
        raise CHECKPOINT.failure("Cannot read the manifest", path, error) from error
    return parse_manifest(encoded, directory)


def parse_manifest(encoded: bytes, directory: Place) -> Manifest:
    """The manifest of the checkpoint `directory` from the content of its file.

    Raises:
        StorageError: the manifest is damaged or has impossible values.
        ValueError: the manifest has another format.
    """
    path = directory / FILE
    content = _decoded(encoded, directory)
    try:
        arrays = [_entry(item) for item in _typed(content, "arrays", list)]
        names = dict(arrays)
        if len(names) != len(arrays):
            raise _Wrong("an array is named twice")
        scalars = _typed(content, "scalars", dict)
    except _Wrong as error:
        raise damaged(path, str(error)) from error
    written_by = str(content.get("zinf_version"))
    return Manifest(names, scalars, content.get("data"), written_by)


def _decoded(encoded: bytes, directory: Place) -> dict[str, Any]:
    """The JSON of a manifest, after its format and its checksum were verified."""
    path = directory / FILE
    try:
        content = from_json(encoded.decode("utf-8"))
        stored_version = content["format_version"]
        is_sound = content.pop("checksum", None) == checksum_of(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, "it is no JSON of a manifest") from error
    # Check the format first: another format may have another kind of checksum.
    if stored_version != FORMAT_VERSION:
        raise ValueError(_refusal(directory, content))
    if not is_sound:
        raise damaged(path, "its content does not match its checksum")
    return content


def _refusal(directory: Place, content: Mapping[str, Any]) -> str:
    """The message for a checkpoint of another format."""
    # Cut both values: in a hostile manifest each may have megabytes.
    found = f"{content['format_version']!r:.40}"
    written_by = f"{content.get('zinf_version')!s:.40}"
    return (
        f"Checkpoint {directory} has format {found}, written by zinf {written_by}; "
        f"this zinf reads only format {FORMAT_VERSION}. Continue the run with that "
        "version of zinf, or export the weights there (`zinf checkpoint export`) and "
        "import them here (`zinf checkpoint import`)."
    )


def _entry(item: Any) -> tuple[ArrayId, StoredArray]:
    array, spec = _name(item), _spec(item)
    chunk = _sizes(item, "chunk", low=1)
    if len(chunk) != len(spec.shape):
        raise _Wrong(f"chunks of {array} have {len(chunk)} dims, it {len(spec.shape)}")
    grid = Grid(spec, chunk)
    if not 0 < grid.chunk_bytes <= MAX_CHUNK_BYTES:
        raise _Wrong(f"chunks of {array} have {grid.chunk_bytes:,} bytes")
    checksums = _typed(item, "checksums", list)
    if len(checksums) != grid.num_chunks:
        raise _Wrong(
            f"{array} has {grid.num_chunks} chunks, but {len(checksums)} checksums"
        )
    metadata = _checksum(_typed(item, "metadata", str))
    return array, StoredArray(grid, metadata, tuple(map(_checksum, checksums)))


def _name(item: Any) -> ArrayId:
    kind, path = _typed(item, "role", str), _typed(item, "path", str)
    try:
        f"{kind}/{path}".encode()
    except UnicodeEncodeError as error:
        raise _Wrong("a name is no text") from error
    try:
        return ArrayId.persistent(kind, path)
    except ValueError as error:
        raise _Wrong(str(error)) from error


def _spec(item: Mapping[str, Any]) -> ArraySpec:
    dtype = _typed(item, "dtype", str)
    if dtype not in DTYPES:
        raise _Wrong(f"there is no dtype {dtype[:40]!r}")
    itemsize = numpy_dtype(dtype).itemsize
    shape = _sizes(item, "shape", low=0)
    if prod(shape) * itemsize > MAX_ARRAY_BYTES:
        raise _Wrong(f"an array of shape {list(shape)} is larger than any drive")
    return ArraySpec(shape, dtype, itemsize)


def _sizes(item: Mapping[str, Any], key: str, *, low: int) -> tuple[int, ...]:
    found = _typed(item, key, list)
    if len(found) > MAX_DIMS:
        raise _Wrong(f"{key} has {len(found)} dims")
    for size in found:
        if type(size) is not int or not low <= size <= MAX_ARRAY_BYTES:
            raise _Wrong(f"{key} has a size {size!r:.40}")
    return tuple(found)


def _checksum(text: Any) -> int:
    if not isinstance(text, str) or CHECKSUM.fullmatch(text) is None:
        raise _Wrong(f"there is a checksum {text!r:.40}")
    return int(text, 16)


def _typed(item: Any, key: str, kind: type) -> Any:
    found = item.get(key) if isinstance(item, dict) else None
    if not isinstance(found, kind):
        raise _Wrong(f"{key} is missing, or no {kind.__name__}")
    return found
