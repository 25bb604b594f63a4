"""The vocabulary of the spine: tiers, array names, and programs as plain data.

Nothing here imports jax or numpy, so that `plan` can be built and tested without them.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod


class Tier(StrEnum):
    """Where bytes rest, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Role(StrEnum):
    """What an array is for: the first part of its name.

    Those of PARAM, MASTER and STATE persist between steps, and checkpoints hold them.
    """

    PARAM = "param"  # in the dtype that the loss computes with
    MASTER = "master"  # in the dtype that it is kept in, where that is another one
    STATE = "state"  # of the optimizer; a leaf's are counted by `ArrayId.slot`
    CONST = "const"  # the loss closed over it
    VALUE = "value"  # crosses a cut, or is of the batch
    COTANGENT = "cotangent"  # of a value
    COTANGENT_PART = "cotangent part"  # to be added to the cotangent
    GRADIENT = "gradient"  # of a parameter array
    GRADIENT_PART = "gradient part"  # to be added to the gradient
    GRADIENT_ROWS = "gradient rows"  # of a `RowSum`, to be added to the gradient
    ROW_NUMBERS = "row numbers"  # where those rows go
    NORM = "norm"  # a sum of squares of gradients
    RESIDUAL = "residual"  # kept from a forward pass for the backward pass

    @property
    def part(self) -> "Role":
        """Of what is to be added to an array of this role."""
        return PARTS[self]

    @property
    def total(self) -> "Role | None":
        """Of the sum to which an array of this role is added; None if it is no part."""
        return TOTALS.get(self)

    @property
    def lies_as(self) -> "Role":
        """The role whose arrays lie on the devices as those of this one do."""
        return LIES_AS.get(self, self)


PARTS = {
    Role.COTANGENT: Role.COTANGENT_PART,
    Role.GRADIENT: Role.GRADIENT_PART,
}
TOTALS = {part: total for total, part in PARTS.items()}
LIES_AS = {
    Role.CONST: Role.VALUE,
    Role.COTANGENT: Role.VALUE,
    Role.COTANGENT_PART: Role.VALUE,
    Role.GRADIENT_PART: Role.GRADIENT,
}
# The kinds of arrays that persist; the optimizer's have a number: "state0".
PERSISTENT = re.compile(r"(param|master|state(?=[0-9]))((?<=state)(?:0|[1-9][0-9]*))?")


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


Rows = tuple[int, int] | None
"""Rows of the leading dim, from the first to the one after the last; None is all."""


def overlaps(rows: Rows, other: Rows) -> bool:
    """Whether two selections of rows of one array have any in common."""
    if rows is None or other is None:
        return True
    return rows[0] < other[1] and other[0] < rows[1]


def covers(rows: Rows, other: Rows) -> bool:
    """Whether a selection of rows holds all of another one."""
    if rows is None or other is None:
        return rows is None
    return rows[0] <= other[0] and other[1] <= rows[1]


@dataclass(frozen=True, slots=True)
class ArrayId:
    """The name of an array, the same on every tier.

    `role` says what it is for, `path` whose it is: a parameter's key path such as
    "blocks/0/mlp/kernel", or a value of the program. `rows` selects rows of the leading
    dim: a leaf stacked over layers is kept as one array per layer, with
    `rows=(i, i + 1)`; `None` is the whole array. Values that exist once per microbatch
    carry its number, arrays of the optimizer state their place (`slot`) in optax's
    order: those of a leaf are "state0", "state1", ...
    """

    role: Role
    path: str
    rows: Rows = None
    microbatch: int | None = None
    slot: int | None = None
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _whole: "ArrayId | None" = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Planning looks names up millions of times; they are hashed once.
        name = (self.role, self.path, self.rows, self.microbatch, self.slot)
        object.__setattr__(self, "_hash", hash(name))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        rows = f"[{self.rows[0]}:{self.rows[1]}]" if self.rows else ""
        batch = f"@{self.microbatch}" if self.microbatch is not None else ""
        return f"{self.kind}/{self.path}{rows}{batch}"

    @property
    def kind(self) -> str:
        """Its role, with its place among the optimizer's arrays: "param", "state0"."""
        return str(self.role) if self.slot is None else f"{self.role}{self.slot}"

    @staticmethod
    def persistent(kind: str, path: str) -> "ArrayId":
        """The whole persistent array of a `kind`, as checkpoints name it.

        Raises:
            ValueError: no persistent array is of that kind.
        """
        found = PERSISTENT.fullmatch(kind)
        if found is None:
            raise ValueError(f"{kind!r} is no kind of array that persists")
        role, slot = found.groups()
        return ArrayId(Role(role), path, slot=int(slot) if slot else None)

    def piece(self, rows: Rows) -> "ArrayId":
        """The same array, of these rows alone."""
        return ArrayId(self.role, self.path, rows, self.microbatch, self.slot)

    def of_role(self, role: Role) -> "ArrayId":
        """The array of another role that belongs to this one."""
        return ArrayId(role, self.path, self.rows, self.microbatch)

    @property
    def lies_as(self) -> "ArrayId":
        """The whole array that lies on the devices as this one, or its whole, does."""
        return ArrayId(self.role.lies_as, self.path, slot=self.slot)

    @property
    def whole(self) -> "ArrayId":
        """The array that this one is rows of."""
        if self.rows is None:
            return self
        if self._whole is None:
            object.__setattr__(self, "_whole", self.piece(None))
        assert self._whole is not None
        return self._whole


