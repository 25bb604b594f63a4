"""Named matmuls for tests and benchmarks: sizes, dtypes and what is added."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One matmul; `make` makes a, b, bias and residual, the last two or None."""

    name: str
    m: int
    n: int
    k: int
    dtype: Any = jnp.bfloat16
    out_dtype: Any = None
    has_bias: bool = False
    residual_dtype: Any = None

    def make(self, *, seed: int = 0) -> tuple[jax.Array | None, ...]:
        """Of unit size, so that no term of the sums is lost beside another."""
        random = np.random.default_rng(seed)

        def normal(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
            made = random.standard_normal(shape) * scale
            return jnp.asarray(made.astype(jnp.dtype(dtype)))

        scale = max(self.k, 1) ** -0.5
        bias = normal((self.n,), self.dtype) if self.has_bias else None
        residual = None
        if self.residual_dtype is not None:
            residual = normal((self.m, self.n), self.residual_dtype)
        a, b = (self.m, self.k), (self.k, self.n)
        return normal(a, self.dtype), normal(b, self.dtype, scale), bias, residual

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `matmul` besides the arrays."""
        return {"out_dtype": self.out_dtype}


def cases() -> Iterator[Case]:
    """Every sum and dtype, and sizes that fit no tile."""
    full = {"has_bias": True, "residual_dtype": jnp.bfloat16}
    yield Case("plain", 128, 128, 128)
    wide = {"has_bias": True, "residual_dtype": "f4"}
    yield Case("float16", 128, 64, 64, jnp.float16, **wide)
    yield Case("bias_residual", 256, 192, 128, **full)
    yield Case("gradient", 128, 128, 192, out_dtype=jnp.float32, residual_dtype="f4")
    # Several pieces of several tiles for each block: every slot is used again.
    yield Case("slots", 256, 192, 128, has_bias=True, residual_dtype="f4")
    yield Case("odd", 23, 29, 31, **full)
    yield Case("one_row", 1, 101, 7, jnp.float32, has_bias=True)
    yield Case("empty", 0, 5, 3, has_bias=True)
    yield Case("nothing_to_sum", 4, 5, 0, residual_dtype="f4")


def benchmark_cases(tokens: int, dim: int) -> Iterator[Case]:
    """A transformer's matmuls: square, into and out of the MLP, and a gradient."""
    wide = 4 * dim
    yield Case("square", tokens, dim, dim)
    yield Case("up_bias", tokens, wide, dim, has_bias=True)
    yield Case("down_residual", tokens, dim, wide, residual_dtype=jnp.bfloat16)
    into = {"out_dtype": jnp.float32, "residual_dtype": jnp.float32}
    yield Case("gradient", dim, dim, tokens, **into)
