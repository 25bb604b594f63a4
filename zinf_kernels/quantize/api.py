"""`quantize` and `dequantize`: signatures, checks and choice of implementation."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from zinf_kernels.device import Device, device_for, hopper_obstacle
from zinf_kernels.dispatch import Implementation, choose_name
from zinf_kernels.quantize.blocks import LARGEST, Quantized, array_of, blocks_of

EXISTING = ("mosaic_gpu", "reference")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Rows of the kernel's tiles. Shorter ones cannot be halved where they are swizzled,
# longer ones do not fit in a warpgroup's registers.
KERNEL_BLOCK_SIZES = (128, 256)


def quantize(
    x: Float[Array, "..."],
    *,
    bits: int = 8,
    block_size: int = 128,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> Quantized:
    """An array as integers of 8 or 4 bits with a float32 scale for each block.

    As in ZeRO++ (arXiv:2306.10209, section 3.1) and bitsandbytes (arXiv:2110.02861).
    With n = 127 for 8 bits and 7 for 4, for each block of the flattened array:

        scale = max |x| * (1 / n)
        value = x * (1 / scale), rounded to the nearest, ties to even; with a key, up
                with a probability equal to the fraction, else down

    Rounding: |value * scale - x| <= (1/2 + 2**-15) scale to the nearest, (1 + 2**-15)
    scale otherwise, and |value| <= n. A block whose scale would be below 2**-126
    becomes zeros; one with a NaN or an infinity becomes NaNs. With a key, the
    mean of value * scale over keys is x, up to 2**-15 scale.

    Not differentiable. Under `jax.jit` with several devices call it in `jax.shard_map`:
    XLA does not cut kernels.

    Args:
        x: float32, bfloat16 or float16, of any shape. A copy is made for the kernel
            unless the size is a multiple of 64 blocks.
        bits: 8, or 4 for two numbers a byte.
        block_size: numbers that share a scale; even.
        key: of `jax.random`, for stochastic rounding. The random numbers are a hash of
            the key and of the index modulo 2**32, so equal keys give equal results.
        implementation: "mosaic_gpu", "reference", or names in order of preference.

    Raises:
        ValueError: `bits`, `block_size` or the dtype is none of these, or the
            implementation cannot run: see `obstacles`.
    """
    _check(x, bits, block_size)
    device = device_for(x)
    backend = _backend(
        implementation, "quantize", obstacles(device, x=x, block_size=block_size)
    )
    seed = None if key is None else _seed(key)
    blocks = blocks_of(x, block_size)
    values, scales = backend.quantize(
        blocks, seed, bits=bits, num_cores=device.num_cores
    )
    return Quantized(values, scales, x.shape, x.dtype, bits)


def dequantize(
    quantized: Quantized,
    *,
    dtype: Any = None,
    implementation: Implementation = None,
) -> Float[Array, "..."]:
    """The array that was quantized, up to rounding by `quantize`.

    Args:
        quantized: what `quantize` made, by any implementation.
        dtype: of the result, by default that of the array; value * scale is rounded to
            it once from float32.
        implementation: "mosaic_gpu", "reference", or names in order of preference.

    Raises:
        ValueError: the dtype is not float32, bfloat16 or float16, or the implementation
            cannot run: see `obstacles`.
    """
    dtype = jnp.dtype(quantized.dtype if dtype is None else dtype)
    _check_dtype("dtype", dtype)
    values, scales = quantized.values, quantized.scales
    device = device_for(values)
    why_not = obstacles(device, x=values, block_size=quantized.block_size)
    backend = _backend(implementation, "dequantize", why_not)
    blocks = backend.dequantize(
        values, scales, bits=quantized.bits, dtype=dtype, num_cores=device.num_cores
    )
    return array_of(blocks, quantized.shape)


def obstacles(device: Device, *, x: Any, block_size: int = 128) -> dict[str, str]:
    """For each implementation that cannot run there on such an array, the reason.

    `implementation=None` takes the first of `EXISTING` that is not among them.
    """
    found = hopper_obstacle(device)
    if found is None and block_size not in KERNEL_BLOCK_SIZES:
        found = f"its blocks have 128 or 256 numbers, not {block_size}."
    if found is None and not x.size:
        found = "there is nothing to do for an empty array."
    return {} if found is None else {"mosaic_gpu": found}


def _backend(implementation: Implementation, op: str, why_not: dict[str, str]) -> Any:
    name = choose_name(implementation, op=op, existing=EXISTING, obstacles=why_not)
    # Imported late: Pallas takes 1.4 s to import, and most programs never need it.
    return import_module(f"zinf_kernels.quantize.{name}")


def _seed(key: jax.Array) -> UInt32[Array, "2"]:
    return jax.random.bits(key, (2,), jnp.uint32)


def _check(x: Any, bits: int, block_size: int) -> None:
    _check_dtype("x", x.dtype)
    if bits not in LARGEST:
        raise ValueError(f"bits is {bits}. Pass 8 or 4.")
    if block_size < 2 or block_size % 2:
        raise ValueError(
            f"block_size is {block_size}. Pass an even number, at least 2."
        )


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in DTYPES:
        allowed = ", ".join(jnp.dtype(d).name for d in DTYPES)
        raise ValueError(f"{name} is {dtype}, which is none of {allowed}.")
