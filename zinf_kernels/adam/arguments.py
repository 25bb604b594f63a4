"""The arguments of one update: its arrays, checked, and its scalars in float32."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32, check_apart, check_array

# The dtypes that each array may have. `v` is never short: bfloat16 has 8 bits of
# precision, and one step changes v by one part in 1 / (1 - b2) = 1000.
DTYPES = {
    "master": (FLOAT32,),
    "m": (FLOAT32, BFLOAT16),
    "v": (FLOAT32,),
    "gradient": (FLOAT32, BFLOAT16, FLOAT16),
    "copy": (BFLOAT16, FLOAT16),
}


@dataclass(frozen=True)
class Arrays:
    """The arrays of one update, 1-D and of one length; all but `gradient` change."""

    master: np.ndarray
    m: np.ndarray
    v: np.ndarray
    gradient: np.ndarray
    copy: np.ndarray | None

    def check(self) -> None:
        """Raises ValueError, or TypeError for a non-array, unless all can be used."""
        arrays = {"master": self.master, "m": self.m, "v": self.v}
        arrays["gradient"] = self.gradient
        if self.copy is not None:
            arrays["copy"] = self.copy
        for name, array in arrays.items():
            is_written = name != "gradient"
            check_array(name, array, dtypes=DTYPES[name], is_written=is_written)
        check_apart(arrays)


@dataclass(frozen=True)
class Scalars:
    """The scalars of one update, in float32.

    `correction1` and `correction2` are `1 - b1**step` and `1 - b2**step`. `1 - b1` is a
    field of its own: optax computes it in float64, and float32 `b1` no longer has the
    digits for it.
    """

    learning_rate: np.float32
    b1: np.float32
    one_minus_b1: np.float32
    correction1: np.float32
    b2: np.float32
    one_minus_b2: np.float32
    correction2: np.float32
    eps: np.float32
    eps_root: np.float32
    weight_decay: np.float32
    factor: np.float32


def adam_scalars(
    *,
    step: int,
    learning_rate: float,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    factor: float = 1.0,
    m_dtype: Any = np.float32,
) -> Scalars:
    """Rounds hyperparameters as `optax.adamw` under jit does.

    There an average in bfloat16 decays by b1 rounded to bfloat16: 0.8984 for 0.9.

    Raises:
        ValueError: `step` is not 1 or more, or `b1` or `b2` is not in [0, 1).
    """
    if step < 1:
        raise ValueError(f"step is {step}, but the first update is step 1.")
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}, but averages need 0 <= {name} < 1.")
    return Scalars(
        learning_rate=np.float32(learning_rate),
        b1=np.dtype(m_dtype).type(b1).astype(np.float32),
        one_minus_b1=np.float32(1 - b1),
        correction1=_correction(b1, step),
        b2=np.float32(b2),
        one_minus_b2=np.float32(1 - b2),
        correction2=_correction(b2, step),
        eps=np.float32(eps),
        eps_root=np.float32(eps_root),
        weight_decay=np.float32(weight_decay),
        factor=np.float32(factor),
    )


def _correction(decay: float, step: int) -> np.float32:
    # A power in float64 rounded to float32 has the bits of XLA:CPU at all but a dozen
    # of the first 200,000 steps; NumPy's in float32 differs at thousands.
    return np.float32(1) - np.float32(np.float64(np.float32(decay)) ** step)
