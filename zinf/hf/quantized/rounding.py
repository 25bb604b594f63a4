"""Rounds the weights of a linear layer to integers of few bits, with a scale a group.

`nearest` rounds each number by itself. `gptq` (https://arxiv.org/abs/2210.17323) rounds
input by input, and changes the inputs that are not rounded yet so that the outputs of
the layer change least. Both have symmetric integers, as compressed-tensors does.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from scipy.linalg import LinAlgError, cholesky, get_lapack_funcs

from zinf.core.memory.zarr_format import numpy_dtype

# Inputs whose errors are fed to later blocks in one product.
BLOCK = 128
# Share of the mean of the diagonal that is added to it: that of the paper, and more
# where the matrix cannot be inverted.
DAMPING, MAX_DAMPING = 0.01, 1.0


@dataclass(frozen=True)
class Grid:
    """Which numbers a rounded weight may have.

    Attributes:
        bits: of a code.
        group: inputs of an output that share a scale.
        dtype: of the scales.
    """

    bits: int
    group: int
    dtype: str

    @property
    def low(self) -> int:
        """The smallest code; the largest one is `-low - 1`."""
        return -(2 ** (self.bits - 1))

    def scales(self, rows: np.ndarray, shrink: float = 1.0) -> np.ndarray:
        """The scale of each output, float32 [outputs], a value of `dtype`.

        Args:
            rows: the weights of a group, float32 [inputs, outputs].
            shrink: share of the largest weight that has the largest code.
        """
        dtype = numpy_dtype(self.dtype)
        largest = np.abs(rows).max(axis=0) * np.float32(shrink)
        largest /= np.float32(-self.low - 0.5)
        scales = largest.astype(dtype).astype(np.float32)
        least = np.float32(ml_dtypes.finfo(dtype).eps)
        return np.where(scales > 0, scales, least)

    def codes(
        self, rows: np.ndarray, scales: np.ndarray, shift: np.ndarray | None = None
    ) -> np.ndarray:
        """The nearest codes, as float32 of the shape of `rows`.

        Args:
            shift: added to each number before it is rounded, in codes; None: nothing.
                With one, numbers are multiplied by inverses of scales, as compilers
                do that train the shift: a group's largest is often between two codes.
        """
        numbers = rows / scales if shift is None else rows * (1 / scales) + shift
        return np.clip(np.rint(numbers), self.low, -self.low - 1)


@dataclass(frozen=True)
class Rounded:
    """A rounded weight: `codes * scales` of each group.

    Attributes:
        codes: int8 [outputs, inputs].
        scales: float32 [outputs, groups], values of the dtype of the grid.
        damping: what `gptq` added to the diagonal, as a share of its mean.
    """

    codes: np.ndarray
    scales: np.ndarray
    damping: float = 0.0

    @classmethod
    def of_rows(
        cls, codes: np.ndarray, scales: np.ndarray, damping: float = 0.0
    ) -> "Rounded":
        """From codes [inputs, outputs] and scales [groups, outputs]."""
        whole = np.ascontiguousarray(codes.T.astype(np.int8))
        return cls(whole, np.ascontiguousarray(scales.T), damping)

    @property
    def plain(self) -> np.ndarray:
        """The rounded weight as numbers, float32 [outputs, inputs]."""
        group = self.codes.shape[1] // self.scales.shape[1]
        return self.codes * np.repeat(self.scales, group, axis=1)


def nearest(weight: np.ndarray, grid: Grid, shift: np.ndarray | None = None) -> Rounded:
    """Each number of a weight rounded to the nearest code.

    Args:
        weight: float32 [outputs, inputs]; the group divides the inputs.
        shift: as for `Grid.codes`, of the shape of `weight`. Scales are those of the
            weight without it.
    """
    rows = weight.T.reshape(-1, grid.group, weight.shape[0])
    scales = np.stack([grid.scales(group) for group in rows])
    shifts = None if shift is None else shift.T.reshape(rows.shape)
    codes = grid.codes(rows, scales[:, None], shifts).reshape(-1, weight.shape[0])
    return Rounded.of_rows(codes, scales)


def gptq(weight: np.ndarray, gram: np.ndarray, grid: Grid) -> Rounded:
    """A weight rounded so that outputs change least for the inputs that were seen.

    The scales of a group are those of its weights when the first one is rounded, with
    the errors of all inputs before it. An input that was always 0 gets the code 0.

    Args:
        weight: float32 [outputs, inputs]; the group divides the inputs.
        gram: the sum of x^T x over inputs x, float32 [inputs, inputs], up to a factor.

    Raises:
        ValueError: `gram` is not finite or all 0, or cannot be inverted.
    """
    rows = np.ascontiguousarray(weight.T, np.float32)
    dead = np.diagonal(gram) == 0
    rows[dead] = 0
    factor, damping = inverse_factor(gram)
    codes = np.empty_like(rows)
    scales = np.empty((len(rows) // grid.group, rows.shape[1]), np.float32)
    for start, stop in _blocks(len(rows), grid.group):
        errors = np.empty_like(rows[start:stop])
        for i in range(start, stop):
            group, place = divmod(i, grid.group)
            if place == 0:
                scales[group] = grid.scales(rows[i : i + grid.group])
            codes[i] = grid.codes(rows[i], scales[group])
            error = (rows[i] - codes[i] * scales[group]) / factor[i, i]
            rows[i:stop] -= np.outer(factor[i, i:stop], error)
            errors[i - start] = error
        rows[stop:] -= factor[start:stop, stop:].T @ errors
    return Rounded.of_rows(codes, scales, damping)


def inverse_factor(gram: np.ndarray) -> tuple[np.ndarray, float]:
    """U, upper triangular, with U^T U the inverse of the damped `gram`; the damping.

    With R upper triangular and R R^T = gram, U is the inverse of R: the inverse of
    `gram` itself is never made.
    """
    diagonal = np.diagonal(gram)
    mean = float(diagonal.mean(dtype=np.float64))
    if not np.isfinite(gram).all() or mean <= 0:
        raise ValueError(
            f"the sum over its inputs has a mean diagonal of {mean:.6g}, and all of "
            "its numbers must be finite, and some not 0"
        )
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped = gram.astype(np.float32)
        # A dead input is apart from all others.
        own = np.where(diagonal == 0, np.float32(mean), diagonal)
        np.fill_diagonal(damped, own + np.float32(damping * mean))
        try:
            lower = np.asarray(cholesky(damped[::-1, ::-1], lower=True))
        except LinAlgError:
            damping *= 10
            continue
        (invert,) = get_lapack_funcs(("trtri",), (lower,))
        inverse, failed = invert(lower[::-1, ::-1])
        if not failed and np.isfinite(inverse).all():
            return np.ascontiguousarray(np.triu(inverse)), damping
        damping *= 10
    raise ValueError(
        f"the sum over its inputs cannot be inverted, also with {MAX_DAMPING:g} times "
        "its mean diagonal added"
    )


def _blocks(inputs: int, group: int) -> list[tuple[int, int]]:
    """Blocks of about `BLOCK` inputs, none of which begins or ends within a group.

    Larger groups have several blocks. So all errors are fed when a group begins.
    """
    size = group * max(1, BLOCK // group)
    return [
        (first, min(first + BLOCK, start + size, inputs))
        for start in range(0, inputs, size)
        for first in range(start, min(start + size, inputs), BLOCK)
    ]
