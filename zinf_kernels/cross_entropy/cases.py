"""Named losses for tests and benchmarks: tokens, widths, dtypes, sizes of pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One loss; `make` makes activations, weight, labels and token weights."""

    name: str
    batch: tuple[int, ...]
    dim: int
    vocab: int
    dtype: Any = jnp.float32
    vocab_axis: int = 1
    chunk_tokens: int = 8
    chunk_vocab: int = 16
    z_loss: float = 0.0
    ignored: float = 0.0

    def make(self, *, seed: int = 0) -> tuple[jax.Array, ...]:
        """Arrays as in training: logits of about unit size, some labels -100."""
        random = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)
        x = random.standard_normal((*self.batch, self.dim)).astype(dtype)
        weight = random.standard_normal((self.dim, self.vocab)) / self.dim**0.5
        if not self.vocab_axis:
            weight = weight.T
        labels = random.integers(0, self.vocab, self.batch, dtype=np.int32)
        labels = np.where(random.random(self.batch) < self.ignored, -100, labels)
        weights = random.uniform(0.5, 2, self.batch).astype(np.float32)
        arrays = x, weight.astype(dtype), labels.astype(np.int32), weights
        return tuple(map(jnp.asarray, arrays))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `cross_entropy` besides the arrays."""
        names = ("vocab_axis", "chunk_tokens", "chunk_vocab", "z_loss")
        return {name: getattr(self, name) for name in names}


def cases() -> Iterator[Case]:
    """Pieces that fit and that do not, both layouts, every dtype, masks, z-loss."""
    yield Case("even", (16,), 24, 64)
    yield Case("odd", (23,), 7, 29, ignored=0.3)
    yield Case("embedding", (3, 11), 13, 37, vocab_axis=0, z_loss=1e-2, ignored=0.3)
    yield Case("bfloat16", (2, 19), 32, 67, jnp.bfloat16, z_loss=1e-3, ignored=0.2)
    yield Case("float16", (17,), 32, 31, jnp.float16, vocab_axis=0)
    yield Case("one_piece", (5,), 8, 11, chunk_tokens=99, chunk_vocab=99, z_loss=0.1)
    yield Case("one_row", (1,), 16, 101)
    yield Case("one_word", (9,), 16, 1)
    yield Case("no_token", (0,), 16, 20)
    yield Case("none_counts", (10,), 16, 20, ignored=1.0, z_loss=1.0)


def kernel_cases() -> Iterator[Case]:
    """Sizes that fit small tiles, several of them, in both layouts."""
    pieces = {"chunk_tokens": 128, "chunk_vocab": 128, "ignored": 0.2}
    yield Case("dense", (2, 128), 128, 192, jnp.bfloat16, z_loss=1e-3, **pieces)
    yield Case("embedding", (128,), 64, 128, jnp.bfloat16, vocab_axis=0, **pieces)
    yield Case("float16", (128,), 64, 320, jnp.float16, **pieces)


def benchmark_cases(tokens: int, dim: int, vocab: int) -> Iterator[Case]:
    """Last layers in bfloat16, with the default pieces."""
    for axis, name in ((1, "dense"), (0, "embedding")):
        sizes = {"chunk_tokens": 2048, "chunk_vocab": 8192}
        yield Case(name, (tokens,), dim, vocab, jnp.bfloat16, axis, **sizes)
