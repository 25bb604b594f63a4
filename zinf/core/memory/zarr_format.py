"""The file format of arrays: zarr v3, in a form that every zarr reader opens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zinf.core.program import ArraySpec

METADATA = "zarr.json"
"""Name of the file that describes an array, beside its chunks."""

# zarr v3 itself has no bfloat16, and few readers know the extension for it. The bits
# are stored as uint16, and the array's attribute "dtype" says that they are bfloat16.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STORED_DTYPES = {"bfloat16": "uint16"}


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of an `ArraySpec`."""
    return BFLOAT16 if name == BFLOAT16.name else np.dtype(name)


def as_stored(array: np.ndarray) -> np.ndarray:
    """The same memory, viewed as the dtype of the file."""
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def zarr_spec(folder: Path, spec: ArraySpec, chunk: Sequence[int]) -> dict[str, Any]:
    """The TensorStore spec of an uncompressed array with chunks of one shape."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder)},
        "metadata": _metadata(spec, chunk),
        # By default TensorStore deletes chunks of zeros (new moments) instead of
        # writing them, and reads missing chunks as zeros.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def zarr_json(spec: ArraySpec, chunk: Sequence[int]) -> bytes:
    """The file `zarr.json` of an uncompressed array with chunks of one shape."""
    kind = {"zarr_format": 3, "node_type": "array"}
    return json.dumps({**kind, **_metadata(spec, chunk)}, indent=1).encode()


def _metadata(spec: ArraySpec, chunk: Sequence[int]) -> dict[str, Any]:
    stored = STORED_DTYPES.get(spec.dtype, spec.dtype)
    return {
        "shape": list(spec.shape),
        "data_type": stored,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk)},
        },
        # All chunks in the folder of the array itself, as "c.0.1", not "c/0/1".
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": "."},
        },
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": _zero(stored),
        "attributes": {"dtype": spec.dtype},
    }


def _zero(dtype: str) -> bool | int | list[int]:
    """Zero, as zarr's JSON writes it for `dtype`."""
    if dtype == "bool":
        return False
    return [0, 0] if dtype.startswith("complex") else 0
