"""The dtype of an exported array, and the host memory that an export needs."""

from dataclasses import replace

from zinf.core.interchange.rounding import MASK_BYTES, is_float
from zinf.core.interchange.tensors import AbstractTensors, block_bytes, read_bytes
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArraySpec


def as_dtype(spec: ArraySpec, dtype: str | None) -> ArraySpec:
    """The spec of an exported array: floating-point arrays get `dtype`, if not None."""
    if dtype is None or not is_float(spec.dtype):
        return spec
    if not is_float(dtype):
        raise ValueError(
            f"dtype is {dtype!r}, and has to be of floating-point numbers."
        )
    return replace(spec, dtype=dtype, itemsize=numpy_dtype(dtype).itemsize)


def held_bytes(tensors: AbstractTensors, dtype: str | None) -> int:
    """Most host bytes that an export holds: two parts, and one cast to `dtype`."""
    most = 0
    for name, spec in tensors.specs.items():
        nbytes = block_bytes(tensors, name)
        target = as_dtype(spec, dtype)
        cast = 0 if target == spec else target.itemsize + MASK_BYTES
        held = read_bytes(tensors, name, nbytes)
        most = max(most, held + nbytes // spec.itemsize * cast)
    return most
