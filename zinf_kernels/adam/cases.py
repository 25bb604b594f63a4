"""Named updates for tests and benchmarks: dtypes, lengths and hyperparameters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zinf_kernels.adam.arguments import Arrays
from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32

ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
ROOTED = {"b1": 0.8, "b2": 0.99, "eps": 1e-6, "eps_root": 1e-12, "weight_decay": 1e-4}


@dataclass(frozen=True)
class Case:
    """One update; `make` makes its arrays, as after some steps of training."""

    name: str
    numel: int
    gradient_dtype: np.dtype = FLOAT32
    m_dtype: np.dtype = FLOAT32
    copy_dtype: np.dtype | None = None
    factor: float = 1.0
    hyperparameters: dict[str, float] = field(default_factory=ADAMW.copy)

    def make(self, *, seed: int = 0) -> Arrays:
        random = np.random.default_rng(seed)

        def normal(scale: float) -> Any:
            return (random.standard_normal(self.numel) * scale).astype(np.float32)

        dtype = self.copy_dtype
        return Arrays(
            master=normal(0.02),
            m=normal(1e-3).astype(self.m_dtype),
            v=normal(1e-3) ** 2,
            gradient=self.gradients(seed=seed + 1),
            copy=None if dtype is None else np.zeros(self.numel, dtype),
        )

    def gradients(self, *, seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        # A loss scale of 1 / factor makes gradients larger by it.
        wide = random.standard_normal(self.numel) * (1e-3 / self.factor)
        return wide.astype(np.float32).astype(self.gradient_dtype)


def cases() -> Iterator[Case]:
    """Every pair of gradient and moment dtype, both copies, every formula."""
    yield Case("float32", 4097)
    yield Case("adam", 4097, hyperparameters=ADAM)
    yield Case("rooted", 1000, factor=0.37, hyperparameters=ROOTED)
    yield Case("bfloat16", 4097, BFLOAT16, copy_dtype=BFLOAT16, factor=0.37)
    yield Case("float16", 1031, FLOAT16, copy_dtype=FLOAT16, factor=2.0**-16)
    for gradient_dtype in (FLOAT32, BFLOAT16, FLOAT16):
        name = f"{gradient_dtype}_short_moment"
        yield Case(name, 555, gradient_dtype, BFLOAT16, BFLOAT16, factor=0.5)
    for numel in (0, 1, 2, 15, 16, 17, 31, 33, 63, 65):
        yield Case(f"length_{numel}", numel, BFLOAT16, copy_dtype=BFLOAT16)
