"""Compares two runs, with a measured bound on how far rounding can set them apart.

[Note: rounding bound] Streamed and plain programs run the same operations, but XLA
fuses and orders them differently. So every intermediate number may differ by a unit in
its last place (ulp). The effect on a result depends on the model. For example, if the
loss does not depend on a bias, the gradient of the bias is only rounding error, and
Adam scales it to a whole step.

The effect is therefore measured: the plain run is repeated with every number that it
reads from a parameter changed by one ulp. The bound for an array is the sum of

* `FACTOR` times the largest change of the array in these repetitions;
* `ULPS` ulps of the largest number of the array, because a repetition may happen to
  change nothing. For arrays that are computed in less than 32 bits, where an ulp is
  large, `ULPS / HALF_SHARE` ulps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

NUM_PERTURBED = 3
FACTOR = 4
ULPS = 16
HALF_SHARE = 8
EPS = float(np.finfo(np.float32).eps)
# If the bound exceeds this share of the largest number, agreement shows little.
NOISE_SHARE = 0.1
REASON = (
    f"Allowed is {FACTOR} times the largest change that the plain run shows in "
    f"{NUM_PERTURBED} repetitions in which every number that it reads from a parameter "
    "is changed by one unit in the last place (of the coarsest precision that the loss "
    f"computes in), and {ULPS} such units of the largest number ({ULPS // HALF_SHARE} "
    "below 32 bits). Both runs do the same operations, which XLA fuses and orders "
    "differently, and so rounds differently."
)


@dataclass(frozen=True)
class Check:
    """The comparison of one array.

    Attributes:
        largest: the largest magnitude in the plain run.
        difference: the largest difference between the runs.
        bound: the difference that rounding can explain. See [Note: rounding bound].
    """

    largest: float
    difference: float
    bound: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound

    @property
    def is_noise(self) -> bool:
        """Whether rounding may change the array by over a tenth of its largest number.

        Agreement of such an array shows little.
        """
        return self.bound > NOISE_SHARE * self.largest > 0

    @property
    def share(self) -> float:
        """The difference over its bound."""
        return self.difference / (self.bound or 1e-300)


def check_arrays(
    found: np.ndarray,
    plain: np.ndarray,
    perturbed: Sequence[np.ndarray],
    *,
    unit: float,
) -> Check:
    """Compare an array of both runs.

    Arrays of other than floating-point numbers, and numbers that are not finite, must
    be equal.

    Args:
        perturbed: the array in the perturbed repetitions of the plain run.
        unit: the unit in the last place of 1 in the coarsest dtype that the array is
            computed in.
    """
    if not jnp.issubdtype(plain.dtype, jnp.floating):
        return Check(0.0, 0.0 if np.array_equal(found, plain) else np.inf, 0.0)
    largest = float(np.max(np.abs(np.asarray(plain, np.float64)), initial=0.0))
    change = max((_distance(x, plain) for x in perturbed), default=0.0)
    unit /= HALF_SHARE if unit > EPS else 1
    bound = FACTOR * change + ULPS * unit * largest
    return Check(largest, _distance(found, plain), bound)


def check_losses(
    found: Sequence[float],
    plain: Sequence[float],
    perturbed: Sequence[Sequence[float]],
) -> list[Check]:
    """Compare the losses of each step.

    The bounds never fall: a change in one step persists in the steps after it.
    """
    checks, change = [], 0.0
    for number, (one, other) in enumerate(zip(found, plain, strict=True)):
        change = max([change, *(abs(x[number] - other) for x in perturbed)])
        bound = FACTOR * change + ULPS * EPS * abs(other)
        checks.append(Check(abs(other), abs(one - other), bound))
    return checks


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two entries; infinite if only one of them is NaN."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.where(is_same, 0.0, np.abs(a - b)), initial=0.0))
    return float("inf") if np.isnan(largest) else largest
