"""The header of a safetensors file: names, dtypes, shapes and places of its tensors.

A file has the length of its header in 8 bytes, the header in JSON, and the bytes of the
tensors, little-endian, in C order and without gaps:
https://github.com/huggingface/safetensors. To write a file, the safetensors library
needs all tensors of the file in memory, so zinf writes and reads the format itself. A
test compares the files of both.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from zinf.core.memory.host.aligned import PAGE_BYTES
from zinf.core.program import ArraySpec

DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
CODES = {dtype: code for code, (dtype, _) in DTYPES.items()}
METADATA = "__metadata__"
LENGTH_BYTES = 8
# The largest header that the safetensors library accepts.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 32
MAX_NUMEL = 2**62


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `start` is the position of its first byte in the file."""

    spec: ArraySpec
    start: int


def ordered(specs: Mapping[str, ArraySpec]) -> list[str]:
    """Names by falling itemsize, so that each tensor is aligned to its itemsize."""
    return sorted(specs, key=lambda name: -specs[name].itemsize)


def write_header(
    specs: Mapping[str, ArraySpec], names: Iterable[str], metadata: Mapping[str, str]
) -> bytes:
    """The bytes before the tensors; the tensors must follow in the order of `names`.

    Raises:
        ValueError: safetensors has no such dtype, or a tensor has the name of the
            metadata.
    """
    content: dict[str, Any] = {METADATA: dict(metadata)}
    start = 0
    for name in names:
        spec = specs[name]
        if name == METADATA:
            raise ValueError(f"No tensor can be called {METADATA!r}. Give it a name.")
        if spec.dtype not in CODES:
            raise ValueError(
                f"{name!r} is {spec.dtype}, which safetensors files do not have. "
                f"Choose one of {', '.join(CODES)}."
            )
        content[name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
        start += spec.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    # Pad to a whole page: O_DIRECT writes from there without copying.
    text += b" " * (-(LENGTH_BYTES + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: BinaryIO, path: Path) -> dict[str, Stored]:
    """The tensors of a file, checked to fill it without gaps or overlaps.

    Raises:
        ValueError: the file is not a safetensors file, or its header contradicts itself
            or the size of the file.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise _refused(path, f"it has {size:,} bytes, and a header of {length:,}")
    try:
        text = file.read(length).decode("utf-8")
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"its header is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise _refused(path, "its header is no JSON object")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict):
        raise _refused(path, f"its {METADATA} is no JSON object")
    start = LENGTH_BYTES + length
    found = {n: _entry(n, entry, start, path) for n, entry in content.items()}
    end = start
    for name, stored in sorted(found.items(), key=lambda item: item[1].start):
        if stored.spec.nbytes and stored.start != end:
            raise _refused(path, f"{name!r} overlaps another tensor, or follows a gap")
        end += stored.spec.nbytes
    if end != size:
        raise _refused(path, f"its tensors end at byte {end:,} and it at {size:,}")
    return found


def _entry(name: str, entry: Any, start: int, path: Path) -> Stored:
    """One tensor of a header, after every value of its entry was checked."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= {
        *entry
    }:
        raise _refused(path, f"{name!r} lacks a dtype, a shape or offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise _refused(path, f"{name!r} has a dtype {code!r:.40}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or prod(shape) > MAX_NUMEL:
        raise _refused(path, f"{name!r} has a shape {shape!r:.80}")
    dtype, itemsize = DTYPES[code]
    spec = ArraySpec(tuple(shape), dtype, itemsize)
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _refused(path, f"{name!r} has offsets {offsets!r:.80}")
    if offsets[1] - offsets[0] != spec.nbytes:
        raise _refused(
            path,
            f"{name!r} is {code}{list(shape)}, of {spec.nbytes:,} bytes, and has "
            f"offsets {offsets}",
        )
    return Stored(spec, start + offsets[0])


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(
        type(size) is int and 0 <= size <= MAX_NUMEL for size in found
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name is there twice")
    return content


def _refused(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path} is no safetensors file that can be read: {found}. Get it again from "
        "where it came from."
    )
