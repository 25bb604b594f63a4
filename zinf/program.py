"""The vocabulary of the spine: tiers, array names, and the segmented program as plain data.

Nothing here imports jax or numpy, so that `plan` can be built and tested without them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import prod


class Tier(StrEnum):
    """Where bytes rest, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array; `dtype` is its NumPy (or ml_dtypes) name."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def rows(self, start: int, stop: int) -> "ArraySpec":
        """The spec of rows `start:stop` of the leading dim."""
        return ArraySpec((stop - start, *self.shape[1:]), self.dtype, self.itemsize)


@dataclass(frozen=True, slots=True)
class ArrayId:
    """The name of an array, the same on every tier.

    `role` says what it is for its owner ("param", "master", "state0", "grad", "value"),
    `path` whose it is (a parameter's key path such as "blocks/0/mlp/kernel", or a value
    of the program). `rows` selects rows of the leading dim: a leaf stacked over layers
    is kept as one array per layer, with `rows=(i, i + 1)`; `None` is the whole array.
    Values that exist once per microbatch carry its number.
    """

    role: str
    path: str
    rows: tuple[int, int] | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        rows = f"[{self.rows[0]}:{self.rows[1]}]" if self.rows else ""
        batch = f"@{self.microbatch}" if self.microbatch is not None else ""
        return f"{self.role}/{self.path}{rows}{batch}"

    @property
    def whole(self) -> "ArrayId":
        """The array that this one is rows of."""
        return ArrayId(self.role, self.path, None, self.microbatch)