@dataclass(frozen=True, slots=True)
class Leaf:
    """A parameter leaf; with `num_rows`, one that is stacked and kept by row."""

    path: str
    spec: ArraySpec
    is_trainable: bool
    num_rows: int | None = None

    def arrays(self) -> tuple[ArrayId, ...]:
        """The arrays that hold this leaf: one, or one a row when it is stacked."""
        return self.pieces(ArrayId(Role.PARAM, self.path))

    def pieces(self, whole: ArrayId) -> tuple[ArrayId, ...]:
        """The arrays that hold a whole array of this leaf, of whatever role."""
        if self.num_rows is None:
            return (whole,)
        return tuple(whole.piece((i, i + 1)) for i in range(self.num_rows))

    def array_spec(self) -> ArraySpec:
        """The spec of each of `arrays()`."""
        return self.spec if self.num_rows is None else self.spec.rows(0, 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A leaf that is read by tile, since a segment may not hold all of it.

    Attributes:
        nbytes, limit_bytes: of the leaf, and of the parameters of a segment.
        edges: the rows at which tiles begin and end, from 0 to their number.
        uses: how tiles are put together where the leaf is read.
    """

    path: str
    nbytes: int
    limit_bytes: int
    edges: tuple[int, ...]
    uses: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The rows of each tile."""
        return list(zip(self.edges[:-1], self.edges[1:], strict=True))


@dataclass(frozen=True, slots=True)
class RowSum:
    """A gradient that is zero but for a sum of rows, which a backward pass leaves so.

    Attributes:
        array: the parameter array that it is of, (V, ...).
        rows: `numbers.shape[:-1]` rows of it; equal numbers add up.
        numbers: of the rows, integers (..., 1); others than those of `array` add to
            nothing.
    """

    array: ArrayId
    rows: ArraySpec
    numbers: ArraySpec


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A piece of the program that runs at once.

    Attributes:
        params: parameter arrays, in argument order; `trainable` marks those that get a
            gradient. Its backward pass reads `backward_params` of them, where that is
            known: a bias or a table of embeddings, say, has no part in gradients.
        inputs: names of the values that it reads, in argument order; `active_inputs`
            are those that get a cotangent.
        outputs: names of the values that it computes; `active_outputs` are those whose
            cotangents its backward pass takes.
        body: number of its executable; equal segments share one.
        flops: floating-point operations of one forward pass.
        row_blocks: in how many blocks of rows its passes run, at least: more than one
            where its intermediate values are too large for the device.
        row_sums: the gradients that its backward pass leaves as rows.
    """

    name: str
    params: tuple[ArrayId, ...]
    trainable: tuple[bool, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    active_inputs: tuple[str, ...]
    active_outputs: tuple[str, ...]
    body: int
    flops: int
    backward_params: tuple[ArrayId, ...] | None = None
    row_blocks: int = 1
    row_sums: tuple[RowSum, ...] = ()

    @property
    def read_backward(self) -> tuple[ArrayId, ...]:
        """The parameter arrays that its backward pass reads."""
        known = self.backward_params
        return self.params if known is None else known

    @property
    def has_backward(self) -> bool:
        return bool(self.active_outputs)

    @property
    def trained_params(self) -> tuple[ArrayId, ...]:
        pairs = zip(self.params, self.trainable, strict=True)
        return tuple(array for array, trained in pairs if trained)


@dataclass(frozen=True, slots=True)
class Program:
    """A loss function cut into segments.

    The last segment computes the loss; it runs forward and backward at once.

    Attributes:
        values: the spec of every value that crosses a cut, and of batch and constants.
        batch: values given anew for every microbatch (batch leaves and the random key).
        consts: arrays that the loss function closed over; they stay on the device.
        loss: the name of the loss; `aux` the auxiliary outputs, in flattened order.
        tilings: leaves that are read by tile; `untiled` says of others that are larger
            than a segment may hold why they are not.
    """

    leaves: tuple[Leaf, ...]
    segments: tuple[SegmentSpec, ...]
    values: dict[str, ArraySpec] = field(repr=False)
    batch: tuple[str, ...]
    consts: tuple[str, ...]
    loss: str
    aux: tuple[str, ...]
    tilings: tuple[Tiling, ...] = ()
    untiled: dict[str, str] = field(default_factory=dict)

    def first_readers(self) -> dict[tuple[str, Rows], int]:
        """By path and rows of a parameter, also of whole leaves, the first segment that
        reads it."""
        found: dict[tuple[str, Rows], int] = {}
        for k, segment in enumerate(self.segments):
            for array in segment.params:
                for rows in (array.rows, None):
                    found.setdefault((array.path, rows), k)
        return found
