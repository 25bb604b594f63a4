"""Named arrays for tests and benchmarks: shapes, dtypes, bits, rounding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One array to quantize; `make` makes it, with magnitudes as in a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    bits: int = 8
    block_size: int = 128
    is_stochastic: bool = False

    def make(self, *, seed: int = 0) -> jax.Array:
        """Rows of magnitudes that differ by powers of ten, with a block of zeros."""
        random = np.random.default_rng(seed)
        exponents = random.uniform(-4, 1, (*self.shape[:1], *[1] * len(self.shape[1:])))
        x = (random.standard_normal(self.shape) * 10**exponents).reshape(-1)
        x[self.block_size : 2 * self.block_size] = 0
        return jnp.asarray(x.reshape(self.shape).astype(jnp.dtype(self.dtype)))

    def key(self, *, seed: int = 0) -> jax.Array | None:
        return jax.random.key(seed) if self.is_stochastic else None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `quantize` besides the array and the key."""
        return {"bits": self.bits, "block_size": self.block_size}


def cases() -> Iterator[Case]:
    """Every dtype, 8 and 4 bits, both roundings, shapes that do not fit."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        yield Case(f"int8_{jnp.dtype(dtype).name}", (23, 29), dtype)
    yield Case("int4_float32", (23, 29), bits=4)
    yield Case("int8_stochastic", (23, 29), is_stochastic=True)
    yield Case("int8_wide_blocks", (129, 130), jnp.bfloat16, block_size=256)
    yield Case("one_number", (1,))
    yield Case("three_dims", (7, 5, 64), jnp.bfloat16, 4, is_stochastic=True)


def benchmark_cases(numel: int) -> Iterator[Case]:
    """Arrays as collectives and streamed state would quantize them."""
    for bits in (8, 4):
        yield Case(f"int{bits}_bfloat16", (numel,), jnp.bfloat16, bits, 256)
        name = f"int{bits}_bfloat16_stochastic"
        yield Case(name, (numel,), jnp.bfloat16, bits, 256, is_stochastic=True)
    yield Case("int8_float32", (numel,), block_size=256)
