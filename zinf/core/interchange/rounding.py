"""Converts between floating-point dtypes, and refuses values that are out of range."""

import jax.numpy as jnp
import numpy as np

from zinf.core.memory.zarr_format import numpy_dtype

# Bytes per element of the three masks in `rounded`: finite before, finite after, lost.
MASK_BYTES = 3


def is_float(dtype: str) -> bool:
    """Whether a dtype is real floating-point, such as float32 or bfloat16."""
    return jnp.issubdtype(numpy_dtype(dtype), jnp.floating)


def is_exact(source: str, target: str) -> bool:
    """Whether every value of dtype `source` is also a value of dtype `target`.

    Both must be floating-point, or the same dtype.
    """
    if source == target:
        return True
    if not (is_float(source) and is_float(target)):
        return False
    narrow, wide = (jnp.finfo(numpy_dtype(name)) for name in (source, target))
    return (
        narrow.nmant <= wide.nmant
        and narrow.maxexp <= wide.maxexp
        # Compares the exponents of the smallest subnormal numbers.
        and narrow.minexp - narrow.nmant >= wide.minexp - wide.nmant
    )


def rounded(content: np.ndarray, dtype: str, *, name: str) -> np.ndarray:
    """`content` in another dtype, rounded to the nearest value (ties to even).

    Raises:
        ValueError: a finite value is beyond the range of `dtype`.
    """
    target = numpy_dtype(dtype)
    if content.dtype == target:
        return content
    with np.errstate(over="ignore"):
        cast = content.astype(target)
    if is_exact(content.dtype.name, dtype):
        return cast
    lost = np.isfinite(content) & ~np.isfinite(cast)
    if lost.any():
        largest = np.max(np.abs(content[lost].astype(np.float64)))
        raise ValueError(
            f"{name!r} holds {largest:.6g}, and {dtype} goes up to "
            f"{float(jnp.finfo(target).max):.6g}. Choose a dtype of a larger range, "
            "such as bfloat16 or float32."
        )
    return cast
