"""How far two runs may differ by rounding, and how far they do.

[Note: rounding bound] Streamed and plain programs do the same operations, which XLA
fuses and orders otherwise, so that every number in between may differ in its last
place. How far that carries depends on the model: a bias that the loss does not depend
on has a gradient of rounding alone, and Adam makes a whole step of it. It is therefore
measured: the plain run is repeated with every number that it reads from a parameter
changed by a unit in its last place. What is allowed is `FACTOR` times the largest
change that this made in an array, and `ULPS` units in the last place of the array's
largest number, for what such a change happens to leave alone. Of numbers that are
computed in 16 bits only an eighth of those units: they are large.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

NUM_PERTURBED = 3
FACTOR = 4
ULPS = 16
HALF_SHARE = 8
# A bound above this share of the largest number says that rounding hides all else.
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
        difference: the largest between the runs.
        bound: what rounding explains of it. See [Note: rounding bound].
    """

    largest: float
    difference: float
    bound: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound

    @property
    def is_noise(self) -> bool:
        """Whether rounding alone may change a tenth of the array: it shows little."""
        return self.bound > NOISE_SHARE * self.largest > 0


def check_arrays(
    found: np.ndarray,
    plain: np.ndarray,
    perturbed: Sequence[np.ndarray],
    *,
    unit: float,
) -> Check:
    """Compares an array; what is not floating-point, or not finite, has to be equal.

    Args:
        perturbed: the array in repetitions of the plain run.
        unit: in the last place of 1, of the coarsest dtype that it is computed in.
    """
    if not jnp.issubdtype(plain.dtype, jnp.floating):
        is_equal = np.array_equal(found, plain)
        return Check(0.0, 0.0 if is_equal else float("inf"), 0.0)
    largest = _largest(plain)
    change = max((_distance(x, plain) for x in perturbed), default=0.0)
    if unit > float(np.finfo(np.float32).eps):
        unit /= HALF_SHARE
    bound = FACTOR * change + ULPS * unit * largest
    return Check(largest, _distance(found, plain), bound)


def check_losses(
    found: Sequence[float],
    plain: Sequence[float],
    perturbed: Sequence[Sequence[float]],
) -> list[Check]:
    """Compares the losses of each step; what one step changed, those after it have."""
    checks = []
    change = 0.0
    for number, (one, other) in enumerate(zip(found, plain, strict=True)):
        change = max([change, *(abs(x[number] - other) for x in perturbed)])
        bound = FACTOR * change + ULPS * float(np.finfo(np.float32).eps) * abs(other)
        checks.append(Check(abs(other), abs(one - other), bound))
    return checks


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(array, np.float64)), initial=0.0))


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two numbers; infinite if only one is a number."""
    wide = np.asarray(one, np.float64), np.asarray(other, np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.abs(wide[0] - wide[1])
    same = (wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))
    differences = np.where(same, 0.0, differences)
    largest = float(np.max(differences, initial=0.0))
    return float("inf") if np.isnan(largest) else largest
